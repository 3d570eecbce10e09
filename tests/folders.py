"""A tiny model with its tokenizer on disk, for what loads models by name."""

from pathlib import Path
from typing import Any

from conftest import build_tiny
from letters import letter_tokenizer


def save_tiny(path: Path, **changes: Any) -> str:
    """Save the tiny Llama and a tokenizer of letters as a transformers folder; its name."""
    build_tiny("llama", **changes).save_pretrained(path)
    letter_tokenizer().save_pretrained(path)
    return str(path)
