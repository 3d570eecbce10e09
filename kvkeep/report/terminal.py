"""The compact table for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkeep.evaluate.rows import Row
from kvkeep.report.tables import Block, Cell, Line, MetricTable, blocks, metric_tables, notices
from kvkeep.report.wording import DASH, bounds, mebibytes, number, percent


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Policy by budget: mean accuracy with its 95% interval, tokens kept per KV head, MiB, and tokens/s if known.

    Other metrics than accuracy and speed follow, a table each; then what a reader must know.
    """
    if not rows:
        console.print("No rows.")
    for block in blocks(rows):
        console.print(_block_table(block))
    for metric in metric_tables(rows):
        # speed is a column of the table above, where there is one
        if metric.metric != "tokens_per_s" or not blocks(rows):
            console.print(_metric_table(metric))
    for notice in notices(rows):
        console.print(f"[yellow]{escape(notice)}[/]")


def _block_table(block: Block) -> Table:
    table = Table(title=escape(block.setting.title), title_justify="left", title_style="bold")
    table.add_column("policy")
    table.add_column("budget", justify="right")
    for question in block.questions:
        table.add_column(escape(f"accuracy, {question}" if question else "accuracy") + " %", justify="right")
    for name in ("kept", "MiB"):
        table.add_column(name, justify="right")
    has_speed = any(line.tokens_per_s is not None for line in block.lines)
    if has_speed:
        table.add_column("tokens/s", justify="right")
    for line, after in zip(block.lines, [*block.lines[1:], None], strict=True):
        speed = [number(line.tokens_per_s)] if has_speed else []
        last_of_budget = after is None or after.arm.budget != line.arm.budget
        table.add_row(*_fields(line, block.questions), *speed, end_section=last_of_budget)
    return table


def _fields(line: Line, questions: Sequence[str]) -> list[str]:
    scores = [_score(line.means.get(question)) for question in questions]
    return [
        escape(line.arm.policy),
        escape(line.arm.budget),
        *scores,
        number(line.kept),
        mebibytes(line.cache_bytes),
    ]


def _score(cell: Cell | None) -> str:
    if cell is None:
        return DASH
    value = percent(cell.value)
    return f"{f'[bold]{value}[/]' if cell.best else value} [dim]{bounds(cell):>6}[/]"


def _metric_table(metric: MetricTable) -> Table:
    title = f"{metric.metric} · {metric.shared}" if metric.shared else metric.metric
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for name in metric.columns:
        table.add_column(name)
    for name in ("value", "95% interval", "samples"):
        table.add_column(name, justify="right")
    for row in metric.rows:
        span = DASH if row.low is None else f"{number(row.low)} {DASH} {number(row.high)}"
        names = [escape(str(getattr(row, name))) for name in metric.columns]
        table.add_row(*names, number(row.value), span, str(row.n))
    return table
