"""`kvkeep lm-eval`: lm-evaluation-harness on an evicting cache."""

from typing import Annotated

import typer


def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(help="The harness's own arguments.")] = None,
) -> None:
    """Run lm-evaluation-harness with the model `kvkeep`, which reads every prompt through an evicting cache.

    All arguments are the harness's own (`kvkeep lm-eval -- --help` shows them). It needs `pip install 'kvkeep[eval]'`.

    **Examples**

    `kvkeep lm-eval --model kvkeep --model_args pretrained=smollm2,policy=snapkv,budget=25% --tasks boolq --limit 100`
    """
    try:
        from kvkeep.evaluate.lm_eval_model import main
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error

    main(arguments or [])
