"""Prompts to record, from data of several kinds: generated tasks, plain text, conversations, or a file of prompts.

Each kind makes drafts, which say what is compressed and what may follow; a reading turns them into items with futures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..recorder import Item
from .lines import conversation_drafts, line_drafts
from .reading import Draft, Reading
from .tasks import task_drafts
from .texts import text_drafts

__all__ = ["Harvest", "Reading", "harvest"]

KINDS = "tasks:NAMES/inside, tasks:NAMES/after, text:FILE_OR_FOLDER, chat:FILE.jsonl or FILE.jsonl"


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """The prompts of one source of data, and how many were passed over for their length."""

    data: str
    items: list[Item]
    too_short: int
    too_long: int

    @property
    def note(self) -> str:
        """What is worth telling, "" if nothing."""
        passed = [(self.too_short, "too short"), (self.too_long, "too long")]
        told = [f"{number} {'was' if number == 1 else 'were'} {what}" for number, what in passed if number]
        return f"{self.data}: {len(self.items)} prompts; {' and '.join(told)}" if told else ""


def harvest(data: str, reading: Reading) -> Harvest:
    """The prompts of one source of data, such as `tasks:vt,niah/inside`, `text:novels` or `chat:trees.jsonl`.

    Args:
        data: "tasks:NAMES/inside" or "tasks:NAMES/after" with names of tasks, their beginnings, or "all"; "text:" with
            a file or a folder of .txt files; "chat:" with a file of conversations, each cut at a random token; or a
            .jsonl file of prompts or conversations (see `line_drafts`).

    Raises:
        ValueError: for data of no known kind, a line that cannot be used, and data without a prompt that is longer
            than the protected window and not longer than the reading allows.
        FileNotFoundError: for a file that is not there.
    """
    items: list[Item] = []
    too_short = too_long = 0
    for draft in _drafts(data, reading):
        branches = reading.branches(draft)
        if draft.token_ids.shape[1] < reading.fewest or not branches:
            too_short += 1
        elif draft.token_ids.shape[1] > reading.most:
            too_long += 1
        else:
            items.append(_item(draft, reading))
        if len(items) == reading.num_prompts:
            break
    found = Harvest(data=data, items=items, too_short=too_short, too_long=too_long)
    if not items:
        raise ValueError(_nothing_found(found, reading))
    return found


def _item(draft: Draft, reading: Reading) -> Item:
    return Item(
        source=draft.source,
        split=reading.split,
        name=draft.name,
        token_ids=draft.token_ids,
        branches=reading.branches(draft),
    )


def _drafts(data: str, reading: Reading) -> Iterator[Draft]:
    kind, _, place = data.partition(":")
    if kind == "tasks" and place:
        return task_drafts(place, reading)
    if kind == "text" and place:
        return text_drafts(Path(place), reading)
    if kind == "chat" and place:
        return conversation_drafts(Path(place), reading)
    if data.endswith(".jsonl"):
        return line_drafts(Path(data), reading)
    raise ValueError(f"cannot tell what data {data!r} is; give {KINDS}")


def _nothing_found(found: Harvest, reading: Reading) -> str:
    if found.note:
        wanted = f"{reading.fewest} to {reading.most} tokens and {reading.least_future} or more that follow"
        return f"{found.note}; a prompt needs {wanted}"
    return f"{found.data} has no prompts in the split {reading.split!r}; give more data, or another split"
