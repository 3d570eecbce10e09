"""Windows of tokens as low-bit codes, and slots that hold some of their tokens that way.

B sequences, H KV heads, N slots, W windows of w tokens each, D head size.

A window is one slot of a `Slots` whose keys and values are codes, `[B, H, W, w, P]` with P packed bytes a token, and
whose position is that of its first token. Beside it lie its scales, its `worth`, whether it is `dormant` (held in full
precision too, and read there), and the positions of its `tokens` where they are no neighbours. Codes are made once;
whatever moves afterwards, they are copied bit for bit.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .quant import BITS, Codes, dequantize, guarded_bits, packed_size, quantize
from .rotation import RotaryTable, rotate, unrotate
from .slots import EMPTY, Slots, Snapshot

_POSITION_BYTES, _WORTH_BYTES, _DORMANT_BYTES, _SCALE_BYTES = 4, 4, 1, 2


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """What a window of codes is made of.

    Attributes:
        window: w.
        key_bits, value_bits: of a code.
        key_size, value_size: D of either.
        scattered: the tokens of a window need not be neighbours, so each one's position is held.
    """

    window: int
    key_bits: int
    value_bits: int
    key_size: int
    value_size: int
    scattered: bool = False

    @property
    def window_bytes(self) -> int:
        """Codes and scales of one window of one KV head."""
        keys, values = packed_size(self.key_size, self.key_bits), packed_size(self.value_size, self.value_bits)
        return self.window * (keys + values) + 2 * _SCALE_BYTES * (self.key_size + self.window)

    @property
    def slot_bytes(self) -> int:
        """All that one window of one KV head takes, its position and worth included."""
        positions = 1 + self.window * self.scattered
        return self.window_bytes + positions * _POSITION_BYTES + _WORTH_BYTES + _DORMANT_BYTES


@dataclass(frozen=True, kw_only=True)
class Codec(WindowShape):
    """How windows become codes: keys before rotation with a scale per channel, values with a scale per token.

    Attributes:
        table: the model's rotation.
        shared: every KV head holds the same windows.
    """

    table: RotaryTable
    shared: bool = False

    def encode(
        self,
        keys: Float[Tensor, "B H W w D"],
        values: Float[Tensor, "B H W w Dv"],
        positions: Int[Tensor, "B H W w"],
        worth: Float[Tensor, "B H W"],
    ) -> Slots:
        """Windows of tokens at `positions` (-1 where there is none), as codes.

        Raises:
            ValueError: for keys or values that are not finite.
        """
        starts = positions.amin(-1)
        plain = unrotate(keys.float(), *self._angles(positions))
        key, value = quantize(plain, self.key_bits, over=-2), quantize(values, self.value_bits, over=-1)
        side = {
            "key_scale": key.scale,
            "key_zero": key.zero,
            "value_scale": value.scale,
            "value_zero": value.zero,
            "worth": worth.float(),
            "dormant": torch.zeros_like(starts, dtype=torch.bool),
            **({"tokens": positions} if self.scattered else {}),
        }
        return Slots(key.packed, value.packed, starts, side)

    def keys(self, coded: Slots, part: slice = slice(None)) -> Float[Tensor, "B H W w D"]:
        """Keys of some windows in fp32, rotated to their positions."""
        scale, zero = coded.side("key_scale")[:, :, part], coded.side("key_zero")[:, :, part]
        plain = dequantize(Codes(coded.keys[:, :, part], scale, zero), self.key_bits, self.key_size, over=-2)
        return rotate(plain, *self._angles(self.positions(coded, part)))

    def values(self, coded: Slots, part: slice = slice(None)) -> Float[Tensor, "B H W w Dv"]:
        """Values of some windows in fp32."""
        scale, zero = coded.side("value_scale")[:, :, part], coded.side("value_zero")[:, :, part]
        return dequantize(Codes(coded.values[:, :, part], scale, zero), self.value_bits, self.value_size, over=-1)

    def positions(self, coded: Slots, part: slice = slice(None)) -> Int[Tensor, "B H W w"]:
        """Positions of every token of some windows, -1 in windows that are none."""
        starts = coded.positions[:, :, part, None]
        inside = torch.arange(self.window, dtype=starts.dtype, device=starts.device)
        tokens = coded.side("tokens")[:, :, part] if self.scattered else starts + inside
        return torch.where(starts == EMPTY, EMPTY, tokens)

    def _angles(self, positions: Int[Tensor, "B H W w"]) -> tuple[Tensor, Tensor]:
        return self.table.at((positions[:, :1] if self.shared else positions).clamp(min=0))


def key_bits(coded: Slots, key_size: int) -> int:
    """The bits that keys were coded with."""
    return next(bits for bits in BITS if packed_size(key_size, bits) == coded.keys.shape[-1])


def guarded_codec(
    codec: Codec,
    keys: Float[Tensor, "B H W w D"],
    positions: Int[Tensor, "B H W w"],
    queries: Float[Tensor, "B HG T D"],
    scale: float,
    limit: float,
) -> Codec:
    """`codec` with bits for keys that leave no head's logits wrong by more than `limit` (root mean square, in nats).

    Keys of every head get the bits that the worst head needs: slots are as wide in every head. Where the keys have
    channels of large products with the queries, as in the first and last layers of Qwen2, two bits are too few.
    """
    H = keys.shape[1]
    asking = queries.unflatten(1, (H, -1)).flatten(2, 3).float() * scale
    held = (positions != EMPTY).flatten(2)

    def error(bits: int) -> Float[Tensor, " H"]:
        tried = replace(codec, key_bits=bits)
        nothing = keys.new_zeros(positions.shape[:-1], dtype=torch.float32)
        coded = tried.encode(keys, keys.new_zeros(*keys.shape[:-1], codec.value_size), positions, nothing)
        lost = (keys.float() - tried.keys(coded)).flatten(2, 3)
        squares = (asking @ lost.mT).square().mean(2) * held
        return (squares.sum((0, 2)) / held.sum((0, 2)).clamp(min=1)).sqrt()

    return replace(codec, key_bits=guarded_bits(codec.key_bits, limit, error))


class TieredSlots(Slots):
    """Slots with windows beside them whose tokens are held as codes; whatever moves the slots moves them too."""

    coded: Slots | None = None

    @property
    def readable(self) -> Slots | None:
        """The windows, if there are any."""
        return self.coded if self.coded is not None and self.coded.length else None

    def bytes_by_array(self) -> dict[str, int]:
        coded = {} if self.coded is None else self.coded.bytes_by_array()
        return {**super().bytes_by_array(), **{f"coded.{name}": size for name, size in coded.items()}}

    def state(self) -> dict[str, Tensor]:
        coded = {} if self.coded is None else self.coded.state()
        return {**super().state(), **{f"coded.{name}": array for name, array in coded.items()}}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "TieredSlots":
        names = [name for name in state if name.startswith("coded.")]
        coded = {name.removeprefix("coded."): state.pop(name) for name in names}
        slots = super().from_state(state)
        assert isinstance(slots, cls)
        slots.coded = Slots.from_state(coded) if coded else None
        return slots

    def snapshot(self) -> Snapshot:
        return super().snapshot()._replace(coded=None if self.coded is None else self.coded.snapshot())

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        if self.coded is None or snapshot.coded is None:
            self.coded = None
        else:
            self.coded.restore(snapshot.coded)

    def select(self, rows: Int[Tensor, " R"]) -> None:
        super().select(rows)
        if self.coded is not None:
            self.coded.select(rows)

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        if self.coded is not None:
            self.coded.to(device)
