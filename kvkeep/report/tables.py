"""Rows arranged for reading: policies and budgets down, tasks across, shares of the full cache and the best marked.

A setting is what must agree before two numbers may be compared; an arm is one policy at one budget.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, TypeVar

from kvkeep.evaluate.rows import Row

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Setting(NamedTuple):
    """What all numbers of a block have in common."""

    model: str
    dtype: str
    length: int | None
    split: str

    @property
    def title(self) -> str:
        """The setting in words, as far as it is known."""
        length = f"{self.length:,} tokens" if self.length else ""
        split = f"{self.split} samples" if self.split else ""
        return " · ".join(part for part in (self.model, length, self.dtype, split) if part) or "All rows"


class Arm(NamedTuple):
    """One policy at one budget."""

    policy: str
    budget: str


FULL = Arm("full", "full")


@dataclass(frozen=True)
class Cell:
    """A score with its 95% interval; `share` is of the full cache's score, `num_tasks` what a mean is over."""

    value: float
    low: float | None
    high: float | None
    n: int
    num_tasks: int = 1
    share: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Line:
    """One arm: scores by (question, task), means over tasks by question, and what the cache cost.

    `kept` is tokens per KV head, bytes are measured means, `budget_share` is the budget as a share of the full
    cache. What no row tells is None.
    """

    arm: Arm
    cells: Mapping[tuple[str, str], Cell]
    means: Mapping[str, Cell]
    kept: float | None
    cache_bytes: float | None
    full_bytes: float | None
    tokens_per_s: float | None
    budget_share: float | None

    @property
    def is_full(self) -> bool:
        return self.arm == FULL


@dataclass(frozen=True)
class Block:
    """All accuracy rows of one setting; the full cache's line comes first, then budgets from small to large."""

    setting: Setting
    questions: list[str]
    tasks: list[str]
    lines: list[Line]

    @property
    def budgets(self) -> list[str]:
        return list(dict.fromkeys(line.arm.budget for line in self.lines if not line.is_full))

    @property
    def full(self) -> Line | None:
        return next((line for line in self.lines if line.is_full), None)

    @property
    def without_full(self) -> list[str]:
        """The questions for which no full-cache row was measured."""
        return [name for name in self.questions if self.full is None or name not in self.full.means]

    @property
    def num_samples(self) -> tuple[int, int]:
        """The smallest and the largest sample count of a cell."""
        counts = [cell.n for line in self.lines for cell in line.cells.values()]
        return min(counts), max(counts)


def blocks(rows: Sequence[Row]) -> list[Block]:
    """One block per setting of the accuracy rows, in the order of their first appearance."""
    accuracy = [row for row in rows if row.metric == "accuracy"]
    speeds = [row for row in rows if row.metric == "tokens_per_s"]
    settings = grouped(accuracy, lambda row: Setting(row.model, row.dtype, row.length, row.split))
    return [_block(setting, found, speeds) for setting, found in settings.items()]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, groups and items in the order of their first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _block(setting: Setting, rows: Sequence[Row], speeds: Sequence[Row]) -> Block:
    questions = _questions(rows)
    tasks = list(dict.fromkeys(row.task for row in rows))
    arms = grouped(rows, arm_of)
    cells: dict[Arm, dict[tuple[str, str], Cell]] = {arm: {} for arm in arms}
    means: dict[Arm, dict[str, Cell]] = {arm: {} for arm in arms}
    for question in questions:
        columns = {task: _column(rows, question, task) for task in tasks}
        for task, column in columns.items():
            for arm, cell in _judged(column).items():
                cells[arm][question, task] = cell
        averages = {arm: [column[arm] for column in columns.values() if arm in column] for arm in arms}
        for arm, cell in _judged({arm: mean_cell(found) for arm, found in averages.items() if found}).items():
            means[arm][question] = cell
    lines = [_line(arm, found, speeds, cells[arm], means[arm]) for arm, found in arms.items()]
    return Block(setting, questions, tasks, _in_reading_order(lines))


def arm_of(row: Row) -> Arm:
    """The arm of a row; the full cache is one arm, whatever its budget is called."""
    return FULL if row.policy == "full" else Arm(row.policy, row.budget)


def _questions(rows: Sequence[Row]) -> list[str]:
    # the full cache may be measured once for both positions of the question, then its own is empty
    asked = dict.fromkeys(row.question for row in rows if row.policy != "full")
    return list(asked or dict.fromkeys(row.question for row in rows))


def _column(rows: Sequence[Row], question: str, task: str) -> dict[Arm, Cell]:
    column: dict[Arm, Cell] = {}
    for row in rows:
        fits = row.question == question or (row.policy == "full" and row.question == "")
        if row.task == task and fits:
            column[arm_of(row)] = Cell(row.value, row.low, row.high, row.n)
    return column


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """The mean over tasks, each weighing the same; their intervals combine as those of independent means.

    Distances to the bounds add in squares, each side for itself (MOVER, Zou and Donner 2008).
    """
    value = fmean(cell.value for cell in cells)
    n = sum(cell.n for cell in cells)
    below = [cell.value - cell.low for cell in cells if cell.low is not None]
    above = [cell.high - cell.value for cell in cells if cell.high is not None]
    if len(below) < len(cells):
        return Cell(value, None, None, n, len(cells))
    low, high = value - math.hypot(*below) / len(cells), value + math.hypot(*above) / len(cells)
    return Cell(value, low, high, n, len(cells))


