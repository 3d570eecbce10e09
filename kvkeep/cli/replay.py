"""`kvkeep replay`: policies judged by recorded futures, without a model."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

from pathlib import Path
from typing import Annotated

import typer

from .console import names, show_rows, steps_bar
from .options import Budgets, Json, Policies, Sources


def replay(
    folder: Annotated[Path, typer.Argument(metavar="TRACES", help="Folder of traces, as kvkeep trace makes it.")],
    policies: Policies = ["all"],
    budgets: Budgets = ["64", "128", "256", "512"],
    split: Annotated[str | None, typer.Option(help="Only train, validation or test prompts.")] = None,
    sources: Sources = [],
    by_source: Annotated[bool, typer.Option("--by-source", help="A table for each source of prompts too.")] = False,
    group: Annotated[str, typer.Option(help="Query heads of a KV head: max or mean of them, or square.")] = "max",
    futures: Annotated[str, typer.Option(help="Several futures of a prompt: mean or max of them.")] = "mean",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that always stay.")] = 4,
    recent: Annotated[int, typer.Option(min=0, help="Last tokens that always stay.")] = 16,
    metric: Annotated[
        str, typer.Option(help="kept_future, or teacher_recall: of what later tokens of the prompt read most.")
    ] = "kept_future",
    file: Annotated[Path | None, typer.Option("--out", "-o", help="For the rows, such as replay/rows.jsonl.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how much of the future's attention each policy keeps, beside the exact future (oracle).

    Policies that read keys and values are asked anew; those that read queries must have been recorded
    (`kvkeep trace --policy tova,snapkv`). "all" are those that the traces can answer for.

    **Examples**

    `kvkeep replay traces --split test`

    `kvkeep replay long --metric teacher_recall --recent 64 --policy kvpop,kvpop_mlp --budget 25%,12.5%`

    `kvkeep replay traces --policy kvp,keydiff,tova --budget 128,25% --by-source --out replay/rows.jsonl`
    """
    from kvkeep.evaluate.replay import Replay, answerable
    from kvkeep.evaluate.rows import manifest, write_rows
    from kvkeep.trace import Traces

    traces = Traces(folder, split=split, source=tuple(names(sources)) or "")
    chosen = [name for given in names(policies) for name in (answerable(traces) if given == "all" else [given])]
    replayed = Replay(
        policies=names(chosen),
        budgets=names(budgets),
        sinks=sinks,
        recent=recent,
        group=group,
        futures=futures,
        metric=metric,
    )
    stamp = manifest(traces.index.model, dtype=traces.index.dtype)
    with steps_bar() as tell:
        rows = replayed.run(traces, stamp=stamp, by_source=by_source, progress=tell)
    if file is not None:
        write_rows(file, rows)
    show_rows(rows, file, as_json)
