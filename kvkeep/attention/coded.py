"""Attention that reads codes where they lie: a block of windows is dequantized at a time, never all of them.

B sequences, H KV heads, G query heads per KV head, N slots, W windows of w tokens, T queries, X = G * T, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..slots import EMPTY, Slots
from ..windows import Codec
from . import kernel
from .parts import Part, attend_part, hide, merged, part_of
from .streamed import query_weights, visible

# fp32 numbers of a block's keys in all sequences and heads: they stay within a processor's cache
_BLOCK = 2**17
# logits of a block, where there are many queries
_BLOCK_LOGITS = 2**22
# logits of a tile of queries over the slots
_TILE_LOGITS = 2**20


class CodedTokens(NamedTuple):
    """Tokens of windows in full precision, and which of them are read from codes; positions are -1 where none is."""

    positions: Int[Tensor, "B H Ww"]
    keys: Float[Tensor, "B H Ww D"]
    values: Float[Tensor, "B H Ww Dv"]
    read: Bool[Tensor, "B H Ww"]


class CodedPart(NamedTuple):
    """Attention over windows of codes; logits of every token where there are few queries."""

    part: Part
    logits: Float[Tensor, "B H X Ww"] | None


def read_coded(queries: Float[Tensor, "B H X D"], coded: Slots, codec: Codec, scale: float) -> CodedPart:
    """Attention over windows of codes, all of whose tokens come before the queries."""
    if kernel.serves(queries):
        return coded_part(kernel.run(queries, coded, codec, scale))
    # an autocast around the model must not round parts that are merged
    with torch.autocast(queries.device.type, enabled=False):
        return read_blocks(queries, coded, codec, scale)


def coded_part(found: kernel.Found) -> CodedPart:
    """What the compiled functions found."""
    return CodedPart(Part(found.output, found.logsum), found.logits)


def read_blocks(queries: Float[Tensor, "B H X D"], coded: Slots, codec: Codec, scale: float) -> CodedPart:
    """`read_coded` in torch, block after block."""
    whole, kept = None, []
    for part, logits in _blocks(queries, coded, codec, scale):
        values = codec.values(coded, part).flatten(2, 3).to(logits.dtype)
        one = part_of(logits, values)
        whole = one if whole is None else merged(whole, one)
        if queries.shape[2] <= kernel.MOST_QUERIES:
            kept.append(logits)
    assert whole is not None, "there must be windows to read"
    return CodedPart(whole, torch.cat(kept, -1) if kept else None)


class WindowAttention(ABC):
    """Attention of the newest queries over windows of codes, and the mass that each window receives."""

    def __init__(
        self, queries: Float[Tensor, "B HG T D"], query_positions: Int[Tensor, "B T"], num_heads: int, window: int
    ):
        self._packed = queries.unflatten(1, (num_heads, -1)).flatten(2, 3)
        self._query_positions, self._window = query_positions, window
        self._shape = queries.shape
        self._part, self._logits = self._read()
        self._logsum = self._part.logsum
        self._known: dict[tuple[int | None, float, float], Tensor] = {}

    @abstractmethod
    def _read(self) -> CodedPart:
        """Attention of the packed queries."""

    @property
    def logsum(self) -> Float[Tensor, "B HG T"]:
        """Log of what each query's softmax adds up to over the windows."""
        return self._part.logsum.view(self._shape[:3])

    def with_part(self, near: Part) -> Float[Tensor, "B HG T Dv"]:
        """Attention over windows and over what `near` has read, in one softmax."""
        whole = merged(near, self._part)
        self._logsum = whole.logsum
        return whole.output.reshape(*self._shape[:3], -1)

    def received(self, last: int | None = None, *, power: float = 1.0, decay: float = 1.0) -> Float[Tensor, "B H W"]:
        """What `AttentionMass.received` says of slots, of the windows: the mean over their tokens."""
        asked = (last, power, decay)
        if asked not in self._known:
            with torch.autocast(self._packed.device.type, enabled=False):
                self._known[asked] = self._sum(query_weights(self._query_positions, last, decay=decay), power)
        return self._known[asked]

    def _sum(self, counts: Float[Tensor, "B T"], power: float) -> Float[Tensor, "B H W"]:
        group = self._packed.shape[2] // counts.shape[1]
        share = (counts / group).repeat(1, group)[:, None, None]
        total = []
        for logits in self._again() if self._logits is None else [self._logits]:
            weights = (logits - self._logsum).exp()
            mass = (share.to(weights.dtype) @ (weights if power == 1 else weights.pow(power)))[:, :, 0]
            total.append(mass.unflatten(-1, (-1, self._window)).mean(-1))
        return torch.cat(total, -1).float()

    @abstractmethod
    def _again(self) -> Iterator[Tensor]:
        """Logits of many queries, which are too many to be kept, block after block."""


