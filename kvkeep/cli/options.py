"""Options that several subcommands share, or that are long to say. Lists repeat, or come comma-separated."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Question(StrEnum):
    """Whether the question is compressed with the text, or comes after it was compressed."""

    inside = "inside"
    after = "after"


_MODEL = "smollm2, a folder, a GGUF file, or a Hugging Face id (owner/name)."
# written out, because importing them would load torch for --help
_POLICIES = (
    "random, streaming, knorm, keydiff, lagkv, tova, h2o, snapkv, pyramidkv, expected_attention, kvp, "
    "kvpop, kvpop_mlp, lorekv, qevict or tiered (docs/policies.md), with options as in snapkv(window=16), "
    "tiered(kvp, bits=4)"
)

_DATA = (
    "tasks:NAMES/inside or tasks:NAMES/after, text:FILE_OR_FOLDER, chat:FILE.jsonl, or FILE.jsonl with a prompt, "
    "messages or text in each line. Repeat it for a mixture."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of text.")]
Model = Annotated[str, typer.Option("--model", "-m", help=_MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        help="Numbers of weights and cache: auto (as stored), fast (float32 where the processor cannot multiply "
        "16-bit numbers), bfloat16, float16, float32."
    ),
]
Device = Annotated[str | None, typer.Option(help="Where to compute, such as cuda; without it the CPU.")]
Policy = Annotated[str, typer.Option("--policy", "-p", help=f"What to keep: {_POLICIES}.")]

Models = Annotated[list[str], typer.Option("--model", "-m", metavar="NAME,...", help=_MODEL)]
Tasks = Annotated[list[str], typer.Option("--task", "-t", metavar="NAME,...", help="Task names, or all.")]
Policies = Annotated[
    list[str], typer.Option("--policy", "-p", metavar="NAME,...", help="Policy names, or all that this model can run.")
]
Budgets = Annotated[
    list[str], typer.Option("--budget", "-b", metavar="SIZE,...", help="How much to keep: 512, 25%, 64MiB or full.")
]
Lengths = Annotated[list[str], typer.Option("--length", "-l", metavar="NUMBER,...", help="Tokens of a prompt.")]
BatchSizes = Annotated[list[str], typer.Option("--batch", metavar="NUMBER,...", help="Sequences decoded together.")]
Questions = Annotated[
    list[Question], typer.Option("--question", help="Is the question compressed with the text, or does it come after?")
]
Sources = Annotated[list[str], typer.Option(metavar="NAME,...", help="Only sources that begin so, such as niah.")]
Texts = Annotated[list[str], typer.Option("--data", metavar="DATA", help=_DATA)]

Haystack = Annotated[Path | None, typer.Option(help="Folder of .txt files in place of the bundled prose.")]
Templates = Annotated[Path | None, typer.Option(help="JSON file with other words around the tasks.")]
Data = Annotated[Path | None, typer.Option(help="Folder of documents and word lists in place of invented ones.")]
Longest = Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer; else each task's own.")]
