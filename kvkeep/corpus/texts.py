"""Prompts from plain text: pieces of it, each followed by what comes next."""

from collections.abc import Iterator
from pathlib import Path

from ..evaluate.prompts import token_ids
from .reading import Draft, Reading, cut, digest, read_text, split_of

# more than a token has in nearly any text
_CHARACTERS = 6


def text_drafts(path: Path, reading: Reading) -> Iterator[Draft]:
    """Pieces of a file, or of a folder's .txt files, in a random order that is always the same.

    A text that is too short for a whole piece has three quarters of it as the prompt.
    """
    texts = {file: read_text(file) for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])}
    if not any(text.strip() for text in texts.values()):
        raise ValueError(f"{path} has no text{' in .txt files' if path.is_dir() else ''}")
    size = _CHARACTERS * (reading.num_tokens + reading.future_tokens)
    pieces = [(file, start) for file, text in texts.items() for start in range(0, max(1, len(text) - size + 1), size)]
    for file, start in sorted(pieces, key=lambda piece: digest(f"{piece[0].name} {piece[1]}")):
        piece = texts[file][start : start + size]
        if split_of(piece) == reading.split:
            # not from the middle of a word on
            whole = piece[piece.find(" ") + 1 :] if start else piece
            ids = token_ids(reading.tokenizer, whole, special=True)
            yield cut(f"text/{file.stem}", f"{start:09d}", ids, min(reading.num_tokens, ids.shape[1] * 3 // 4))
