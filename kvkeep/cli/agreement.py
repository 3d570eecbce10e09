"""`kvkeep agreement`: how far a smaller cache strays from the full one over a long text."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

from pathlib import Path
from typing import Annotated

import typer

from .console import names, quiet_transformers, show_rows, steps_bar
from .evaluate import all_of
from .options import Budgets, Device, Dtype, Json, Model, Policies, Texts
from .texts import texts_of


def agreement(
    data: Texts,
    model: Model = "smollm2",
    policies: Policies = ["all"],
    budgets: Budgets = ["25%", "12.5%"],
    num_texts: Annotated[int, typer.Option("--texts", "-n", min=1, help="Most texts from each DATA.")] = 8,
    length: Annotated[int, typer.Option("--length", "-l", help="Most tokens of a prompt.")] = 1000,
    least_length: Annotated[int, typer.Option(help="Fewest tokens of a prompt.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", "-t", help="Most tokens behind the prompt.")] = 1000,
    least_tokens: Annotated[int, typer.Option(help="Fewest tokens behind the prompt.")] = 64,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Behind the prompt comes the model's own answer under the full cache.")
    ] = False,
    chunk: Annotated[
        int, typer.Option(min=1, help="Tokens read at once behind the prompt; above 1 evicts after each chunk only.")
    ] = 1,
    masked: Annotated[
        bool, typer.Option("--masked", help="Read at once under a mask, for policies that have one: the same, faster.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Most texts of equal lengths to read at once.")] = 8,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    seed: Annotated[int, typer.Option(help="Of policies that draw at random, and of where texts are cut.")] = 0,
    by_source: Annotated[bool, typer.Option("--by-source", help="Rows for each source of texts too.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="For samples.jsonl and rows.jsonl.")] = Path("agreement"),
    as_json: Json = False,
) -> None:
    """Read long texts under every policy and compare each prediction with the full cache's.

    Every cache is fed the same text, so none follows its own mistakes: the share of tokens with the same likeliest
    prediction, KL divergence and perplexity, by distance behind the prompt. Stopped or killed, the same command goes
    on where it was.

    **Examples**

    `kvkeep agreement --data text:novels --policy streaming,tova,kvp --budget 256 --out agreement`

    `kvkeep agreement --data chat:trees.jsonl --data reasoning.jsonl --greedy --tokens 4096`

    `kvkeep report agreement/rows.jsonl`
    """
    from kvkeep import load
    from kvkeep.corpus import Reading
    from kvkeep.evaluate.agreement import agreement as run
    from kvkeep.evaluate.run import policies_for

    with quiet_transformers():
        loaded = load(model, dtype=dtype, device=device)
        reading = Reading(
            tokenizer=loaded.tokenizer,
            split=split,
            num_tokens=length,
            num_prompts=num_texts,
            futures="greedy" if greedy else "data",
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
                chunk=chunk,
                masked=masked,
                batch=batch,
                seed=seed,
                by_source=by_source,
                progress=tell,
            )
    show_rows(rows, folder / "rows.jsonl", as_json)
