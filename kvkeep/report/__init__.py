"""From rows to tables, plots and one page that stands alone."""

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvkeep.evaluate.rows import Row, read_rows, read_samples, replace_file
from kvkeep.report.diagnosis import write_diagnosis
from kvkeep.report.outputs import cases_by_task
from kvkeep.report.page import Plot, Section, render
from kvkeep.report.plots import DARK, LIGHT, accuracy_plot, bytes_plot
from kvkeep.report.positions import stretches
from kvkeep.report.tables import Block, blocks
from kvkeep.report.terminal import print_table

__all__ = ["Report", "print_table", "write_diagnosis", "write_report"]

ACCURACY_CAPTION = "Accuracy against the cache's budget. Bands are 95% intervals; the dashed line is the full cache."
BYTES_CAPTION = "What the cache really held, summed over its storages, against the full cache."


class Report(NamedTuple):
    """The files that were written."""

    html: Path
    pngs: list[Path]


def write_report(
    rows: Path | Sequence[Row], out: Path, *, samples: Path | Sequence[Mapping[str, Any]] | None = None
) -> Report:
    """Write the page and its plots; rows come from a file or as they are.

    `out` is the page itself if it ends in .html, else a folder that gets report.html; plots go beside it as PNG files
    that begin with the page's name. `samples` are a sample log's, as a file or as records: some of their outputs are
    shown by task. Settings without a full-cache row are reported too, and said to lack it. ValueError for no rows and
    for damaged files, FileNotFoundError for missing ones.
    """
    found = _rows(rows)
    html = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    cases = cases_by_task(_samples(samples)) if samples is not None else {}
    all_blocks = blocks(found)
    policies = list(dict.fromkeys(line.arm.policy for block in all_blocks for line in block.lines))
    policies = [policy for policy in policies if policy != "full"]
    sections = [Section(block, _plots(block, policies)) for block in all_blocks]
    along = [Plot("positions", stretch.title, stretch.light, stretch.dark) for stretch in stretches(found)]
    page = render(found, sections, cases, along)
    pngs = []
    for index, section in enumerate(sections, 1):
        # the number keeps names apart that differ only in what a file name cannot hold
        place = f"-{index}-{_slug(section.block.setting.title)}" if len(sections) > 1 else ""
        for plot in section.plots:
            pngs.append(html.with_name(f"{html.stem}-{plot.name}{place}.png"))
            replace_file(pngs[-1], plot.light)
    for index, plot in enumerate(along, 1):
        pngs.append(html.with_name(f"{html.stem}-{plot.name}-{index}-{_slug(plot.caption)}.png"))
        replace_file(pngs[-1], plot.light)
    replace_file(html, page.encode("utf-8", "replace"))
    return Report(html, pngs)


def _rows(rows: Path | Sequence[Row]) -> list[Row]:
    found = read_rows(_existing(rows, "rows")) if isinstance(rows, Path) else list(rows)
    if not found:
        where = f" in {rows}" if isinstance(rows, Path) else ""
        raise ValueError(f"there are no rows{where} to report; `kvkeep eval` measures some")
    return found


def _samples(samples: Path | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return read_samples(_existing(samples, "samples")) if isinstance(samples, Path) else samples


def _existing(path: Path, kind: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, f"no file of {kind} here; `kvkeep eval` writes one", str(path))
    return path


def _plots(block: Block, policies: Sequence[str]) -> list[Plot]:
    plots = []
    if block.budgets:
        light, dark = (accuracy_plot(block, policies, theme) for theme in (LIGHT, DARK))
        plots.append(Plot("accuracy", ACCURACY_CAPTION, light, dark))
    light_bytes, dark_bytes = (bytes_plot(block, policies, theme) for theme in (LIGHT, DARK))
    if light_bytes and dark_bytes:
        plots.append(Plot("bytes", BYTES_CAPTION, light_bytes, dark_bytes))
    return plots


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace(",", ""))[:60].strip("-.")
