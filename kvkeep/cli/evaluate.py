"""`kvkeep eval`: retrieval tasks under policies and budgets."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import names, numbers, quiet_transformers, show_rows, steps_bar
from .options import (
    Budgets,
    Data,
    Device,
    Dtype,
    Haystack,
    Json,
    Lengths,
    Longest,
    Models,
    Policies,
    Question,
    Questions,
    Tasks,
    Templates,
)

if TYPE_CHECKING:
    from kvkeep.evaluate.rows import Row


def evaluate(
    models: Models = ["smollm2"],
    tasks: Tasks = ["all"],
    policies: Policies = ["all"],
    budgets: Budgets = ["25%", "10%"],
    lengths: Lengths = ["2048"],
    questions: Questions = [Question.after],
    num_samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Prompts for each task.")] = 25,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    seed: Annotated[int, typer.Option(help="Seed of policies that draw at random.")] = 0,
    haystack: Haystack = None,
    templates: Templates = None,
    data: Data = None,
    max_new_tokens: Longest = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt read at once; the budget holds after each.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="For samples.jsonl and rows.jsonl.")] = Path("eval"),
    as_json: Json = False,
) -> None:
    """Score tasks x policies x budgets, beside the full cache, into rows.jsonl.

    Each prompt is read once and answered under all policies and budgets together. Stopped or killed, the same command
    goes on where it was. Repeat an option, or separate its values by commas.

    **Examples**

    `kvkeep eval --task niah_single_2,vt --policy snapkv,tova -n 10`

    `kvkeep eval --policy all --question inside --question after`

    `kvkeep eval --task niah_single_2 --policy kvpop,h2o --budget 256 --chunk 16`

    `kvkeep report eval/rows.jsonl --samples eval/samples.jsonl`
    """
    from kvkeep import load
    from kvkeep.evaluate.run import evaluate as run
    from kvkeep.evaluate.run import policies_for
    from kvkeep.evaluate.tasks import TASKS

    settings: dict[str, Any] = {
        "tasks": all_of(tasks, list(TASKS)),
        "budgets": names(budgets),
        "split": split,
        "num_samples": num_samples,
        "out": folder,
        "seed": seed,
        "haystack": haystack,
        "templates": templates,
        "data": data,
        "max_new_tokens": max_new_tokens,
        "chunk": chunk,
    }
    rows: list[Row] = []
    with quiet_transformers():
        for model in names(models):
            loaded = load(model, dtype=dtype, device=device)
            settings["policies"] = all_of(policies, policies_for(loaded.model))
            of_model: list[Row] = []
            for length, question in product(numbers("--length", lengths), dict.fromkeys(questions)):
                with steps_bar() as tell:
                    # every call returns all rows of its model so far
                    of_model = run(
                        *loaded, model_name=model, length=length, question=question.value, progress=tell, **settings
                    )
            rows += of_model
    show_rows(rows, folder / "rows.jsonl", as_json)


def all_of(values: list[str], known: list[str]) -> list[str]:
    """The names given, where "all" stands for every known one."""
    return names([name for value in names(values) for name in (known if value == "all" else [value])])
