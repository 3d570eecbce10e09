"""Needles in a haystack: lines that give a key its value, among noise, prose or lines of the same form."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from .draw import Draw, insert
from .prose import haystack
from .recipe import Recipe
from .vocabulary import adjectives_and_nouns
from .wording import Draft

Filling = Literal["noise", "prose", "needles"]
Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles(Recipe):
    """`num_keys` keys with `num_values` values each, hidden in a filling; the question asks for `num_queries` keys."""

    filling: Filling = "prose"
    keys: Kind = "words"
    values: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    family: ClassVar[str] = "niah"

    def build(self, size: int) -> Draft:
        draw = self.setting.draw
        keys = draw.distinct(self.num_keys, lambda: self._one(draw, self.keys))
        values = draw.distinct(self.num_keys * self.num_values, lambda: self._one(draw, self.values))
        owners = [key for key in keys for _ in range(self.num_values)]
        needles = [self._needle(key, value) for key, value in zip(owners, values, strict=True)]
        asked = draw.random.sample(keys, self.num_queries)
        depths = draw.depths(len(needles))
        mixed = insert(self._fill(draw, size, keys), needles, depths)
        answers = [value for key in asked for owner, value in zip(owners, values, strict=True) if owner == key]
        context = (" " if self.filling == "prose" else "\n").join(mixed)
        if len(answers) > 1:
            return self.template.draft(context, answers, type_needle_v=self.values, query=_listed(asked))
        kind = self.values.removesuffix("s")
        return self.template.singular().draft(context, answers, type_needle_v=kind, query=_listed(asked))

    def _one(self, draw: Draw, kind: Kind) -> str:
        if kind == "numbers":
            return draw.number(7)
        if kind == "uuids":
            return draw.uuid()
        adjectives, nouns = adjectives_and_nouns(self.setting.data)
        return f"{draw.random.choice(draw.own(adjectives))}-{draw.random.choice(nouns)}"

    @cached_property
    def _form(self) -> str:
        return self.setting.wording.line("_needle")

    def _needle(self, key: str, value: str) -> str:
        return self._form.format(type_needle_v=self.values, key=key, value=value)

    def _fill(self, draw: Draw, size: int, keys: list[str]) -> list[str]:
        if self.filling == "noise":
            return [self.setting.wording.line("_noise_haystack")] * size
        if self.filling == "prose":
            text = haystack(self.setting.haystack, self.setting.split)
            start = draw.random.randrange(len(text))
            return [text[(start + offset) % len(text)] for offset in range(size)]
        return [self._needle(self._other(draw, keys), self._one(draw, self.values)) for _ in range(size)]

    def _other(self, draw: Draw, keys: list[str]) -> str:
        while (key := self._one(draw, self.keys)) in keys:
            pass
        return key


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
