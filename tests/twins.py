"""Slow twins: what the engine must equal, in plain Python lists and loops, one formula a line.

H KV heads, G query heads per KV head, N tokens, D head size. Each works on one sequence; nothing here is taken from
kvkeep.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

# slots


class Token(NamedTuple):
    """One occupied slot; `mark` stands for its key, value and side arrays, and is never used twice."""

    position: int
    mark: int


class PlainSlots:
    """Slots as lists: `heads[row][head]` holds a Token or None (empty) for each slot."""

    def __init__(self, num_rows: int, num_heads: int):
        self.heads: list[list[list[Token | None]]] = [[[] for _ in range(num_heads)] for _ in range(num_rows)]
        self.streams = list(range(num_rows))
        self.holes: list[list[int]] | None = None
        self.capacity = 0

    @property
    def length(self) -> int:
        return len(self.heads[0][0])

    def append(self, new: list[list[list[Token | None]]], room: int) -> None:
        for row, tokens in zip(self.heads, new, strict=True):
            for head, more in zip(row, tokens, strict=True):
                head.extend(more)
        if self.length > self.capacity:
            self.capacity = self.length + room

    def fill(self, new: list[list[list[Token | None]]]) -> None:
        assert self.holes is not None
        for row, tokens, holes in zip(self.heads, new, self.holes, strict=True):
            for head, (token,), hole in zip(row, tokens, holes, strict=True):
                head[hole] = token
        self.holes = None

    def keep(self, index: list[list[list[int]]], blank: list[list[list[bool]]], holes: int) -> None:
        for row, kept, emptied in zip(self.heads, index, blank, strict=True):
            for h, head in enumerate(row):
                survivors = [None if out else head[i] for i, out in zip(kept[h], emptied[h], strict=True)]
                row[h] = [None] * holes + survivors
        self.capacity = self.length
        self.holes = self.last_empty() if holes else None

    def clear(self, index: list[list[int]], where: list[bool] | None) -> None:
        for r, row in enumerate(self.heads):
            for h, head in enumerate(row):
                if where is None or where[r]:
                    head[index[r][h]] = None
        self.holes = index if where is None else self.last_empty()

    def truncate(self, length: int) -> None:
        self.heads = [[head[:length] for head in row] for row in self.heads]

    def select(self, rows: list[int]) -> None:
        self.heads = [[list(head) for head in self.heads[row]] for row in rows]
        self.streams = [self.streams[row] for row in rows]
        self.holes = None if self.holes is None else [list(self.holes[row]) for row in rows]

    def last_empty(self) -> list[list[int]] | None:
        """The last empty slot of each head, or None if some head has none."""
        if not all(None in head for row in self.heads for head in row):
            return None
        return [[max(i for i, token in enumerate(head) if token is None) for head in row] for row in self.heads]


# budgets


def share_of(share: Fraction, num_tokens: int) -> int:
    return math.ceil(share * num_tokens)


# selection


def worth_order(score: Sequence[float], positions: Sequence[int], guarded: Sequence[bool]) -> list[int]:
    """Slots from the one to keep first to the one to drop first."""

    def rank(slot: int) -> tuple[bool, bool, float, int]:
        occupied = positions[slot] >= 0
        # the worth of an empty slot says nothing
        return occupied, guarded[slot], score[slot] if occupied and not guarded[slot] else 0.0, slot

    return sorted(range(len(score)), key=rank, reverse=True)


def kept_by_sorting(
    score: Sequence[float], positions: Sequence[int], guarded: Sequence[bool], count: int
) -> list[int]:
    return sorted(worth_order(score, positions, guarded)[:count])


def victim_by_sorting(score: Sequence[float], positions: Sequence[int], guarded: Sequence[bool]) -> int:
    candidates = [slot for slot in range(len(score)) if positions[slot] >= 0 and not guarded[slot]]
    return min(candidates, key=lambda slot: (score[slot], positions[slot]))
