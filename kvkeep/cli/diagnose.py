"""`kvkeep diagnose`: what policies miss of the attention that the future pays, and the fate of every token."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

from pathlib import Path
from typing import Annotated

import typer

from .console import names, quiet_transformers, show_rows, steps_bar
from .evaluate import all_of
from .options import Budgets, Device, Dtype, Json, Model, Policies, Texts
from .texts import texts_of


def diagnose(
    data: Texts,
    model: Model = "smollm2",
    policies: Policies = ["all"],
    budgets: Budgets = ["20%", "10%"],
    num_texts: Annotated[int, typer.Option("--texts", "-n", min=1, help="Most texts from each DATA.")] = 4,
    length: Annotated[int, typer.Option("--length", "-l", help="Most tokens of a prompt.")] = 512,
    least_length: Annotated[int, typer.Option(help="Fewest tokens of a prompt.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", "-t", help="Most tokens behind the prompt.")] = 512,
    least_tokens: Annotated[int, typer.Option(help="Fewest tokens behind the prompt.")] = 128,
    omega: Annotated[int, typer.Option(help="Tokens between two moments at which caches are asked.")] = 8,
    horizon: Annotated[int, typer.Option(help="Tokens behind such a moment whose attention counts.")] = 32,
    views: Annotated[int, typer.Option(min=0, help="Texts whose tokens the page shows, each with its fate.")] = 1,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    seed: Annotated[int, typer.Option(help="Of policies that draw at random, and of where texts are cut.")] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="For samples.jsonl, rows.jsonl, views and diagnose.html.")
    ] = Path("diagnose"),
    as_json: Json = False,
) -> None:
    """Read texts under every policy beside the full cache: attention missed, churn, and what comes back.

    The page shows them over the course of decoding and by layer and head, and the text itself, coloured by what became
    of each token. Stopped or killed, the same command goes on where it was.

    **Examples**

    `kvkeep diagnose --data text:novels --policy streaming,tova,kvp --budget 20% --out diagnose`

    `kvkeep diagnose --data chat:trees.jsonl --policy h2o --budget 128 --texts 2 --tokens 256`
    """
    from kvkeep import load
    from kvkeep.corpus import Reading
    from kvkeep.evaluate.diagnose import Events
    from kvkeep.evaluate.diagnose import diagnose as run
    from kvkeep.evaluate.run import policies_for
    from kvkeep.report import write_diagnosis

    with quiet_transformers():
        loaded = load(model, dtype=dtype, device=device)
        reading = Reading(
            tokenizer=loaded.tokenizer,
            split=split,
            num_tokens=length,
            num_prompts=num_texts,
            future_tokens=tokens,
            least_tokens=least_length,
            least_future=min(tokens, least_tokens),
            seed=seed,
        )
        items = texts_of(data, reading)
        with steps_bar() as tell:
            rows = run(
                *loaded,
                items,
                model_name=model,
                policies=all_of(policies, policies_for(loaded.model)),
                budgets=names(budgets),
                out=folder,
                events=Events(omega=omega, horizon=horizon),
                views=views,
                seed=seed,
                progress=tell,
            )
    page = write_diagnosis(folder)
    show_rows(rows, page, as_json)
