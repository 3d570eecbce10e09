"""Windows of codes as records of bytes, as pages hold them.

H KV heads, W windows of w tokens each, D head size.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from ..attention.kernel import FIELDS
from ..quant import BITS, packed_size
from ..slots import Slots
from ..windows import WindowShape

# records begin at multiples of it, so that numbers of any type may lie in them
_ALIGNED = 4


class _Field(NamedTuple):
    """One array of windows: where it lies in a record, and the numbers of one window."""

    start: int
    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """How the arrays of a window follow each other in its record.

    Attributes:
        shape: of the window.
    """

    shape: WindowShape

    @cached_property
    def fields(self) -> dict[str, _Field]:
        """Every array; keys come last, so that others lie where they lie whatever the bits of keys."""
        shape, w = self.shape, self.shape.window
        arrays: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "starts": (torch.int32, ()),
            "worth": (torch.float32, ()),
            **({"tokens": (torch.int32, (w,))} if shape.scattered else {}),
            "key_scale": (torch.float16, (shape.key_size,)),
            "key_zero": (torch.float16, (shape.key_size,)),
            "value_scale": (torch.float16, (w,)),
            "value_zero": (torch.float16, (w,)),
            "dormant": (torch.bool, ()),
            "values": (torch.uint8, (w, packed_size(shape.value_size, shape.value_bits))),
            "keys": (torch.uint8, (w, packed_size(shape.key_size, shape.key_bits))),
        }
        fields, start = {}, 0
        for name, (dtype, size) in arrays.items():
            fields[name] = _Field(start, dtype, size)
            start = fields[name].stop
        return fields

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a record."""
        return -(-self.fields["keys"].stop // _ALIGNED) * _ALIGNED

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the arrays lie that the compiled attention reads."""
        return tuple(self.fields[name].start if name in self.fields else -1 for name in FIELDS)

    @cached_property
    def by_bits(self) -> dict[int, "Record"]:
        """The records that may come of this one, by the bits of their keys, which may need more than were asked for."""
        return {bits: Record(replace(self.shape, key_bits=bits)) for bits in BITS if bits >= self.shape.key_bits}

    @cached_property
    def bytes_by_bits(self) -> Int[Tensor, "9"]:
        """Bytes of a record whose keys take so many bits; 0 for 0, which is no record."""
        sizes = torch.zeros(BITS[-1] + 1, dtype=torch.long)
        for bits, record in self.by_bits.items():
            sizes[bits] = record.num_bytes
        return sizes

    def views(self, records: UInt8[Tensor, "*S R"]) -> dict[str, Tensor]:
        """The arrays `[*S, ...]` in records, as views that may be written."""
        return {
            name: records[..., field.start : field.stop].view(field.dtype).view(*records.shape[:-1], *field.size)
            for name, field in self.fields.items()
        }

    def slots(self, records: UInt8[Tensor, "B H W R"]) -> Slots:
        """Windows as the layers know them, in storage of their own."""
        arrays = {name: array.clone() for name, array in self.views(records).items()}
        starts = arrays.pop("starts")
        return Slots(arrays.pop("keys"), arrays.pop("values"), starts, arrays)

    def write(self, records: UInt8[Tensor, "B H W R"], coded: Slots) -> None:
        """Write windows into records."""
        given = {"starts": coded.positions, "keys": coded.keys, "values": coded.values}
        for name, array in self.views(records).items():
            array.copy_(given[name] if name in given else coded.side(name))
