"""The compiled twin of `coded.read_coded`.

B sequences, H KV heads, W windows of w tokens each, X queries of a KV head, D head size.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ..slots import Slots
from ..windows import Codec
from .compiled import function

# with more queries a matrix product over dequantized blocks is faster
MOST_QUERIES = 32

# as in coded.c
_SHAPE = "rows windows window queries key_size key_bits value_size value_bits rotated"
_ARRAYS = (
    "queries key_codes key_scales key_zeros value_codes value_scales value_zeros positions dormant cosines sines "
    "output logsums logits"
)


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _SHAPE.split()]


class _Arrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _ARRAYS.split()]


def serves(queries: Float[Tensor, "B H X D"]) -> bool:
    """Whether the kernel reads codes for these queries: few of them, in at most fp32, on a CPU, with a compiler."""
    few = queries.device.type == "cpu" and queries.shape[2] <= MOST_QUERIES and queries.dtype != torch.float64
    return few and _kernel() is not None


def run(
    queries: Float[Tensor, "B H X D"], coded: Slots, codec: Codec, scale: float
) -> tuple[Float[Tensor, "B H X Dv"], Float[Tensor, "B H X 1"], Float[Tensor, "B H X Ww"]]:
    """Output, log of the softmax's denominator, and logits of every token; those of hidden windows are very small."""
    kernel = _kernel()
    assert kernel is not None, "ask serves() first"
    B, H, X, _ = queries.shape
    W = coded.length
    # no further than the last position there is
    positions = codec.positions(coded)
    cos, sin = codec.table.upto(int(positions.amax()) + 1, queries.device)
    sizes = (codec.key_size, codec.key_bits, codec.value_size, codec.value_bits, cos.shape[1])
    shape = _Shape(B * H, W, codec.window, X, *sizes)
    output = queries.new_empty(B, H, X, codec.value_size, dtype=torch.float32)
    logsum = queries.new_empty(B, H, X, 1, dtype=torch.float32)
    logits = queries.new_empty(B, H, X, W * codec.window, dtype=torch.float32)
    given = [
        queries.float() * scale,
        coded.keys,
        coded.side("key_scale"),
        coded.side("key_zero"),
        coded.values,
        coded.side("value_scale"),
        coded.side("value_zero"),
        positions.int(),
        coded.side("dormant"),
        cos,
        sin,
    ]
    arrays = [array.contiguous() for array in given]
    if kernel(shape, _Arrays(*(array.data_ptr() for array in (*arrays, output, logsum, logits)))):
        raise MemoryError("no memory for the attention over codes")
    return output, logsum, logits


@cache
def _kernel() -> Callable[..., int] | None:
    """The compiled function, where there is one."""
    return function(Path(__file__).with_name("coded.c"), "read_coded", _Shape, _Arrays, result=ctypes.c_int)
