"""The page: one HTML file that needs no other, with every text from rows, prompts and models escaped."""

from base64 import b64encode
from collections.abc import Sequence
from typing import NamedTuple

from kvkeep.evaluate.rows import Row
from kvkeep.report.outputs import Case
from kvkeep.report.plots import full_bytes_of
from kvkeep.report.tables import Block, grouped, metric_tables, notices, origins
from kvkeep.report.templates import environment
from kvkeep.report.wording import bounds, mebibytes, number, percent


class Plot(NamedTuple):
    """One drawing as PNG images for a light and for a dark page."""

    name: str
    caption: str
    light: bytes
    dark: bytes


class Section(NamedTuple):
    """A block of rows with its plots."""

    block: Block
    plots: list[Plot]


def render(
    rows: Sequence[Row], sections: Sequence[Section], cases: dict[str, list[Case]], along: Sequence[Plot] = ()
) -> str:
    """The page as HTML. `cases` are shown in folded parts by task, `along` are plots by position; none if empty."""
    pages = environment()
    pages.filters |= {
        "percent": percent,
        "bounds": bounds,
        "mebibytes": mebibytes,
        "number": number,
        "groups": lambda lines: grouped(lines, lambda line: line.arm.budget).items(),
    }
    return pages.get_template("page.html").render(
        title="kvkeep report",
        subtitle=_subtitle(rows),
        notices=notices(rows),
        sections=[_section(section) for section in sections],
        along=[{"caption": plot.caption, "light": _data(plot.light), "dark": _data(plot.dark)} for plot in along],
        metrics=metric_tables(rows),
        cases=cases,
        origins=origins(rows),
    )


def _subtitle(rows: Sequence[Row]) -> str:
    counts = {
        "model": {row.model for row in rows if row.model},
        "policy": {row.policy for row in rows if row.policy not in ("", "full")},
        "task": {row.task for row in rows if row.task},
    }
    plurals = {"model": "models", "policy": "policies", "task": "tasks"}
    words = [f"{len(found)} {name if len(found) == 1 else plurals[name]}" for name, found in counts.items() if found]
    return " · ".join([*words, f"{len(rows):,} rows"])


def _section(section: Section) -> dict[str, object]:
    lines = section.block.lines
    plots = [
        {
            "caption": plot.caption,
            "light": _data(plot.light),
            "dark": _data(plot.dark),
            "narrow": plot.name == "bytes" or len(section.block.questions) == 1,
        }
        for plot in section.plots
    ]
    return {
        "block": section.block,
        "plots": plots,
        "full_bytes": full_bytes_of(section.block),
        "has_speed": any(line.tokens_per_s is not None for line in lines),
    }


def _data(image: bytes) -> str:
    return f"data:image/png;base64,{b64encode(image).decode()}"
