"""Prompts from the task generator."""

from collections.abc import Iterator

from ..evaluate.prompts import QUESTION_PLACES, encode, token_ids
from ..evaluate.tasks import TASKS, generate
from ..names import nearest
from .reading import Draft, Reading


def task_drafts(place: str, reading: Reading) -> Iterator[Draft]:
    """Tasks in turns, the first prompt of each, then the second of each; `place` is "NAMES/inside" or "NAMES/after"."""
    names, _, question = place.rpartition("/")
    if question not in QUESTION_PLACES:
        raise ValueError(f"tasks:{place} must end in /inside or /after: is the question compressed with the text?")
    tasks = _chosen(names)
    for number in range(reading.num_prompts):
        for task in tasks:
            yield _draft(task, number, question, reading)


def _draft(task: str, number: int, question: str, reading: Reading) -> Draft:
    sample = generate(
        task,
        num_tokens=reading.num_tokens,
        count_tokens=lambda text: token_ids(reading.tokenizer, text).shape[1],
        split=reading.split,
        index=number,
        haystack=reading.haystack,
        templates=reading.templates,
        data=reading.documents,
    )
    prompt = encode(reading.tokenizer, sample, question)
    return Draft(
        source=f"{task}/{question}",
        name=f"{number:05d}",
        token_ids=prompt.compressed,
        leads=[prompt.follow_up],
        num_new=sample.max_new_tokens,
    )


def _chosen(text: str) -> list[str]:
    """Tasks by name, by the beginning of their names, or "all"."""
    found: list[str] = []
    for part in text.split(","):
        named = (
            [part] if part in TASKS else [task for task in TASKS if part == "all" or (part and task.startswith(part))]
        )
        if not named:
            raise ValueError(f"unknown task {part!r}; {nearest(part, [*TASKS, 'all'])}")
        found += named
    return list(dict.fromkeys(found))
