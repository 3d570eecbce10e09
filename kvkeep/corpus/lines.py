"""Prompts from JSON lines: prompts with answers or questions, messages, message trees, or texts.

T tokens.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor

from ..evaluate.prompts import token_ids, user_turn
from .reading import Draft, Reading, cut, digest, read_text, split_of

T = TypeVar("T")
# where a line may hold its prompt, and what follows it
PROMPTS = ("prompt", "question", "input")
ANSWERS = ("futures", "answer", "response", "output")
# what others call the two sides of a conversation
_ROLES = {"prompter": "user", "human": "user", "gpt": "assistant", "bot": "assistant"}


def line_drafts(path: Path, reading: Reading) -> Iterator[Draft]:
    """One prompt from each line of a file: what follows a prompt is its future, and conversations are cut somewhere.

    A line holds `messages`, a message tree (`prompt` with `replies`), `text`, or a prompt (PROMPTS) with `questions`
    about it or with what follows it (ANSWERS, one text or several); other fields are not read.
    """
    return _drafts(path, reading, _draft)


def conversation_drafts(path: Path, reading: Reading) -> Iterator[Draft]:
    """One prompt from each line of a file, cut at a token drawn uniformly; a prompt and its answer are two turns."""
    return _drafts(path, reading, _whole)


def each_line(path: Path, build: Callable[[str, str], T]) -> Iterator[T]:
    """What `build` makes of each line's number and text, blank lines left out.

    Raises:
        ValueError: for a file without lines, and, naming the line, for what `build` refuses.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty")
    for number, line in lines:
        try:
            yield build(f"{number:05d}", line)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error


def _drafts(path: Path, reading: Reading, draft: Callable[..., Draft]) -> Iterator[Draft]:
    def build(name: str, line: str) -> Draft | None:
        return draft(object_of(line), path.stem, name, reading) if split_of(line) == reading.split else None

    return (found for found in each_line(path, build) if found is not None)


def _draft(record: Mapping[str, Any], stem: str, name: str, reading: Reading) -> Draft:
    prompt, tokenizer = first_of(record, PROMPTS), reading.tokenizer
    if not isinstance(prompt, str) or "messages" in record:
        return _whole(record, stem, name, reading)
    turn, special = user_turn(tokenizer, prompt), tokenizer.chat_template is None
    source = f"prompts/{stem}"
    if not record.get("questions"):
        given = [token_ids(tokenizer, answer) for answer in _texts(record, ANSWERS)]
        return Draft(source=source, name=name, token_ids=token_ids(tokenizer, turn, special=special), given=given)
    end = turn.rfind(prompt.strip()) + len(prompt.strip())
    leads = [token_ids(tokenizer, f"\n\n{question}{turn[end:]}") for question in _texts(record, ["questions"])]
    return Draft(source=source, name=name, token_ids=token_ids(tokenizer, turn[:end], special=special), leads=leads)


def _whole(record: Mapping[str, Any], stem: str, name: str, reading: Reading) -> Draft:
    """A conversation or a text, cut at a token drawn uniformly."""
    kind = "text" if isinstance(record.get("text"), str) else "chat"
    ids = (
        token_ids(reading.tokenizer, record["text"], special=True)
        if kind == "text"
        else _conversation_ids(reading.tokenizer, _conversation(record))
    )
    last = min(reading.num_tokens, ids.shape[1] - reading.least_future)
    draws = random.Random(f"{reading.seed} {digest(json.dumps(record, sort_keys=True))}")
    at = draws.randint(reading.fewest, last) if last >= reading.fewest else max(0, last)
    return cut(f"{kind}/{stem}", name, ids, at)


def _conversation(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Turns from messages, from the longest path of a message tree, or from a prompt and its answer."""
    prompt = first_of(record, PROMPTS)
    if isinstance(record.get("messages"), list):
        return [_message(message) for message in record["messages"]]
    if isinstance(prompt, Mapping):
        return _longest(prompt)
    if isinstance(prompt, str):
        answers = [{"role": "assistant", "content": answer} for answer in _texts(record, ANSWERS)]
        return [{"role": "user", "content": prompt}, *answers[:1]]
    raise ValueError(f"it has no messages, text or {' or '.join(PROMPTS)}, only {', '.join(record) or 'nothing'}")


def _longest(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """The path of most text through a message and its replies."""
    paths = [_longest(reply) for reply in message.get("replies") or []]
    longest = max(paths, key=lambda path: sum(len(turn["content"]) for turn in path), default=[])
    return [_message(message), *longest]


def _message(raw: Any) -> dict[str, str]:
    content = raw.get("content", raw.get("text")) if isinstance(raw, Mapping) else None
    if not isinstance(content, str) or not isinstance(raw.get("role"), str):
        raise ValueError(f"a message needs a role and a content of text, got {raw!r:.80}")
    return {"role": _ROLES.get(raw["role"], raw["role"]), "content": content}


def _conversation_ids(tokenizer: Any, messages: list[dict[str, str]]) -> Int[Tensor, "1 T"]:
    if tokenizer.chat_template is None:
        return token_ids(tokenizer, "\n\n".join(message["content"] for message in messages), special=True)
    return token_ids(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))


def first_of(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these fields that there is, None if there is none."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _texts(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The first of these fields, which holds one text or several; none where there is no such field."""
    found = first_of(record, names)
    texts = [found] if isinstance(found, str) else found or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{' or '.join(names)} must be a text or a list of texts, got {found!r:.80}")
    return texts


def object_of(line: str) -> dict[str, Any]:
    """The object that a line holds."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    return record
