"""The words that keys and word lists are made of."""

import json
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from .prose import BUNDLED

KEYS = Path(__file__).with_name("keys.json")
# the splits share them out, and ten of a third must be drawn
FEWEST = 100


@lru_cache(maxsize=4)
def adjectives_and_nouns(data: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for keys such as "amber-lantern": our own, or the word lists under `data` where it has them."""
    lists = _lists(data, "adjectivelist", "nounlist")
    if not lists:
        own = json.loads(KEYS.read_text(encoding="utf-8"))
        lists = [tuple(own[name].split()) for name in ("adjectives", "nouns")]
    return lists[0], lists[1]


@lru_cache(maxsize=4)
def plain_words(data: Path | None) -> tuple[str, ...]:
    """Single words in alphabetical order: those of the bundled text, or of the word lists under `data`.

    Of the bundled text we take what has four to ten letters, comes up twice or more and is never capitalised.
    """
    lists = _lists(data, "adjectivelist", "nounlist", "verblist")
    if lists:
        return tuple(sorted({word for words in lists for word in words}))
    text = " ".join(file.read_text(encoding="utf-8") for file in sorted(BUNDLED.glob("*.txt")))
    counts = Counter(re.findall(r"\b[A-Za-z]+\b", text))
    names = {word.lower() for word in counts if not word.islower()}
    common = [word for word, count in counts.items() if count > 1 and word.islower() and word not in names]
    return tuple(sorted(word for word in common if 4 <= len(word) <= 10))


def _lists(data: Path | None, *names: str) -> list[tuple[str, ...]]:
    """The word lists of that name, one word a line; none unless all are there."""
    files = [data / "ruler" / f"{name}.txt" for name in names] if data else []
    if not all(file.is_file() for file in files):
        return []
    lists = [tuple(sorted(set(file.read_text(encoding="utf-8").split("\n")) - {""})) for file in files]
    for file, words in zip(files, lists, strict=True):
        if len(words) < FEWEST:
            raise ValueError(
                f"{file} has {len(words)} words; it takes {FEWEST} or more, or no such file for our own words"
            )
    return lists
