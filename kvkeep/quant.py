"""Codes of 2, 4 or 8 bits, packed into bytes, with scales in fp16 that are used as they are stored.

n tokens, D channels, H heads; `*S` are any dimensions before.

A group of numbers shares one scale and one zero: `code = round((x - zero) / scale)`, `x' = code * scale + zero`, with
the least number as zero and the range in as many steps as there are codes (asymmetric quantization).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

BITS = (2, 4, 8)

_LARGEST = torch.finfo(torch.float16).max


class Codes(NamedTuple):
    """Packed codes, and a scale and a zero for each group of them."""

    packed: UInt8[Tensor, "*S n P"]
    scale: Float16[Tensor, "*G"]
    zero: Float16[Tensor, "*G"]


def quantize(x: Float[Tensor, "*S n D"], bits: int, *, over: int) -> Codes:
    """The codes of `x` in groups along dimension `over`.

    Args:
        bits: 2, 4 or 8.
        over: -2 for one scale per channel (over the n tokens), -1 for one per token (over the D channels).

    Raises:
        ValueError: for numbers that are not finite or that fp16 cannot hold.
    """
    x = x.float()
    # a NaN fails every comparison
    if not bool((x.abs() <= _LARGEST).all()):
        raise ValueError(
            f"only finite numbers up to {_LARGEST:g} can be quantized, got {x.abs().amax():g}; keep what holds others "
            "in full precision"
        )
    levels = 2**bits - 1
    low, high = x.aminmax(dim=over)
    zero, scale = low.half(), ((high - low) / levels).half()
    # where all numbers are equal, or as good as equal in fp16
    scale = torch.where(scale == 0, 1, scale)
    steps = (x - zero.float().unsqueeze(over)) / scale.float().unsqueeze(over)
    return Codes(pack(steps.round_().clamp_(0, levels).to(torch.uint8), bits), scale, zero)


def dequantize(codes: Codes, bits: int, size: int, *, over: int) -> Float[Tensor, "*S n D"]:
    """What `quantize` made codes of, in fp32, up to half a step; `size` is D."""
    steps = unpack(codes.packed, bits, size).float()
    return torch.addcmul(codes.zero.float().unsqueeze(over), steps, codes.scale.float().unsqueeze(over))


def packed_size(size: int, bits: int) -> int:
    """Bytes that `size` codes take."""
    return -(-size * bits // 8)


def pack(codes: UInt8[Tensor, "*S D"], bits: int) -> UInt8[Tensor, "*S P"]:
    """Codes in bytes: byte j holds codes j, j + P, j + 2 P and so on, from its lowest bits up."""
    planes, size = 8 // bits, packed_size(codes.shape[-1], bits)
    padded = torch.nn.functional.pad(codes, (0, planes * size - codes.shape[-1]))
    shifts = torch.arange(planes, dtype=torch.uint8, device=codes.device)[:, None] * bits
    return (padded.unflatten(-1, (planes, size)) << shifts).sum(-2, dtype=torch.uint8)


def unpack(packed: UInt8[Tensor, "*S P"], bits: int, size: int) -> UInt8[Tensor, "*S D"]:
    """The `size` codes that `pack` put into bytes."""
    shifts = torch.arange(8 // bits, dtype=torch.uint8, device=packed.device)[:, None] * bits
    planes = (packed.unsqueeze(-2) >> shifts) & (2**bits - 1)
    return planes.flatten(-2)[..., :size]


def guarded_bits(bits: int, limit: float, error: Callable[[int], Float[Tensor, " H"]]) -> int:
    """The fewest bits, from `bits` on, with which no head's error passes `limit`; 8 where even that is too few.

    Args:
        error: of every head, with so many bits.
    """
    enough = (more for more in BITS if more >= bits and bool((error(more) <= limit).all()))
    return next(enough, BITS[-1])
