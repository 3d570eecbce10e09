"""Random things that only one split can draw."""

from collections.abc import Callable, Sequence
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import TypeVar
from uuid import UUID

from .sample import SPLITS

T = TypeVar("T")
# needles stand at one of so many evenly spread depths
DEPTHS = 40


class Draw:
    """Keys, values and places from a seed; what identifies an answer comes in three kinds, one for each split.

    So no two splits share a number, a uuid, a code or an own word, whatever their seeds.
    """

    def __init__(self, split: str, seed: int) -> None:
        self.random = Random(seed)
        self.part = SPLITS.index(split)

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Every third of the items, the split's own."""
        return items[self.part :: len(SPLITS)]

    def number(self, digits: int) -> str:
        """A number of `digits` digits; divided by three it leaves the split's own rest."""
        low, high = 10 ** (digits - 1), 10**digits
        return str(len(SPLITS) * self.random.randrange(low // len(SPLITS) + 1, high // len(SPLITS)) + self.part)

    def uuid(self) -> str:
        """A uuid of version 4, whose last two bits are the split's own."""
        return str(UUID(int=self.random.getrandbits(128) & ~3 | self.part, version=4))

    def code(self, letters: int, *, upper: bool = False) -> str:
        """Random letters; the last is the split's own."""
        alphabet = ascii_uppercase if upper else ascii_lowercase
        return "".join([*self.random.choices(alphabet, k=letters - 1), self.random.choice(self.own(alphabet))])

    def distinct(self, count: int, one: Callable[[], str]) -> list[str]:
        """`count` different results of `one`, in the order they came."""
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[one()] = None
        return list(drawn)

    def depths(self, count: int) -> list[float]:
        """Different places in a text, 0 its start and 1 its end, in no order."""
        return [step / (DEPTHS - 1) for step in self.random.sample(range(DEPTHS), count)]


def insert(units: Sequence[str], items: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The units with every item at its depth among them; items at one place keep the order of their depths."""
    mixed = list(units)
    for depth, item in sorted(zip(depths, items, strict=True), reverse=True):
        mixed.insert(round(depth * len(units)), item)
    return mixed
