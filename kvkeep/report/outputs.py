"""A few samples with what each policy answered, chosen where policies disagree."""

from collections.abc import Iterable, Mapping
from statistics import pvariance
from typing import Any, NamedTuple

from kvkeep.report.tables import grouped


class Output(NamedTuple):
    """What one policy answered at one budget."""

    policy: str
    budget: str
    score: float
    text: str


class Case(NamedTuple):
    """One sample of a task: the prompt (shortened, empty if it was not recorded), the answers, and all outputs."""

    title: str
    prompt: str
    answers: list[str]
    outputs: list[Output]


def cases_by_task(records: Iterable[Mapping[str, Any]], per_task: int = 2) -> dict[str, list[Case]]:
    """The `per_task` samples of each task whose scores differ most between policies, earliest first among equals."""
    tasks = grouped(records, lambda record: str(record.get("task") or ""))
    return {task: _most_telling(found, per_task) for task, found in tasks.items()}


def _most_telling(records: list[Mapping[str, Any]], count: int) -> list[Case]:
    # answers tell samples apart that were saved without an index
    names = ("model", "length", "question", "split", "seed", "index", "answers")
    samples = grouped(records, lambda record: tuple(str(record.get(name)) for name in names))
    ranked = sorted(samples.values(), key=lambda found: -pvariance(record["score"] for record in found))
    return [_case(found) for found in ranked[:count]]


def _case(records: list[Mapping[str, Any]]) -> Case:
    first = records[0]
    extra = first.get("extra") or {}
    outputs = [
        Output(
            str(record.get("policy", "")),
            str(record.get("budget", "")),
            record["score"],
            shorten(str(record.get("output", "")), 300),
        )
        for record in sorted(records, key=lambda record: record.get("policy") != "full")
    ]
    prompt = shorten(str(first.get("prompt") or extra.get("prompt") or ""), 1200)
    return Case(_title(first), prompt, [str(answer) for answer in first.get("answers") or []], outputs)


def _title(record: Mapping[str, Any]) -> str:
    question = f"question {record['question']}" if record.get("question") else ""
    tokens = f"{record['prompt_tokens']:,} tokens" if record.get("prompt_tokens") else ""
    index = f"sample {record['index']}" if record.get("index") is not None else ""
    return " · ".join(part for part in (str(record.get("model") or ""), index, tokens, question) if part)


def shorten(text: str, limit: int) -> str:
    """The text, or its start and its end where it is longer than `limit` characters; questions stand at the end."""
    if len(text) <= limit:
        return text
    start, end = text[: limit // 3], text[-(limit - limit // 3) :]
    return f"{start} … [{len(text) - limit:,} characters left out] … {end}"
