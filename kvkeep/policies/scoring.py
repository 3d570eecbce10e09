"""The compiled twin of `Scorers.judge` for decoding: one token taken in and one judged.

B sequences, A agents of a layer, N slots, D size of a key, V of a value, M size of the memory.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.compiled import TYPES, function
from ..slots import Slots
from .scorers import Memory, Scorers

# as in scoring.c
_SIZES = "rows agents key_size value_size turned hidden memory type "
_STEPS = "key_row key_agent key_slot value_row value_agent value_slot"
_TOKENS = "keys values asked_slots asked_positions new_slots new_positions "
_WEIGHTS = "frequencies weight bias norm last log_decay held levels priorities"
_SOURCE = Path(__file__).with_name("scoring.c")


class Token(NamedTuple):
    """One token of each sequence and agent: where it lies, and its position."""

    slots: Int[Tensor, "B A 1"]
    positions: Int[Tensor, "B A 1"]


def serves(scorers: Scorers, slots: Slots) -> bool:
    """Whether the compiled functions judge with these scorers: learned ones, on a CPU, with a compiler."""
    known = slots.positions.device.type == "cpu" and slots.dtype in TYPES
    return known and scorers.folded is not None and _judge() is not None


def find_slots(
    positions: Int[Tensor, "B A N"], wanted: Int[Tensor, "B A 1"], others: Int[Tensor, "B A 1"]
) -> Int[Tensor, "B A 1"]:
    """The slot of the token at each position that is wanted; that of `others` where there is none."""
    find = _find()
    assert find is not None, "ask serves() first"
    slots = torch.empty_like(others, memory_format=torch.contiguous_format)
    held = positions if positions.stride(-1) == 1 else positions.contiguous()
    places = _Places(*positions.shape, *held.stride()[:2])
    given = [array.long().contiguous() for array in (wanted, others)]
    find(places, held.data_ptr(), *(array.data_ptr() for array in (*given, slots)))
    return slots


def judge_one(
    scorers: Scorers,
    keys: Float[Tensor, "B A N D"],
    values: Float[Tensor, "B A N V"],
    asked: Token,
    new: Token,
    memory: Memory | None,
    rows: slice,
) -> tuple[Float[Tensor, "B A 1"], Memory | None]:
    """The static priority of each asked token once the new one is taken in, and what is then held.

    A new token at position -1 is padding and changes nothing. See `Scorers.judge` and `pool.static_priority`.
    """
    judge = _judge()
    assert judge is not None and scorers.folded is not None and scorers.folded_bias is not None
    shape, (B, A) = scorers.shape, keys.shape[:2]
    keys, values = (array if array.stride(-1) == 1 else array.contiguous() for array in (keys, values))
    priorities = torch.empty(B, A, 1)
    nothing = priorities[:0]
    if memory is not None:
        # written in place, where the caller's must stay as it is
        memory = Memory(*(array.clone(memory_format=torch.contiguous_format) for array in memory))
    weights = [
        scorers.frequencies if shape.turned else nothing,
        scorers.folded[rows],
        scorers.folded_bias[rows],
        scorers.norm[rows] if memory is not None else nothing,
        scorers.last[rows],
        scorers.log_decay[rows].float(),
    ]
    given = [array.contiguous() for array in (*(index.long() for index in (*asked, *new)), *weights)]
    hidden, size = shape.hidden * shape.reads_token, shape.memory * shape.reads_memory
    steps = (*keys.stride()[:3], *values.stride()[:3])
    sizes = (B, A, shape.key_size, shape.value_size, shape.turned, hidden, size, TYPES[keys.dtype], *steps)
    arrays = (keys, values, *given, *(memory or (nothing, nothing)), priorities)
    if judge(_Sizes(*sizes), _Arrays(*(array.data_ptr() for array in arrays))):
        raise MemoryError("no memory for the scores of a step")
    return priorities, memory


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in (_SIZES + _STEPS).split()]


class _Arrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (_TOKENS + _WEIGHTS).split()]


class _Places(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ["rows", "agents", "slots", "row", "agent"]]


@cache
def _judge() -> Callable[..., int] | None:
    return function(_SOURCE, "judge", _Sizes, _Arrays, result=ctypes.c_int)


@cache
def _find() -> Callable[..., None] | None:
    return function(_SOURCE, "find_slots", _Places, *[ctypes.c_void_p] * 4)
