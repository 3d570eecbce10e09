"""Plain text as haystack: files, sentences, and the third of them that a split may use."""

import re
from functools import lru_cache
from pathlib import Path

from .sample import SPLITS

BUNDLED = Path(__file__).parents[1] / "haystack"
HEADING = "# "
# a longer sentence is cut, so that text without full stops still fills a length closely
LONGEST = 60
_TITLES = "".join(rf"(?<!\b{title}\.)" for title in ("Mr", "Mrs", "Dr", "St", "No", "[A-Z]"))
_SENTENCE_END = re.compile(rf"(?:(?<=[.!?]){_TITLES}|(?<=[.!?][\"'”’]))\s+(?=[\"'“‘(]*[A-Z0-9])")


@lru_cache(maxsize=16)
def haystack(path: Path | None, split: str) -> tuple[str, ...]:
    """The sentences of a folder of .txt files, or of one such file, that belong to `split`; the bundled text for None.

    Every file gives its first third to train, its second to validation and its last to test.

    Raises:
        ValueError: if there is no readable text.
    """
    source = path or BUNDLED
    files = [source] if source.is_file() else sorted(source.glob("*.txt"))
    part = SPLITS.index(split)
    found: list[str] = []
    for file in files:
        lines = [line for line in paragraphs(file) if not line.startswith(HEADING)]
        units = [sentence for line in lines for sentence in sentences(line)]
        found += units[len(units) * part // len(SPLITS) : len(units) * (part + 1) // len(SPLITS)]
    if not found:
        what = f"{len(files)} .txt files with too little text" if files else "no .txt file"
        raise ValueError(
            f"haystack {source} holds {what}; it takes a folder of .txt files, or one, with three sentences or more"
        )
    return tuple(found)


def paragraphs(file: Path) -> list[str]:
    """The paragraphs of a UTF-8 text, each on one line: parted by empty lines, or by line breaks if there are none."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read haystack {file} as UTF-8 text: {error}; convert or remove it") from error
    pieces = re.split(r"\n\s*\n" if re.search(r"\n[ \t]*\n", text) else r"\n", text)
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; joined by spaces they give it back."""
    cut = [sentence.split(" ") for sentence in _SENTENCE_END.split(paragraph)]
    return [" ".join(words[at : at + LONGEST]) for words in cut for at in range(0, len(words), LONGEST)]
