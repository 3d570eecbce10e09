"""The demo's table as it fills, with a bar for the time left."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .console import MIB, progress_on

if TYPE_CHECKING:
    from kvkeep.evaluate.rows import Row

RIGHT, WRONG, OPEN = "[green]✓[/]", "[red]✗[/]", "[dim]·[/]"


class Board:
    """One line for each policy and budget, a mark for each question, and speeds once they are measured."""

    def __init__(self, console: Console, num_questions: int, num_rounds: int):
        self._console, self._num_questions = console, num_questions
        self._records: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._bar = progress_on(console)
        self._task = self._bar.add_task("", total=num_questions + num_rounds)
        self._doing = ""
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the table while the block runs, and leave it there without its bar."""
        with self._live:
            self._refresh()
            yield
        self._console.print(self.table())

    def begin(self, what: str) -> None:
        """Say what is being done now."""
        self._doing = what
        self._refresh()

    def add_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Fill in one question, of every line."""
        for record in records:
            self._records.setdefault((record["policy"], record["budget"]), []).append(record)
        self.advance()

    def add_rows(self, rows: "Iterable[Row]") -> None:
        """Fill in the speeds."""
        self._rows = {(row.policy, row.budget, row.metric): row for row in rows}
        self._refresh()

    def advance(self) -> None:
        """One step is done."""
        self._bar.advance(self._task)
        self._refresh()

    def _refresh(self) -> None:
        self._live.update(Group(self.table(), Text(f" {self._doing}"), self._bar), refresh=True)

    def table(self) -> Table:
        """What is known so far."""
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        for heading in ("cache", "budget", "answers", "right", "kept", "MiB", "of full", "tokens/s", "× full"):
            table.add_column(heading, justify="left" if heading in ("cache", "answers") else "right", no_wrap=True)
        lines = list(self._records.items())
        for place, ((policy, budget), records) in enumerate(lines):
            last = place + 1 == len(lines) or lines[place + 1][0][1] != budget
            table.add_row(policy, budget, *self._answers(records), *self._speed(policy, budget), end_section=last)
        return table

    def _answers(self, records: Sequence[Mapping[str, Any]]) -> list[str]:
        marks = [RIGHT if record["score"] else WRONG for record in records]
        marks += [OPEN] * (self._num_questions - len(records))
        kept, held, full = (fmean(record[name] for record in records) for name in ("kept", "cache_bytes", "full_bytes"))
        right = sum(record["score"] for record in records)
        return [
            "".join(marks),
            f"{right:.0f}/{len(records)}",
            f"{kept:,.0f}",
            f"{held / MIB:.1f}",
            f"{held / full:.0%}",
        ]

    def _speed(self, policy: str, budget: str) -> list[str]:
        found = [self._rows.get((policy, budget, metric)) for metric in ("tokens_per_s", "decode_ratio")]
        forms = ("{:.1f}", "{:.2f}")
        return [OPEN if row is None else form.format(row.value) for row, form in zip(found, forms, strict=True)]
