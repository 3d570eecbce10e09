"""`kvkeep solve`: problems solved in long answers of the model's own."""
# ruff: noqa: B006
# lists as defaults: typer only reads them

from pathlib import Path
from typing import Annotated

import typer

from .console import names, quiet_transformers, show_rows, steps_bar
from .evaluate import all_of
from .options import Budgets, Device, Dtype, Json, Model, Policies


def solve(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE.jsonl...", help="A problem and its answer in each line.")
    ],
    model: Model = "smollm2",
    policies: Policies = ["all"],
    budgets: Budgets = ["512", "256"],
    num_problems: Annotated[int | None, typer.Option("--problems", "-n", min=1, help="So many of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from tokens that make up so much of the probability.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Answers to each problem, at a temperature.")] = 1,
    instruction: Annotated[str | None, typer.Option(help="What is said behind a problem, in place of our own.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Problems answered together.")] = 16,
    seed: Annotated[int, typer.Option(help="Of draws, and of policies that draw at random.")] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="For samples.jsonl and rows.jsonl.")] = Path("solve"),
    as_json: Json = False,
) -> None:
    """Let the model solve problems under policies and budgets: accuracy, and its share of the full cache's.

    Lines hold a `problem` or `question` and its `answer`, as those of GSM8K, MATH-500, AIME and HMMT do. Each policy
    writes its own answer, so it lives with what it forgot. Answers are graded by math-verify
    (`pip install 'kvkeep[eval]'`). Stopped or killed, the same command goes on where it was.

    **Examples**

    `kvkeep solve gsm8k_test.jsonl --problems 200 --policy kvpop,h2o,streaming --budget 256,128`

    `kvkeep solve aime_2025.jsonl --model Qwen/Qwen3-4B --policy kvp --budget 4096 --max-new-tokens 32768
    --temperature 0.6 --top-p 0.95 --draws 8 --batch 8 --device cuda`
    """
    from kvkeep import load
    from kvkeep.corpus.problems import problems_of
    from kvkeep.evaluate.run import policies_for
    from kvkeep.evaluate.solving import INSTRUCTION, Decoding
    from kvkeep.evaluate.solving import solve as run

    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        draws=draws,
        instruction=INSTRUCTION if instruction is None else instruction,
    )
    problems = [problem for file in files for problem in problems_of(file, num_problems)]
    with quiet_transformers():
        loaded = load(model, dtype=dtype, device=device)
        try:
            with steps_bar() as tell:
                rows = run(
                    *loaded,
                    problems,
                    model_name=model,
                    policies=all_of(policies, policies_for(loaded.model)),
                    budgets=names(budgets),
                    out=folder,
                    decoding=decoding,
                    batch=batch,
                    seed=seed,
                    progress=tell,
                )
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from error
    show_rows(rows, folder / "rows.jsonl", as_json)
