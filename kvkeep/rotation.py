"""Rotary positions: turning keys to their positions and back.

T positions, R <= D rotated dimensions of D, P = R / 2 pairs of them.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

# maps positions [..., T] to (cos, sin), each [..., T, R], halves repeated
Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


def rotate(x: Float[Tensor, "*S D"], cos: Float[Tensor, "*C R"], sin: Float[Tensor, "*C R"]) -> Float[Tensor, "*S D"]:
    """Rotary embedding of the first R dimensions of `x`, halves paired; the others pass."""
    size, half = cos.shape[-1], cos.shape[-1] // 2
    turned = x[..., :size] * cos
    turned[..., :half].addcmul_(x[..., half:size], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)


def unrotate(x: Float[Tensor, "*S D"], cos: Float[Tensor, "*C R"], sin: Float[Tensor, "*C R"]) -> Float[Tensor, "*S D"]:
    """What `rotate` made `x` of."""
    # the tables of some long-context rotations scale too
    scale = cos**2 + sin**2
    return rotate(x, cos / scale, -sin / scale)


def rotary_of(frequencies: Float[Tensor, " P"]) -> Rotary:
    """The rotation by so many radians a position of each pair of dimensions, see `frequencies.rotation_frequencies`."""

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        half = positions[..., None] * frequencies
        angles = torch.cat([half, half], dim=-1)
        return angles.cos(), angles.sin()

    return rotary


class RotaryTable:
    """A rotation looked up in fp32 tables `[S, R]` that grow with the positions asked for."""

    def __init__(self, rotary: Rotary):
        self._rotary = rotary
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(self, positions: Int[Tensor, "*S"]) -> tuple[Float[Tensor, "*S R"], Float[Tensor, "*S R"]]:
        """Cosines and sines of `positions`, which must not be negative."""
        cos, sin = self.upto(int(positions.amax()) + 1 if positions.numel() else 1, positions.device)
        rows, shape = positions.flatten(), positions.shape
        return cos.index_select(0, rows).unflatten(0, shape), sin.index_select(0, rows).unflatten(0, shape)

    def upto(self, length: int, device: torch.device) -> tuple[Float[Tensor, "S R"], Float[Tensor, "S R"]]:
        """The whole tables, which cover at least `length` positions."""
        if self._tables is None or self._tables[0].shape[0] < length or self._tables[0].device != device:
            room = 256 * -(-length * 5 // 1024)
            cos, sin = self._rotary(torch.arange(room, device=device)[None])
            self._tables = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self._tables
