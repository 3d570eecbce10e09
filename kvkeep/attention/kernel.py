"""The compiled twin of `coded.read_coded`.

B sequences, H KV heads, W windows of w tokens each, X queries of a KV head, D head size.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ..slots import Slots
from ..windows import Codec
from .compiled import function

# with more queries a matrix product over dequantized blocks is faster
MOST_QUERIES = 32

_SOURCE = Path(__file__).with_name("coded.c")

# as in coded.c
_SHAPE = "rows windows window queries key_size key_bits value_size value_bits rotated tokens"
FIELDS = ("starts", "tokens", "dormant", "keys", "key_scale", "key_zero", "values", "value_scale", "value_zero")
_ARRAYS = "queries cosines sines output logsums logits"
# logits of what is hidden, as there
HIDDEN = -1.7e38


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _SHAPE.split()]


class _Codes(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_void_p * len(FIELDS)),
        ("row", ctypes.c_int64 * len(FIELDS)),
        ("window", ctypes.c_int64 * len(FIELDS)),
    ]


class _Arrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _ARRAYS.split()]


class _Cells(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("requests", "page_bytes", "cell_bytes")),
        *((name, ctypes.c_void_p) for name in ("cells", "pages", "windows", "bits", "bytes")),
        ("field", ctypes.c_int64 * len(FIELDS)),
    ]


class Found(NamedTuple):
    """Output, log of the softmax's denominator, and logits of every token; those of hidden windows are very small."""

    output: Float[Tensor, "B H X Dv"]
    logsum: Float[Tensor, "B H X 1"]
    logits: Float[Tensor, "B H X Ww"]


class Cells(NamedTuple):
    """Windows of B requests in pages of memory: of each KV head's cell the last bytes.

    Attributes:
        memory: of which page 0 is the first.
        page_bytes, cell_bytes: from one page, and one KV head, to the next.
        pages: the page of each request.
        windows, bits, window_bytes: of each request: how many windows, bits of their keys, bytes of each.
        fields: where in a window each of `FIELDS` lies, -1 where there is no such field.
    """

    memory: UInt8[Tensor, " M"]
    page_bytes: int
    cell_bytes: int
    pages: Int[Tensor, " B"]
    windows: Int[Tensor, " B"]
    bits: Int[Tensor, " B"]
    window_bytes: Int[Tensor, " B"]
    fields: tuple[int, ...]


def serves(queries: Float[Tensor, "B H X D"]) -> bool:
    """Whether the kernel reads codes for these queries: few of them, in at most fp32, on a CPU, with a compiler."""
    few = queries.device.type == "cpu" and queries.shape[2] <= MOST_QUERIES and queries.dtype != torch.float64
    return few and _kernel() is not None


def run(queries: Float[Tensor, "B H X D"], coded: Slots, codec: Codec, scale: float) -> Found:
    """Attention over windows in arrays of their own."""
    kernel = _kernel()
    assert kernel is not None, "ask serves() first"
    arrays = _fields_of(coded)
    last = arrays["tokens"] if "tokens" in arrays else coded.positions + codec.window - 1
    call = _call(queries, codec, scale, coded.length, int(last.amax()))
    codes = _Codes()
    for order, name in enumerate(FIELDS):
        array = arrays.get(name)
        if array is not None:
            codes.first[order] = array.data_ptr()
            codes.row[order], codes.window[order] = (step * array.element_size() for step in array.stride()[1:3])
    call.shape.rows, call.shape.windows = queries.shape[0] * queries.shape[1], coded.length
    return call.done(kernel(call.shape, codes, call.arrays))


def run_cells(queries: Float[Tensor, "B H X D"], cells: Cells, codec: Codec, scale: float, last: int) -> Found:
    """Attention over windows in pages, no token of which comes behind position `last`."""
    kernel = _paged_kernel()
    assert kernel is not None, "ask serves() first"
    call = _call(queries, codec, scale, int(cells.windows.amax()), last)
    B, H = queries.shape[:2]
    call.shape.rows = H
    numbers = [numbers.long().contiguous() for numbers in (cells.pages, cells.windows, cells.bits, cells.window_bytes)]
    pointers = (array.data_ptr() for array in (cells.memory, *numbers))
    offsets = (ctypes.c_int64 * len(FIELDS))(*cells.fields)
    paged = _Cells(B, cells.page_bytes, cells.cell_bytes, *pointers, offsets)
    return call.done(kernel(call.shape, paged, call.arrays))


class _Call(NamedTuple):
    """What both functions take; `held` keeps the arrays alive while they run."""

    shape: _Shape
    arrays: _Arrays
    found: Found
    held: tuple[Tensor, ...]

    def done(self, failed: int) -> Found:
        if failed:
            raise MemoryError("no memory for the attention over codes")
        return self.found


def _call(queries: Tensor, codec: Codec, scale: float, windows: int, last: int) -> _Call:
    B, H, X, _ = queries.shape
    cos, sin = codec.table.upto(last + 1, queries.device)
    sizes = {name: getattr(codec, name) for name in ("window", "key_size", "key_bits", "value_size", "value_bits")}
    shape = _Shape(queries=X, rotated=cos.shape[1], tokens=windows * codec.window, **sizes)
    output = queries.new_empty(B, H, X, codec.value_size, dtype=torch.float32)
    logsum = queries.new_empty(B, H, X, 1, dtype=torch.float32)
    logits = queries.new_full((B, H, X, shape.tokens), HIDDEN, dtype=torch.float32)
    held = ((queries.float() * scale).contiguous(), cos, sin, output, logsum, logits)
    arrays = _Arrays(*(array.data_ptr() for array in held))
    return _Call(shape, arrays, Found(output, logsum, logits), held)


def _fields_of(coded: Slots) -> dict[str, Tensor]:
    """The arrays that are read, of which one row follows the other."""
    arrays = {"starts": coded.positions.int(), "keys": coded.keys, "values": coded.values}
    arrays |= {name: coded.side(name) for name in coded.side_names if name in FIELDS}
    return {name: array if _evenly_spaced(array) else array.contiguous() for name, array in arrays.items()}


def _evenly_spaced(array: Tensor) -> bool:
    inner = array[0, 0, 0]
    return inner.is_contiguous() and array.stride(0) == array.shape[1] * array.stride(1)


@cache
def _kernel() -> Callable[..., int] | None:
    """The compiled function, where there is one."""
    return function(_SOURCE, "read_coded", _Shape, _Codes, _Arrays, result=ctypes.c_int)


@cache
def _paged_kernel() -> Callable[..., int] | None:
    return function(_SOURCE, "read_cells", _Shape, _Cells, _Arrays, result=ctypes.c_int)
