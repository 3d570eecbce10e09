"""The side-by-side table, in Markdown, from the rows of both libraries and the reasons beside them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scenarios import SCENARIOS, Metric

from kvkeep.evaluate.rows import Row, read_rows

HEADING = ("scenario", "measured", "must be", "kvpress", "kvkeep")


class Side:
    """One library's rows and reasons."""

    def __init__(self, path: Path):
        self.rows = read_rows(path)
        self.name = self.rows[0].extra["library"]
        lines = path.with_name(f"{path.stem}-raw.jsonl").read_text().splitlines()
        self.missing = [raw for raw in map(json.loads, lines) if "reason" in raw]

    @property
    def versions(self) -> str:
        versions = self.rows[0].versions
        return f"{self.name} {versions[self.name]} (transformers {versions['transformers']})"

    def of(self, model: str, task: str, metric: str) -> list[Row]:
        return [row for row in self.rows if (row.model, row.task, row.metric) == (model, task, metric)]

    def reasons(self, model: str, task: str) -> list[dict[str, Any]]:
        return [raw for raw in self.missing if (raw["model"], raw["task"]) == (model, task)]


class Notes:
    """Reasons, numbered as they come up."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def table(*paths: Path) -> str:
    """Markdown: a line for each scenario, model and number; what does not apply has its reason below."""
    sides = [Side(path) for path in paths]
    by_name = {side.name: side for side in sides}
    kvpress, kvkeep = by_name["kvpress"], by_name["kvkeep"]
    notes = Notes()
    heading = (*HEADING[:3], kvpress.versions, kvkeep.versions)
    lines = [_line(heading), _line(["---"] * len(heading)), *_body(kvpress, kvkeep, notes)]
    reasons = [f"{number}. {text}" for number, text in enumerate(notes.texts, 1)]
    return "\n".join([*lines, "", *reasons])


def _body(kvpress: Side, kvkeep: Side, notes: Notes) -> Iterator[str]:
    models = list(dict.fromkeys(row.model for row in kvkeep.rows))
    for task, scenario in SCENARIOS.items():
        for model in models:
            title = f"{scenario.title} · {model}"
            for name, metric in scenario.metrics.items():
                if not kvpress.of(model, task, name) + kvkeep.of(model, task, name):
                    continue
                cells = [_cell(side, model, task, name, metric, notes) for side in (kvpress, kvkeep)]
                yield _line([title, metric.text, metric.right, *cells])
                title = ""


def _cell(side: Side, model: str, task: str, name: str, metric: Metric, notes: Notes) -> str:
    rows = side.of(model, task, name)
    measured = {row.policy: _shown(row.value, metric.kind) for row in rows}
    parts = [f"{policy} {text}" for policy, text in measured.items()]
    if len(set(measured.values())) == 1:
        parts = [next(iter(measured.values()))]
    for raw in side.reasons(model, task):
        kind, _, reason = raw["reason"].partition(": ")
        parts.append(f"{raw['policy']} {kind} ({notes.number(reason)})")
    return ", ".join(parts)


def _shown(value: float, kind: str) -> str:
    if kind == "share":
        return f"{100 * value:.3g}%"
    return f"{value:.1g}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