def _judged(column: Mapping[Arm, Cell]) -> dict[Arm, Cell]:
    """The column with each cell's share of the full cache, and the best policy of each budget marked."""
    most = max((cell.num_tasks for cell in column.values()), default=0)
    rivals: dict[str, list[float]] = {}
    for arm, cell in column.items():
        # a mean over fewer tasks is another quantity
        if arm != FULL and cell.num_tasks == most:
            rivals.setdefault(arm.budget, []).append(cell.value)
    return {
        arm: replace(
            cell,
            share=_share(cell, column.get(FULL)),
            best=arm != FULL and cell.num_tasks == most and _stands_out(cell.value, rivals[arm.budget]),
        )
        for arm, cell in column.items()
    }


def _share(cell: Cell, full: Cell | None) -> float | None:
    if full is None or full.value <= 0 or full.num_tasks != cell.num_tasks:
        return None
    return cell.value / full.value


def _stands_out(value: float, rivals: Sequence[float]) -> bool:
    # where all are equal, none is best
    return value == max(rivals) > min(rivals)


def _line(
    arm: Arm,
    rows: Sequence[Row],
    speeds: Sequence[Row],
    cells: Mapping[tuple[str, str], Cell],
    means: Mapping[str, Cell],
) -> Line:
    cache_bytes = _known_mean(row.cache_bytes for row in rows)
    full_bytes = _known_mean(row.full_bytes for row in rows)
    return Line(
        arm=arm,
        cells=cells,
        means=means,
        kept=_known_mean(row.kept for row in rows),
        cache_bytes=cache_bytes,
        full_bytes=full_bytes,
        tokens_per_s=_speed(arm, rows, speeds),
        budget_share=budget_share(arm.budget, rows[0].length, cache_bytes, full_bytes),
    )


def _known_mean(values: Iterable[float | int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _speed(arm: Arm, rows: Sequence[Row], speeds: Sequence[Row]) -> float | None:
    """Tokens per second of an arm, from its own rows or from rows of that metric for the same place."""
    own = [row.extra["tokens_per_s"] for row in rows if "tokens_per_s" in row.extra]
    apart = [speed.value for speed in speeds if arm_of(speed) == arm and _same_place(speed, rows[0])]
    return _known_mean(own or apart)


def _same_place(one: Row, other: Row) -> bool:
    pairs = ((one.model, other.model), (one.dtype, other.dtype), (one.length, other.length))
    return all(a == b or not a or not b for a, b in pairs)


def budget_share(budget: str, length: int | None, cache_bytes: float | None, full_bytes: float | None) -> float | None:
    """A budget as a share of the full cache: as given, of the prompt's tokens, or else of the measured bytes."""
    try:
        if budget.endswith("%"):
            return float(budget[:-1]) / 100
        if float(budget) < 1:
            return float(budget)
        if length:
            return float(budget) / length
    except ValueError:
        pass
    return cache_bytes / full_bytes if cache_bytes and full_bytes else None


def _in_reading_order(lines: Sequence[Line]) -> list[Line]:
    """The full cache first, then by the size of the budget; lines of one budget stay together and in order."""
    budgets = grouped(lines, lambda line: line.arm.budget)
    sizes = {name: _known_mean(line.budget_share for line in found) for name, found in budgets.items()}

    def place(line: Line) -> tuple[bool, bool, float, str]:
        size = sizes[line.arm.budget]
        return (not line.is_full, size is None, size or 0.0, line.arm.budget)

    return sorted(lines, key=place)


class MetricTable(NamedTuple):
    """The rows of one metric; `shared` says what they have in common, `columns` names what they differ in."""

    metric: str
    shared: str
    columns: list[str]
    rows: list[Row]


def metric_tables(rows: Sequence[Row]) -> list[MetricTable]:
    """One table for each metric other than accuracy."""
    others = grouped((row for row in rows if row.metric != "accuracy"), lambda row: row.metric)
    return [_metric_table(metric, found) for metric, found in others.items()]


def _metric_table(metric: str, rows: list[Row]) -> MetricTable:
    names = ("model", "dtype", "split", "task", "length", "question", "policy", "budget")
    values = {name: {getattr(row, name) for row in rows} for name in names}
    columns = [name for name, found in values.items() if len(found) > 1]
    shared = [f"{name} {found.pop()}" for name, found in values.items() if len(found) == 1 and any(found)]
    return MetricTable(metric, " · ".join(shared), columns, rows)


class Origin(NamedTuple):
    """Where rows come from: the manifest they share, how many they are and when they were measured."""

    row: Row
    num_rows: int
    first: str
    last: str


def origins(rows: Sequence[Row]) -> list[Origin]:
    """One entry for each distinct manifest."""

    def stamp(row: Row) -> tuple[object, ...]:
        versions = tuple(sorted(row.versions.items()))
        return (row.commit, row.dirty, versions, row.threads, row.dtype, row.device, row.cpu, row.command)

    return [
        Origin(found[0], len(found), min(row.time for row in found), max(row.time for row in found))
        for found in grouped(rows, stamp).values()
    ]


def notices(rows: Sequence[Row]) -> list[str]:
    """What a reader must know before trusting the tables."""
    told = []
    for block in blocks(rows):
        questions = [f"question {name}" if name else "" for name in block.without_full]
        for place in questions:
            where = " · ".join(part for part in (block.setting.title, place) if part)
            told.append(f"No full-cache row for {where}: shares of the full cache cannot be shown there.")
    accuracy = [row for row in rows if row.metric == "accuracy"]
    repeated = len(accuracy) - len({_identity(row) for row in accuracy})
    if repeated:
        told.append(f"Some measurements appear more than once: the last of each is shown, {repeated} left out.")
    few = [block.num_samples[0] for block in blocks(rows) if block.num_samples[0] < 10]
    if few:
        told.append(f"Some cells rest on few samples (down to {min(few)}): read their intervals, not their values.")
    return told


def _identity(row: Row) -> tuple[object, ...]:
    return (row.model, row.dtype, row.length, row.split, row.question, row.task, arm_of(row))
