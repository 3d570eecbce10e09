"""Pages: everything one request keeps in one layer, in one block of vLLM's memory, and Slots over many of them.

P pages, R requests, H KV heads, N slots of a page, D head size.

A page has one cell for each KV head: keys `[D, N]` (as vLLM's CPU kernel reads them), values `[N, D]`, then for each
slot its position and the policy's numbers, then the head's part of the policy's streams. So cells are evenly spaced,
and a kernel for paged attention takes every head for a sequence of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import pad

from ..policies import Policy
from ..slots import EMPTY, Slots

_NUMBER = 4
# vLLM's CPU kernel takes slots in blocks of so many
MULTIPLE = 32


@dataclass(frozen=True)
class PageShape:
    """How a page is laid out.

    Attributes:
        heads: KV heads of a layer, on this worker.
        capacity: slots of a head, a multiple of 32.
        head_size: D.
        dtype: of keys and values.
        side: names of the policy's fp32 numbers for each slot.
        streams: shapes of the policy's fp32 arrays for each request.
    """

    heads: int
    capacity: int
    head_size: int
    dtype: torch.dtype
    side: tuple[str, ...]
    streams: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, policy: Policy, tokens: int, *, heads: int, head_size: int, dtype: torch.dtype) -> "PageShape":
        """The page for so many tokens kept, and the next one."""
        capacity = rounded_up(tokens + 1, MULTIPLE)
        # those that have streams for query heads need the rotation too, and are refused
        streams = tuple(policy.streams(heads, 1, head_size).items())
        return cls(heads, capacity, head_size, dtype, policy.side, streams)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one head, with its part of the streams."""
        numbers = (1 + len(self.side)) * _NUMBER
        streams = -(-self.stream_numbers // self.capacity) * _NUMBER
        return 2 * self.head_size * self.dtype.itemsize + numbers + streams

    @property
    def stream_numbers(self) -> int:
        """Numbers of the streams in each head's cell."""
        return -(-sum(math.prod(shape) for _, shape in self.streams) // self.heads)

    @property
    def cell_bytes(self) -> int:
        return self.capacity * self.slot_bytes

    @property
    def page_bytes(self) -> int:
        return self.heads * self.cell_bytes


class Pages:
    """One layer's pages, as views of its memory.

    Args:
        memory: `[P, H, N, C]`, C bytes for each slot, as vLLM hands it out.
    """

    def __init__(self, memory: Tensor, shape: PageShape):
        self.memory, self.shape = memory, shape
        cells = _bytes(memory, shape)
        self.num_pages = cells.shape[0]
        N, D = shape.capacity, shape.head_size
        size = N * D * shape.dtype.itemsize
        numbers = 2 * size + (1 + len(shape.side)) * N * _NUMBER
        streams = numbers + shape.stream_numbers * _NUMBER
        # [P, H, ...] each
        self.turned_keys: Float[Tensor, "P H D N"] = cells[..., :size].view(shape.dtype).unflatten(-1, (D, N))
        self.values: Float[Tensor, "P H N D"] = cells[..., size : 2 * size].view(shape.dtype).unflatten(-1, (N, D))
        self.numbers: Int[Tensor, "P H K N"] = cells[..., 2 * size : numbers].view(torch.int32).unflatten(-1, (-1, N))
        self.streams: Float[Tensor, "P H S"] = cells[..., numbers:streams].view(torch.float32)

    @property
    def keys(self) -> Float[Tensor, "P H N D"]:
        return self.turned_keys.mT

    def prompt(self, page: int, held: int) -> Slots | None:
        """A copy of the `held` tokens of a page, in order of position; None where there are none."""
        if not held:
            return None
        numbers = self.numbers[page : page + 1]
        # empty slots are before all others
        order = numbers[:, :, 0].argsort(dim=-1, stable=True)[..., -held:]
        heads = torch.arange(order.shape[1], device=order.device)[:, None]
        keys, values = (array[page, heads, order[0]][None] for array in (self.keys, self.values))
        positions, side = _named(numbers.gather(3, order[:, :, None].expand(-1, -1, numbers.shape[2], -1)), self.shape)
        streams = _named_streams(self.streams[page : page + 1].clone(), self.shape)
        return Slots(keys, values, positions, side, streams)

    def store_prompt(self, page: int, slots: Slots) -> None:
        """Write one request's slots into a page, without the hole before them, and empty the rest of it."""
        first = slots.length - slots.kept
        held = slots.kept
        self.keys[page, :, :held] = slots.keys[0, :, first:]
        self.values[page, :, :held] = slots.values[0, :, first:]
        # kernels multiply what is empty by zero, so it must be finite
        self.values[page, :, held:] = 0
        positions, side = _named(self.numbers[page : page + 1], self.shape)
        positions[..., :held] = slots.positions[..., first:]
        positions[..., held:] = EMPTY
        for name, array in side.items():
            array[..., :held] = slots.side(name)[..., first:]
        if self.shape.streams:
            flat = torch.cat([slots.streams[name].flatten() for name, _ in self.shape.streams])
            cells = self.streams[page]
            cells.copy_(pad(flat, (0, cells.numel() - len(flat))).view(cells.shape))


class PagedSlots(Slots):
    """Slots of R requests whose keys and values stay in their pages; what is small is copied, and written back.

    Every request has room for the token that comes next: the first slot that is empty.

    Args:
        pages: the layer's pages.
        rows: the page of each request, `[R]`.
        length: slots of a page that are in use: the tokens kept, and one more.
    """

    def __init__(self, pages: Pages, rows: Int[Tensor, " R"], length: int):
        self.pages, self.rows = pages, rows
        self._numbers = pages.numbers[rows]
        self._streams = pages.streams[rows]
        positions, side = _named(self._numbers, pages.shape)
        self._arrays = {"positions": positions, **side}
        self.streams = _named_streams(self._streams, pages.shape)
        self.length = length
        self.holes = self.occupied.byte().argmin(-1)

    @cached_property
    def keys(self) -> Float[Tensor, "R H N D"]:
        return self.pages.turned_keys[self.rows, :, :, : self.length].mT

    @cached_property
    def values(self) -> Float[Tensor, "R H N D"]:
        return self.pages.values[self.rows, :, : self.length]

    def store(self) -> None:
        """Write what is small back into the pages."""
        self.pages.numbers[self.rows] = self._numbers
        if self.pages.shape.streams:
            self.pages.streams[self.rows] = self._streams

    def _places(self, index: Int[Tensor, "R H M"]) -> tuple[Tensor, Tensor, Tensor]:
        heads = torch.arange(index.shape[1], device=index.device)
        return self.rows[:, None, None], heads[:, None], index

    def _gather(self, name: str, index: Int[Tensor, "R H M"]) -> Tensor:
        if name in self._arrays:
            return super()._gather(name, index)
        return getattr(self.pages, name)[self._places(index)]

    def _write(self, index: Int[Tensor, "R H M"], arrays: Mapping[str, Tensor]) -> None:
        for name, new in arrays.items():
            getattr(self.pages, name)[self._places(index)] = new


def _bytes(memory: Tensor, shape: PageShape) -> UInt8[Tensor, "P H C"]:
    """The bytes of each cell, one after the other, whatever type they were handed out as."""
    P, H = memory.shape[:2]
    size = memory.element_size()
    strides = [stride * size for stride in memory.stride()[:2]]
    raw = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())
    return raw.as_strided((P, H, shape.cell_bytes), (*strides, 1), memory.storage_offset() * size)


def _named(numbers: Int[Tensor, "R H K N"], shape: PageShape) -> tuple[Tensor, dict[str, Tensor]]:
    """Positions and side arrays, as views."""
    side = {name: numbers[:, :, 1 + order].view(torch.float32) for order, name in enumerate(shape.side)}
    return numbers[:, :, 0], side


def _named_streams(numbers: Float[Tensor, "R H S"], shape: PageShape) -> dict[str, Tensor]:
    flat, start, named = numbers.flatten(1), 0, {}
    for name, size in shape.streams:
        stop = start + math.prod(size)
        named[name] = flat[:, start:stop].view(-1, *size)
        start = stop
    return named


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
