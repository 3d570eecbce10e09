"""The compiled twin of `Scorers.judge` for decoding: one token taken in and one judged.

B sequences, A agents of a layer, D size of a key, V of a value, M size of the memory.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.compiled import function
from .scorers import Memory, Scorers

_SIZES = "rows agents key_size value_size turned hidden memory"
_ARRAYS = (
    "asked_keys asked_values new_keys new_values asked_positions new_positions "
    "frequencies weight bias norm last held levels scores"
)


class Token(NamedTuple):
    """One token of each sequence and agent."""

    keys: Float[Tensor, "B A 1 D"]
    values: Float[Tensor, "B A 1 V"]
    positions: Int[Tensor, "B A 1"]


def serves(scorers: Scorers, keys: Tensor) -> bool:
    """Whether the compiled function judges with these scorers: learned ones, on a CPU, with a compiler."""
    return keys.device.type == "cpu" and scorers.folded is not None and _function() is not None


def judge_one(
    scorers: Scorers, asked: Token, new: Token, memory: Memory | None, rows: slice
) -> tuple[Float[Tensor, "B A 1"], Memory | None]:
    """The score of each asked token once the new one is taken in, and what is then held; see `Scorers.judge`.

    A new token at position -1 is padding and changes nothing.
    """
    judge = _function()
    assert judge is not None and scorers.folded is not None and scorers.folded_bias is not None
    shape, (B, A) = scorers.shape, asked.keys.shape[:2]
    tokens = [array.float() for token in (asked, new) for array in (token.keys, token.values)]
    positions = [token.positions.long() for token in (asked, new)]
    scores = tokens[0].new_empty(B, A, 1)
    nothing = scores[:0]
    if memory is not None:
        # written in place, where the caller's must stay as it is
        memory = Memory(*(array.clone(memory_format=torch.contiguous_format) for array in memory))
    weights = [
        scorers.frequencies if shape.turned else nothing,
        scorers.folded[rows],
        scorers.folded_bias[rows],
        scorers.norm[rows] if memory is not None else nothing,
        scorers.last[rows],
    ]
    arrays = [array.contiguous() for array in (*tokens, *positions, *weights)] + [
        *(memory or (nothing, nothing)),
        scores,
    ]
    hidden, size = shape.hidden * shape.reads_token, shape.memory * shape.reads_memory
    sizes = _Sizes(B, A, shape.key_size, shape.value_size, shape.turned, hidden, size)
    if judge(sizes, _Arrays(*(array.data_ptr() for array in arrays))):
        raise MemoryError("no memory for the scores of a step")
    return scores, memory


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _SIZES.split()]


class _Arrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _ARRAYS.split()]


@cache
def _function() -> Callable[..., int] | None:
    return function(Path(__file__).with_name("scoring.c"), "judge", _Sizes, _Arrays, result=ctypes.c_int)
