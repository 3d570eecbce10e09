"""The compiled twin of `coded.read_coded`: built by the machine's C compiler when first used, and done without if there
is none.

B sequences, H KV heads, W windows of w tokens each, X queries of a KV head, D head size.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ..slots import Slots
from ..windows import Codec

logger = logging.getLogger(__name__)

# with more queries a matrix product over dequantized blocks is faster
MOST_QUERIES = 32

_SOURCE = Path(__file__).with_name("coded.c")
_COMPILE = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-std=gnu11", "-c")


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
    """The compiled function; None without a compiler, or with KVKEEP_KERNEL=0 in the environment."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("KVKEEP_KERNEL") == "0":
        return None
    # a loaded library outlives its file
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
        unit, library = Path(folder) / "coded.o", Path(folder) / "coded.so"
        # linked without -ffast-math, which would flush the whole process's small numbers to zero
        for step in ((*_COMPILE, _SOURCE, "-o", unit), ("-shared", unit, "-lm", "-o", library)):
            built = subprocess.run([compiler, *map(str, step)], capture_output=True, text=True)
            if built.returncode:
                logger.warning("codes are read by torch, which is slower; %s said: %s", compiler, built.stderr)
                return None
        function = ctypes.CDLL(str(library)).read_coded
    function.argtypes = [_Shape, _Arrays]
    function.restype = ctypes.c_int
    return function