class CodedAttention(WindowAttention):
    """Attention over windows in arrays of their own."""

    def __init__(
        self,
        queries: Float[Tensor, "B HG T D"],
        query_positions: Int[Tensor, "B T"],
        coded: Slots,
        codec: Codec,
        scale: float,
    ):
        self._coded, self._codec, self._scale = coded, codec, scale
        super().__init__(queries, query_positions, coded.positions.shape[1], codec.window)

    def with_slots(
        self,
        queries: Float[Tensor, "B HG T D"],
        keys: Float[Tensor, "B H N D"],
        values: Float[Tensor, "B H N Dv"],
        positions: Int[Tensor, "B H N"],
        logits: Float[Tensor, "B H G N"] | None = None,
    ) -> Float[Tensor, "B HG T Dv"]:
        """Attention over slots and windows together, in one softmax; `logits` are those over the slots, if known."""
        if logits is None:
            near = _attend_slots(queries, keys, values, positions, self._query_positions, self._scale)
        else:
            with torch.autocast(queries.device.type, enabled=False):
                near = part_of(logits, values.float())
        return self.with_part(near).to(queries.dtype)

    def tokens(self) -> CodedTokens:
        """All tokens dequantized: a whole copy, for checks alone."""
        codec, coded = self._codec, self._coded
        read = ~coded.side("dormant")[..., None].expand(*coded.positions.shape, codec.window)
        parts = (codec.positions(coded), codec.keys(coded), codec.values(coded), read)
        return CodedTokens(*(part.flatten(2, 3) for part in parts))

    def _read(self) -> CodedPart:
        return read_coded(self._packed, self._coded, self._codec, self._scale)

    def _again(self) -> Iterator[Tensor]:
        return (logits for _, logits in _blocks(self._packed, self._coded, self._codec, self._scale))


def _blocks(queries: Tensor, coded: Slots, codec: Codec, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Logits `[B, H, X, tokens]` of block after block of windows; those that are none, or dormant, are hidden."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    asking = queries.to(dtype) * scale
    hidden = (coded.positions == EMPTY) | coded.side("dormant")
    rows = coded.positions.shape[0] * coded.positions.shape[1] * codec.window
    block = max(1, min(_BLOCK // (rows * codec.key_size), _BLOCK_LOGITS // (codec.window * queries.shape[2])))
    for start in range(0, coded.length, block):
        part = slice(start, start + block)
        keys = codec.keys(coded, part).flatten(2, 3).to(dtype)
        unseen = hidden[:, :, part].repeat_interleave(codec.window, -1)
        yield part, hide(asking @ keys.mT, unseen[:, :, None])


def _attend_slots(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, query_positions: Tensor, scale: float
) -> Part:
    """Causal attention over slots in tiles of queries, to be merged with others."""
    B, HG, T, D = queries.shape
    H, N = keys.shape[1:3]
    keys, values = keys.float(), values.float()
    tile = max(1, _TILE_LOGITS // (HG // H * N))
    parts = []
    grouped = queries.view(B, H, HG // H, T, D).split(tile, dim=3)
    for rows, at in zip(grouped, query_positions.split(tile, dim=1), strict=True):
        hidden = ~visible(positions, at)[:, :, None].expand(-1, -1, HG // H, -1, -1).flatten(2, 3)
        part = attend_part(rows.flatten(2, 3), keys, values, hidden, scale)
        parts.append([tensor.unflatten(2, (HG // H, -1)) for tensor in part])
    output, logsum = (torch.cat(tiles, 3).flatten(2, 3) for tiles in zip(*parts, strict=True))
    return Part(output, logsum)
