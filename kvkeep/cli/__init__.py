"""The `kvkeep` command: one file per subcommand. torch and transformers load inside them, so that help is instant."""

from typing import Annotated

import typer

from .agreement import agreement
from .bench import bench
from .console import Commands
from .demo import demo
from .diagnose import diagnose
from .evaluate import evaluate
from .generate import generate
from .lm_eval import lm_eval
from .models import models
from .replay import replay
from .report import report
from .serve import serve
from .solve import solve
from .trace import trace
from .train import app as train

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run language models with a bounded key-value cache, and measure what that costs.

    Start with `kvkeep demo`. Every command has its own `--help` with examples, and `--json` for machines.
    """


app.command()(generate)
app.command(name="eval")(evaluate)
# what it does not know is the harness's
app.command(name="lm-eval", context_settings={"ignore_unknown_options": True})(lm_eval)
app.command()(agreement)
app.command()(diagnose)
app.command()(solve)
app.command()(bench)
# what it does not know is vLLM's
app.command(context_settings={"ignore_unknown_options": True})(serve)
app.command()(trace)
app.command()(replay)
app.command()(report)
app.command()(models)
app.command()(demo)
app.add_typer(train, name="train")


def main() -> None:
    """The console script."""
    app()
