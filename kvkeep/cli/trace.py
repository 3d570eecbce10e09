"""`kvkeep trace`: what a model caches, and what the future reads of it, for learned policies."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import names, note, number_ranges, out, print_json, quiet_transformers, steps_bar
from .options import Device, Dtype, Haystack, Json, Model, Templates, Texts

if TYPE_CHECKING:
    from kvkeep.tracing import Tracing


def trace(
    data: Texts = ["tasks:all/inside"],
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for the traces.")] = Path("traces"),
    model: Model = "smollm2",
    num_prompts: Annotated[int, typer.Option("--prompts", "-n", help="Most prompts from each DATA.")] = 100,
    length: Annotated[int, typer.Option("--length", "-l", help="Most tokens of a prompt.")] = 1500,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    futures: Annotated[
        str,
        typer.Option(
            help="data: what the data say follows, else the model's greedy answer; greedy: always that; "
            "a number: so many continuations sampled from the model."
        ),
    ] = "data",
    future_tokens: Annotated[int, typer.Option(help="Most tokens of a future, a question not counted.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampled futures.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling, and of where conversations are cut.")] = 0,
    policies: Annotated[
        list[str],
        typer.Option("--policy", "-p", metavar="NAME,...", help="Record also what these say right after the prompt."),
    ] = [],
    delay: Annotated[
        int | None,
        typer.Option(min=1, help="Record also what the prompt's tokens so far behind pay to each (for kvpop)."),
    ] = None,
    layers: Annotated[list[str], typer.Option(metavar="NUMBER,...", help="Only these layers: 0-9,29.")] = [],
    heads: Annotated[list[str], typer.Option(metavar="NUMBER,...", help="Only these KV heads.")] = [],
    haystack: Haystack = None,
    templates: Templates = None,
    documents: Annotated[
        Path | None, typer.Option(help="Folder of documents and word lists for tasks in place of invented ones.")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how much would be written, and stop.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Record prompts: keys, values, and how much attention the future pays to each token.

    Each prompt becomes one file in the folder, next to those that are there. Stopped or killed, the same command goes
    on where it was. Several processes share the prompts: `torchrun --nproc-per-node 2 -m kvkeep trace ...`

    **Examples**

    `kvkeep trace --data tasks:all/inside --data tasks:niah/after --prompts 200 --out traces`

    `kvkeep trace --data chat:trees.jsonl --data text:novels --split validation --prompts 20 --out traces`

    `kvkeep trace --data documents.jsonl --futures 4 --length 4000 --estimate`

    `kvkeep trace --data text:novels --length 4096 --delay 64 --prompts 40 --out long`
    """
    from kvkeep import load
    from kvkeep.corpus import Reading
    from kvkeep.evaluate.rows import manifest
    from kvkeep.tracing import Tracing

    with quiet_transformers():
        loaded = load(model, dtype=dtype, device=_own(device))
        reading = Reading(
            tokenizer=loaded.tokenizer,
            split=split,
            num_tokens=length,
            num_prompts=num_prompts,
            futures=futures,
            future_tokens=future_tokens,
            seed=seed,
            haystack=haystack,
            templates=templates,
            documents=documents,
        )
        tracing = Tracing(
            loaded.model,
            model_name=model,
            data=data,
            out=folder,
            reading=reading,
            layers=number_ranges("--layers", layers) or None,
            heads=number_ranges("--heads", heads) or None,
            policies=names(policies),
            delay=delay,
            temperature=temperature,
            made_by=manifest(model, dtype=str(loaded.model.dtype), device=str(loaded.model.device)),
        )
        first = tracing.share.rank == 0
        plan = _plan(tracing)
        if first and not as_json:
            _tell(tracing, plan)
        if not estimate:
            with steps_bar() if first else nullcontext(_unseen) as tell:
                plan["recorded_now"] = tracing.run(tell)
    if not first:
        return
    if as_json:
        print_json({"out": str(folder), **plan})
    elif not estimate:
        out.print(f"recorded {plan['recorded_now']} prompts in {folder}", markup=False, highlight=False, soft_wrap=True)


def _plan(tracing: "Tracing") -> dict[str, Any]:
    """How many prompts there are, and bytes, of all and of what is left."""
    left = tracing.left
    return {
        "prompts": len(tracing.items),
        "too_short": sum(found.too_short for found in tracing.harvests),
        "too_long": sum(found.too_long for found in tracing.harvests),
        "bytes": tracing.bytes(tracing.items),
        "left": len(left),
        "bytes_left": tracing.bytes(left),
    }


def _tell(tracing: "Tracing", plan: dict[str, Any]) -> None:
    for found in tracing.harvests:
        if found.note:
            note(found.note)
    done = plan["prompts"] - plan["left"]
    already = f", {done} of them recorded already" if done else ""
    note(
        f"{plan['prompts']} prompts take {plan['bytes'] / 1e9:.3f} GB{already}; {plan['bytes_left'] / 1e9:.3f} GB to "
        f"write to {tracing.out}",
        style="dim",
    )


def _unseen(*step: Any) -> None:
    """Only one process shows where the recording stands."""


def _own(device: str | None) -> str | None:
    """The GPU of this process, where several were started."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
