"""The thirteen task structures of RULER at any length, in our own words and over our own text.

Structures and parameters: RULER, https://arxiv.org/abs/2404.06654. docs/tasks.md describes them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...names import nearest
from .demo import Fact, chapter, demo_document
from .fitting import fit
from .needles import Needles
from .qa import Documents
from .recipe import Recipe, Setting
from .sample import SPLITS, Sample, score
from .tracking import Tracking
from .wording import Wording
from .words import CommonWords, FrequentCodes

__all__ = ["SPLITS", "TASKS", "Fact", "Sample", "chapter", "demo_document", "generate", "score", "seed_of"]

TASKS: dict[str, Callable[[Setting], Recipe]] = {
    "niah_single_1": partial(Needles, filling="noise"),
    "niah_single_2": Needles,
    "niah_single_3": partial(Needles, values="uuids"),
    "niah_multikey_1": partial(Needles, num_keys=4),
    "niah_multikey_2": partial(Needles, filling="needles"),
    "niah_multikey_3": partial(Needles, filling="needles", keys="uuids", values="uuids"),
    "niah_multivalue": partial(Needles, num_values=4),
    "niah_multiquery": partial(Needles, num_keys=4, num_queries=4),
    "vt": Tracking,
    "cwe": CommonWords,
    "fwe": FrequentCodes,
    "qa_1": Documents,
    "qa_2": partial(Documents, num_hops=2),
}


def seed_of(split: str, task: str, index: int) -> int:
    """The seed of a sample. No two of (split, task, index) share one: it counts through the splits and tasks."""
    return (index * len(TASKS) + list(TASKS).index(task)) * len(SPLITS) + SPLITS.index(split)


def generate(
    task: str,
    *,
    num_tokens: int,
    count_tokens: Callable[[str], int],
    split: str = "test",
    index: int = 0,
    haystack: Path | None = None,
    templates: Path | None = None,
    data: Path | None = None,
) -> Sample:
    """The `index`-th sample of a task and split, as long as fits into `num_tokens`; always the same one.

    Args:
        task: a key of `TASKS`.
        num_tokens: length of context, question and answer prefix together, without a chat template's tokens.
        count_tokens: tokens in a text.
        haystack: a folder of .txt files, or one such file, in place of the bundled prose.
        templates: a JSON file with other words around the tasks; RULER's own give its official form.
        data: a folder with qa/ (documents and questions) and ruler/ (word lists), in place of invented ones.

    Raises:
        ValueError: for an unknown task or split, a length that the task does not fit in, and unusable files.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is not known: {nearest(task, TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not known: {nearest(split, SPLITS)}")
    if index < 0:
        raise ValueError(f"index={index} is negative; samples are counted from 0")
    seed = seed_of(split, task, index)
    setting = Setting(
        split=split,
        index=index,
        seed=seed,
        num_tokens=num_tokens,
        wording=Wording.read(templates),
        haystack=haystack,
        data=data,
    )
    recipe = TASKS[task](setting)
    try:
        draft, length = fit(recipe.build, count_tokens, num_tokens, recipe.smallest)
    except ValueError as error:
        raise ValueError(f"{task}: {error}") from error
    return Sample(
        task=task,
        split=split,
        index=index,
        seed=seed,
        context=draft.context,
        question=draft.question,
        answer_prefix=draft.answer_prefix,
        answers=draft.answers,
        max_new_tokens=recipe.template.max_new_tokens,
        num_tokens=length,
    )
