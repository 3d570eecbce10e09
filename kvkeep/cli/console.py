"""What the subcommands share: answers go to stdout, everything else (progress, warnings, errors) to stderr."""

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

if TYPE_CHECKING:
    from kvkeep.evaluate.rows import Row

MIB = 2**20

out = Console()
err = Console(stderr=True)


class Commands(TyperGroup):
    """The subcommands; a refusal is one red line and exit code 2, or a traceback under --debug."""

    def invoke(self, ctx: Any) -> Any:
        with plain_warnings():
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                if ctx.params["debug"]:
                    raise
                err.print(f"error: {_one_line(error)}", style="bold red", markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(2) from error


def _one_line(error: Exception) -> str:
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(text.split()) or type(error).__name__


def note(message: str, style: str = "yellow") -> None:
    """One line on stderr."""
    err.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Python warnings and kvkeep's log as one line each, without paths and line numbers."""

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        note(f"warning: {' '.join(str(message).split())}")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage(), style="dim")

    logger, handler = logging.getLogger("kvkeep"), Handler()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Leave warnings to the commands, which say them once and in one line."""
    from transformers.utils import logging as switches

    before = switches.get_verbosity()
    switches.set_verbosity_error()
    try:
        yield
    finally:
        switches.set_verbosity(before)


def progress_on(console: Console) -> Progress:
    """A bar with the time left, where someone can see it."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def steps_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar moved by calls of (steps done, steps in all, what comes next)."""
    with progress_on(err) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    typer.echo(json.dumps(value, allow_nan=False))


def print_rows(rows: Iterable["Row"]) -> None:
    """Measured rows on stdout, as in rows.jsonl."""
    for row in rows:
        typer.echo(row.to_json())


def show_rows(rows: Sequence["Row"], written: Path | None, as_json: bool) -> None:
    """Measured rows as a table, and where they were written to; or as JSON alone."""
    from kvkeep.report import print_table

    if as_json:
        print_rows(rows)
        return
    print_table(rows, out)
    if written is not None:
        note(f"written: {written}")


def read_text(source: str) -> str:
    """The text of a file, or of stdin for "-"; ValueError where it is no UTF-8."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it first, e.g. with iconv"
        ) from error


def names(values: list[str]) -> list[str]:
    """Repeated and comma-separated values as one list without repeats: ["a,b(c=1,d=2)", "a"] gives two."""
    # commas within parentheses part options
    parts = [part.strip() for value in values for part in re.findall(r"(?:\([^)]*\)|[^,(])+", value)]
    return list(dict.fromkeys(part for part in parts if part))


def numbers(option: str, values: list[str]) -> list[int]:
    """Repeated and comma-separated whole numbers, for the option named."""
    try:
        return [int(value.replace("_", "")) for value in names(values)]
    except ValueError as error:
        raise ValueError(f"{option} takes whole numbers such as 4096 or 2048,8000, got {', '.join(values)}") from error


def fractions(option: str, values: list[str]) -> tuple[float, ...]:
    """Repeated and comma-separated fractions, for the option named."""
    try:
        return tuple(float(value) for value in names(values))
    except ValueError as error:
        raise ValueError(f"{option} takes fractions such as 0.25 or 0.25,0.125, got {', '.join(values)}") from error


def number_ranges(option: str, values: list[str]) -> list[int]:
    """Whole numbers and ranges of them, in order: ["0-3,9", "2"] gives [0, 1, 2, 3, 9]."""
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", value) for value in names(values)]
    if not all(ranges):
        raise ValueError(f"{option} takes numbers and ranges such as 0-9,29, got {', '.join(values)}")
    return sorted(
        {number for found in ranges if found for number in range(int(found[1]), int(found[2] or found[1]) + 1)}
    )
