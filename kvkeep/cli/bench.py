"""`kvkeep bench`: speed and bytes beside transformers' own cache."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

from pathlib import Path
from typing import Annotated

import typer

from .console import names, numbers, quiet_transformers, show_rows, steps_bar
from .options import BatchSizes, Budgets, Device, Dtype, Json, Lengths, Model, Policies


def bench(
    model: Model = "smollm2",
    lengths: Lengths = ["4096"],
    batch_sizes: BatchSizes = ["1"],
    policies: Policies = ["tova"],
    budgets: Budgets = ["25%", "full"],
    beside: Annotated[
        list[str],
        typer.Option(metavar="NAME,...", help="Also transformers' QuantizedCache-2 or -4 (needs optimum-quanto)."),
    ] = [],
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps of one timed loop.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, each with every cache in turn.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads; several are noisy on a shared machine.")] = 1,
    prefill: Annotated[bool, typer.Option(help="Time reading the prompt too.")] = True,
    dtype: Dtype = "auto",
    device: Device = None,
    file: Annotated[Path | None, typer.Option("--out", "-o", help="For the rows, such as bench.jsonl.")] = None,
    as_json: Json = False,
) -> None:
    """Measure decoding, reading and bytes against transformers' own caches, in turns in the same run.

    Values are medians over the rounds with bootstrap intervals; ratios are above 1 where kvkeep is faster.
    Repeat `--length`, `--batch`, `--policy` and `--budget`, or separate values by commas.

    **Examples**

    `kvkeep bench --length 2048,8000 --budget 25%`

    `kvkeep bench --batch 1,8 --budget 512 --no-prefill --out bench.jsonl`

    `kvkeep bench --policy h2o,qevict --budget 20% --beside QuantizedCache-2`
    """
    from kvkeep import load
    from kvkeep.evaluate.rows import write_rows
    from kvkeep.evaluate.speed import bench as measure

    with quiet_transformers():
        loaded = load(model, dtype=dtype, device=device)
        with steps_bar() as tell:
            rows = measure(
                loaded.model,
                model_name=model,
                lengths=numbers("--length", lengths),
                batch_sizes=numbers("--batch", batch_sizes),
                policies=names(policies),
                budgets=names(budgets),
                beside=names(beside),
                new_tokens=new_tokens,
                repeats=repeats,
                threads=threads,
                prefill=prefill,
                progress=tell,
            )
    if file is not None:
        write_rows(file, rows)
    show_rows(rows, file, as_json)
