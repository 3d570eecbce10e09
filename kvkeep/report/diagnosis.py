"""The page of a diagnosis: curves, a map of layers and heads, and a text with the fate of each of its tokens."""

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kvkeep.evaluate.rows import Row, bootstrap, read_rows, read_samples, replace_file
from kvkeep.report.tables import Arm, grouped, origins
from kvkeep.report.templates import environment, part
from kvkeep.report.wording import number, percent

# metric of a row, heading, and whether it is a share
_COLUMNS = (
    ("future_missed_mass", "missed mass %", True),
    ("future_missed_mass_full", "missed in full precision %", True),
    ("churn", "churn %", True),
    ("lir", "rescued %", True),
    ("lir_in_time", "rescued in time %", True),
    ("time_to_revival", "events to revival", False),
    ("q_score_cosine", "cosine through codes", False),
    ("q_score_recovered", "attention through codes %", True),
)
_CURVES = ("missed", "missed_full", "churn")


class _Cell(NamedTuple):
    value: str
    span: str


def write_diagnosis(folder: Path) -> Path:
    """Write `folder`/diagnose.html from what `kvkeep diagnose` left there; returns its path.

    Raises:
        FileNotFoundError: where there are no rows or samples.
        ValueError: for damaged files.
    """
    rows, samples = folder / "rows.jsonl", folder / "samples.jsonl"
    for file in (rows, samples):
        if not file.is_file():
            raise FileNotFoundError(errno.ENOENT, "nothing was diagnosed here; `kvkeep diagnose` does", str(file))
    page = folder / "diagnose.html"
    views = [json.loads(file.read_text()) for file in sorted((folder / "views").glob("*.json"))]
    replace_file(page, render(read_rows(rows), read_samples(samples), views).encode("utf-8", "replace"))
    return page


def render(rows: Sequence[Row], samples: Sequence[Mapping[str, Any]], views: Sequence[Mapping[str, Any]]) -> str:
    """The page as HTML; every text in it is escaped."""
    from markupsafe import Markup

    arms = grouped(rows, lambda row: Arm(row.policy, row.budget))
    measured = {row.metric for row in rows}
    columns = [column for column in _COLUMNS if column[0] in measured]
    # a folder may hold more than the rows are of: runs that named other policies, or were stopped
    told = {arm: found for arm, found in grouped(samples, _arm_of).items() if arm in arms}
    shown = sorted((view for view in views if _arm_of(view) in told), key=lambda view: list(told).index(_arm_of(view)))
    data = {"arms": [_arm(*found) for found in told.items()], "views": shown}
    table = [(arm, _cells(found, columns)) for arm, found in arms.items()]
    return (
        environment()
        .get_template("diagnosis.html")
        .render(
            title="kvkeep diagnosis",
            # our own file, and what cannot end its element
            script=Markup(part("diagnosis.js")),
            data=Markup(_embedded(data)),
            headings=[heading for _, heading, _ in columns],
            budgets=grouped(table, lambda line: line[0].budget),
            first=rows[0],
            has_views=bool(shown),
            origins=origins(rows),
        )
    )


def _arm_of(named: Mapping[str, Any]) -> Arm:
    return Arm(named["policy"], named["budget"])


def _embedded(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end that or open a comment."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cells(rows: Sequence[Row], columns: Sequence[tuple[str, str, bool]]) -> list[_Cell]:
    known = {row.metric: row for row in rows}
    return [_cell(known.get(metric), is_share) for metric, _, is_share in columns]


def _cell(row: Row | None, is_share: bool) -> _Cell:
    if row is None:
        return _Cell("–", "")
    write = percent if is_share else number
    return _Cell(write(row.value), f"{write(row.low)}–{write(row.high)}")


def _arm(arm: Arm, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    heads = [sample["heads"] for sample in samples]
    return {
        **arm._asdict(),
        "curves": {name: _curve([sample["curve"] for sample in samples], name) for name in _CURVES},
        "heads": {
            name: [
                [fmean(values) for values in zip(*layer, strict=True)]
                for layer in zip(*(one[name] for one in heads), strict=True)
            ]
            for name in heads[0]
        },
    }


def _curve(curves: Sequence[Mapping[str, list[Any]]], name: str) -> list[list[float | int]]:
    """Step, mean over texts that reach it, and its 95% interval."""
    points: list[list[float | int]] = []
    longest = max(curves, key=lambda curve: len(curve["step"]))
    for place, step in enumerate(longest["step"]):
        values = [curve[name][place] for curve in curves if len(curve["step"]) > place]
        bounds = bootstrap(values)
        points.append([step, round(fmean(values), 5), round(bounds.low, 5), round(bounds.high, 5)])
    return points
