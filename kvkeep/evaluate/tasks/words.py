"""Counting: the most common words of a numbered list, and of a text in code."""

from dataclasses import dataclass
from math import pi
from typing import ClassVar, NamedTuple

from .draw import Draw
from .recipe import Recipe
from .vocabulary import plain_words
from .wording import Draft


class Repeats(NamedTuple):
    """How often a common word comes up, and any other."""

    common: int
    other: int


COMMON = 10
# a list of fewer tokens has no room for 300 common entries
LONG_FROM = 4096
LONG, SHORT = Repeats(30, 3), Repeats(6, 1)
LONG_EXAMPLE, SHORT_EXAMPLE = Repeats(10, 3), Repeats(3, 1)
ZETA_2 = pi**2 / 6


@dataclass(frozen=True)
class CommonWords(Recipe):
    """A shuffled list in which ten words come up 30 times and `size` others 3 times (below 4,096 tokens 6 and once)."""

    family: ClassVar[str] = "common_words_extraction"

    def build(self, size: int) -> Draft:
        draw = self.setting.draw
        is_long = self.setting.num_tokens >= LONG_FROM
        example = ""
        if self.with_example:
            shown = self._list(draw, 30 if is_long else 10, LONG_EXAMPLE if is_long else SHORT_EXAMPLE)
            example = f"{shown.text} {_numbered(list(shown.answers))}\n"
        return self._list(draw, size, LONG if is_long else SHORT, example)

    def _list(self, draw: Draw, num_others: int, repeats: Repeats, example: str = "") -> Draft:
        words = plain_words(self.setting.data)
        common = draw.random.sample(draw.own(words), COMMON)
        others = sorted(set(words) - set(common))
        draw.random.shuffle(others)
        # once every word is used they come again, and the common words as much more often
        rounds = -(-num_others // len(others))
        entries = common * (repeats.common * rounds)
        entries += [others[at % len(others)] for at in range(num_others)] * repeats.other
        draw.random.shuffle(entries)
        return self.template.draft(_numbered(entries), common, example=example)


@dataclass(frozen=True)
class FrequentCodes(Recipe):
    """Made-up words whose k-th comes up in proportion to 1 / k^2; the first is dots, the next three are the answer."""

    family: ClassVar[str] = "freq_words_extraction"
    # from here on the third answer comes up more often than the word after it
    smallest: ClassVar[int] = 53

    def build(self, size: int) -> Draft:
        draw = self.setting.draw
        counts = [int(size / ZETA_2 / rank**2) for rank in range(1, int(size**0.5) + 1)]
        codes = ["...", *draw.distinct(len(counts), lambda: draw.code(6))]
        entries = [code for code, count in zip(codes, counts, strict=False) for _ in range(count)]
        draw.random.shuffle(entries)
        return self.template.draft(" ".join(entries), codes[1:4])


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
