"""`kvkeep report`: tables and plots of measured rows."""

from pathlib import Path
from typing import Annotated

import typer

from .console import note, out, print_json
from .options import Json


def report(
    rows: Annotated[Path, typer.Argument(help="rows.jsonl, as eval, bench and demo write it.")],
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for report.html and the PNGs.")] = Path(
        "report"
    ),
    samples: Annotated[
        Path | None, typer.Option(help="samples.jsonl of the same run, to show what was answered.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make one self-contained HTML page, and PNGs, of measured rows.

    **Examples**

    `kvkeep report eval/rows.jsonl --out report`

    `kvkeep report rows.jsonl --samples samples.jsonl -o report`
    """
    from kvkeep.evaluate.rows import read_rows
    from kvkeep.report import print_table, write_report

    measured = read_rows(rows)
    written = write_report(measured, out_folder, samples=samples)
    if as_json:
        print_json({"report": str(written.html), "pngs": [str(png) for png in written.pngs], "rows": len(measured)})
        return
    print_table(measured, out)
    note(f"written: {written.html}")
