"""Pages: everything one request keeps in one layer, in one block of vLLM's memory, and Slots over many of them.

P pages, R requests, H KV heads, N slots of a page, S slots that lie together, C = N / S, D head size.

A page has one cell for each KV head: the head's part of the policy's streams, then slots, S together: keys `[D, S]`
(as vLLM's CPU kernel reads them), values `[S, D]`, and for each slot its position and the policy's numbers. A kernel
for paged attention takes every head for a sequence of its own.

Under a policy with tiers slots lie 32 together, and the last bytes of a cell are windows of codes, which grow towards
the slots; what they cover is no slot. Before the streams stand the number of windows and the bits of their keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import pad

from ..budget import Budget
from ..policies import Policy, Tiers
from ..slots import EMPTY, Slots
from ..windows import TieredSlots
from .codes import PagedCodes
from .records import Record
from .room import TierRoom

_NUMBER = 4
# vLLM's CPU kernel takes slots in blocks of so many
MULTIPLE = 32
# slots that lie together begin at a multiple of so many bytes in their cell
UNIT = 64


@dataclass(frozen=True)
class PageShape:
    """How a page is laid out.

    Attributes:
        heads: KV heads of a layer, on this worker.
        capacity: tokens kept and one more, rounded up to a multiple of 32.
        head_size: D.
        dtype: of keys and values.
        side: names of the policy's fp32 numbers for each slot.
        streams: shapes of the policy's fp32 arrays for each request.
        record: of a window of codes; None for a policy without tiers.
        room: bytes for slots and codes in each cell; 0 for those of `capacity` slots.
    """

    heads: int
    capacity: int
    head_size: int
    dtype: torch.dtype
    side: tuple[str, ...]
    streams: tuple[tuple[str, tuple[int, ...]], ...]
    record: Record | None = None
    room: int = 0

    @classmethod
    def of(cls, policy: Policy, budget: Budget, *, heads: int, head_size: int, dtype: torch.dtype) -> "PageShape":
        """The page for what a budget in tokens keeps, and the next token."""
        assert budget.tokens is not None
        capacity = rounded_up(budget.tokens + 1, MULTIPLE)
        # those that have streams for query heads need the rotation too, and are refused
        streams = tuple(policy.streams(heads, 1, head_size).items())
        plain = cls(heads, capacity, head_size, dtype, policy.side, streams)
        if policy.tiers is None:
            return plain
        record = Record(policy.tiers.window_shape(head_size, head_size))
        tiered = replace(plain, record=record)
        most = max(
            tiered.tier_room(policy.tiers, budget, one).cell_bytes(tiered.block_bytes, tiered.together)
            for one in record.by_bits.values()
        )
        return replace(tiered, room=most)

    def tier_room(self, tiers: Tiers, budget: Budget, record: Record) -> TierRoom:
        """What each tier may hold, in a layer with such records."""
        element = self.dtype.itemsize
        spared = element - min(element, tiers.element_bytes or element)
        return TierRoom(tiers, budget, self.plain_bytes - 2 * spared * self.head_size, record)

    @property
    def together(self) -> int:
        """Slots that lie together."""
        return self.capacity if self.record is None else MULTIPLE

    @property
    def plain_bytes(self) -> int:
        """Bytes of one slot of one head."""
        return 2 * self.head_size * self.dtype.itemsize + (1 + len(self.side)) * _NUMBER

    @property
    def block_bytes(self) -> int:
        """Bytes of slots that lie together."""
        return self.together * self.plain_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of slots of a cell, as long as there are no codes."""
        return (self.cell_bytes - self.front_bytes) // self.block_bytes

    def blocks_beside(self, coded_bytes: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
        """Blocks of slots that so many bytes of codes leave to a cell."""
        room = self.cell_bytes - self.front_bytes - coded_bytes
        return torch.div(room, self.block_bytes, rounding_mode="floor")

    @property
    def header(self) -> int:
        """Numbers before the streams."""
        return 0 if self.record is None else PagedCodes.HEADER

    @property
    def stream_numbers(self) -> int:
        """Numbers of the streams in each head's cell."""
        return -(-sum(math.prod(shape) for _, shape in self.streams) // self.heads)

    @property
    def front_bytes(self) -> int:
        """Bytes of a cell before its slots."""
        return rounded_up((self.header + self.stream_numbers) * _NUMBER, UNIT)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a cell for each slot of its capacity."""
        room = self.room or self.capacity * self.plain_bytes
        return rounded_up(-(-(self.front_bytes + room) // self.capacity), _NUMBER)

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

    Raises:
        ValueError: where pages do not follow each other in it.
    """

    def __init__(self, memory: Tensor, shape: PageShape):
        self.memory, self.shape = memory, shape
        self.cells = _cells(memory, shape)
        S, D, C, front = shape.together, shape.head_size, shape.num_blocks, shape.front_bytes
        blocks = self.cells[..., front : front + C * shape.block_bytes].unflatten(-1, (C, -1))
        size = S * D * shape.dtype.itemsize
        # [P, H, C, ...] each
        self.turned_keys: Float[Tensor, "P H C D S"] = blocks[..., :size].view(shape.dtype).unflatten(-1, (D, S))
        self.values: Float[Tensor, "P H C S D"] = blocks[..., size : 2 * size].view(shape.dtype).unflatten(-1, (S, D))
        self.numbers: Int[Tensor, "P H C K S"] = blocks[..., 2 * size :].view(torch.int32).unflatten(-1, (-1, S))
        start = shape.header * _NUMBER
        stop = start + shape.stream_numbers * _NUMBER
        self.streams: Float[Tensor, "P H M"] = self.cells[..., start:stop].view(torch.float32)

    @property
    def keys(self) -> Float[Tensor, "P H C S D"]:
        return self.turned_keys.mT

    def codes(self, rows: Int[Tensor, " R"]) -> PagedCodes | None:
        """The codes of some requests; None under a policy without tiers."""
        record = self.shape.record
        return None if record is None else PagedCodes(self.cells, record, rows)

    def prompt(self, page: int) -> Slots:
        """A copy of the tokens of a page, in order of position, empty slots first."""
        slots = PagedSlots(self, torch.tensor([page]))
        held = int(slots.occupied.sum(-1).amax())
        order = slots.positions.argsort(dim=-1, stable=True)[..., slots.length - held :]
        side = {name: slots.side(name).gather(2, order) for name in slots.side_names}
        kind = Slots if slots.codes is None else TieredSlots
        copied = kind(*slots.tokens(order), slots.positions.gather(2, order), side, slots.streams)
        if isinstance(copied, TieredSlots) and slots.codes is not None:
            copied.coded = slots.codes.of(0)
        return copied

    def store_prompt(self, page: int, slots: Slots) -> None:
        """Write one request's slots into a page, the occupied ones first, and empty the rest of it."""
        codes, coded = self.codes(torch.tensor([page])), slots.readable if isinstance(slots, TieredSlots) else None
        blocks = self.shape.num_blocks
        if codes is not None:
            codes = codes.replaced(coded)
            blocks = int(self.shape.blocks_beside(codes.num_bytes))
        order = slots.occupied.byte().argsort(dim=-1, descending=True, stable=True)
        order = order[..., : int(slots.occupied.sum(-1).amax())]
        room = blocks * self.shape.together - order.shape[-1]
        assert room > 0, "the page has no room for the next token"
        # kernels multiply what is empty by zero, so it must be finite
        for target, array in zip((self.keys, self.values), slots.tokens(order), strict=True):
            target[page, :, :blocks] = pad(array[0], (0, 0, 0, room)).unflatten(1, (blocks, -1))
        numbers = [slots.positions, *(slots.side(name).view(torch.int32) for name in self.shape.side)]
        for place, array in enumerate(numbers):
            filled = pad(array.gather(2, order)[0], (0, room), value=0 if place else EMPTY)
            self.numbers[page, :, :blocks, place] = filled.unflatten(1, (blocks, -1))
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
        length: slots of a page that are in use: the tokens kept, and one more; None for those of the fullest head.
    """

    def __init__(self, pages: Pages, rows: Int[Tensor, " R"], length: int | None = None):
        self.pages, self.rows, self.codes = pages, rows, pages.codes(rows)
        self._numbers = self._readable().transpose(2, 3).flatten(3)
        self._streams = pages.streams[rows]
        positions, side = _named(self._numbers, pages.shape)
        self._arrays = {"positions": positions, **side}
        self.streams = _named_streams(self._streams, pages.shape)
        self.length = positions.shape[-1]
        self.length = min(self.length, int(self.occupied.sum(-1).amax()) + 1) if length is None else length
        self.holes = self.occupied.byte().argmin(-1)

    @cached_property
    def keys(self) -> Float[Tensor, "R H N D"]:
        return self._copied(self.pages.keys)

    @cached_property
    def values(self) -> Float[Tensor, "R H N D"]:
        return self._copied(self.pages.values)

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.shape.dtype

    def lying(self, index: Int[Tensor, "R H M"]) -> tuple[Tensor, Tensor, Int[Tensor, "R H M"]]:
        return *self.tokens(index), torch.arange(index.shape[-1]).expand_as(index)

    def store(self) -> None:
        """Write what is small back into the pages."""
        numbers = self._numbers.unflatten(-1, (-1, self.pages.shape.together)).transpose(2, 3)
        if self.codes is None:
            self.pages.numbers[self.rows] = numbers
        else:
            row, block = self._are_slots.nonzero(as_tuple=True)
            self.pages.numbers[self.rows[row], :, block] = numbers[row, :, block]
        if self.pages.shape.streams:
            self.pages.streams[self.rows] = self._streams

    def _copied(self, array: Float[Tensor, "P H C S D"]) -> Float[Tensor, "R H N D"]:
        copied = array[self.rows].flatten(2, 3)[:, :, : self.length]
        # codes, read as numbers, may be none
        return copied if self.codes is None else copied.masked_fill_(~self.occupied[..., None], 0)

    @cached_property
    def _are_slots(self) -> Bool[Tensor, "R C"]:
        """Which blocks are slots, not codes."""
        assert self.codes is not None
        shape = self.pages.shape
        return torch.arange(shape.num_blocks) < shape.blocks_beside(self.codes.num_bytes)[:, None]

    def _readable(self) -> Int[Tensor, "R H C K S"]:
        """The numbers of slots; where there are codes in their place, empty ones."""
        stored = self.pages.numbers[self.rows]
        if self.codes is None:
            return stored
        nothing = torch.zeros_like(stored[:1, :1, :1])
        nothing[..., :1, :] = EMPTY
        return torch.where(self._are_slots[:, None, :, None, None], stored, nothing)

    def _places(self, index: Int[Tensor, "R H M"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads = torch.arange(index.shape[1], device=index.device)
        together = self.pages.shape.together
        block = torch.div(index, together, rounding_mode="floor")
        return self.rows[:, None, None], heads[:, None], block, index - block * together

    def _gather(self, name: str, index: Int[Tensor, "R H M"]) -> Tensor:
        if name in self._arrays:
            return super()._gather(name, index)
        return getattr(self.pages, name)[self._places(index)]

    def _write(self, index: Int[Tensor, "R H M"], arrays: Mapping[str, Tensor]) -> None:
        for name, new in arrays.items():
            getattr(self.pages, name)[self._places(index)] = new


def _cells(memory: Tensor, shape: PageShape) -> UInt8[Tensor, "P H C"]:
    """The bytes of each cell, one after the other, whatever type they were handed out as."""
    P, H = memory.shape[:2]
    size = memory.element_size()
    # of a single page or head the stride may be anything
    expected = (shape.page_bytes, shape.cell_bytes)
    found = [stride * size for stride in memory.stride()[:2]]
    if any(number > 1 and one != other for number, one, other in zip((P, H), found, expected, strict=True)):
        raise ValueError(f"kvkeep: pages should lie {expected} bytes apart, and lie {found}")
    raw = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())
    return raw.as_strided((P, H, shape.cell_bytes), (*expected, 1), memory.storage_offset() * size)


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
