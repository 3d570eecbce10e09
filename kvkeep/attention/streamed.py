"""Attention in tiles of queries: no map over all queries and slots exists at any time.

B sequences, H KV heads, G query heads per KV head, N slots, T queries, D head size.

The query heads of a group are packed as rows against the slots of their KV head, so keys and values are never
repeated.
"""

from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..slots import EMPTY

# rows of a tile times slots: 2^22 fp32 logits a head are 16 MiB
_TILE_LOGITS = 2**22
# sums over logits pass over a tile several times: an eighth of it stays within a processor's cache
_SUM_TILES = 8
_NEVER = torch.iinfo(torch.int32).max


def attend(
    queries: Float[Tensor, "B HG T D"],
    keys: Float[Tensor, "B H N D"],
    values: Float[Tensor, "B H N Dv"],
    positions: Int[Tensor, "B H N"],
    query_positions: Int[Tensor, "B T"],
    scale: float,
    *,
    has_empty: bool,
    whole: bool = False,
) -> Float[Tensor, "B HG T Dv"]:
    """Causal attention of the newest T tokens over slots with positions of their own per head.

    Args:
        queries: `[B, H * G, T, D]`, query heads of a group side by side.
        positions: true position of each slot, -1 where it is empty.
        query_positions: true position of each query, -1 for padding (whose output is finite and meaningless).
        has_empty: whether any slot may be empty or any query padding; False takes the kernels without a mask.
        whole: nothing was evicted yet, so the result must be the stock cache's to the last bit.
    """
    B, HG, T, D = queries.shape
    H, N = keys.shape[1:3]
    # the stock cache's own call: in bf16 another order of sums would end in other tokens
    if not has_empty and (T == N or (whole and T == 1)):
        return scaled_dot_product_attention(queries, keys, values, scale=scale, is_causal=T > 1, enable_gqa=HG != H)
    if T == 1:
        mask = (positions >= 0)[:, :, None, :] if has_empty else None
        packed = queries.view(B, H, HG // H, D)
        return scaled_dot_product_attention(packed, keys, values, mask, scale=scale).view(B, HG, 1, -1)
    grouped = queries.view(B, H, HG // H, T, D)
    tile = _tile(HG // H, N)
    outputs = [
        _attend_tile(rows, keys, values, visible(positions, at), scale)
        for rows, at in zip(grouped.split(tile, dim=3), query_positions.split(tile, dim=1), strict=True)
    ]
    return torch.cat(outputs, dim=3).view(B, HG, T, -1)


class AttentionMass:
    """Attention that slots receive from the newest queries, computed when a policy asks and then remembered."""

    def __init__(
        self,
        queries: Float[Tensor, "B HG T D"],
        keys: Float[Tensor, "B H N D"],
        positions: Int[Tensor, "B H N"],
        query_positions: Int[Tensor, "B T"],
        scale: float,
        *,
        has_empty: bool,
        beyond: Float[Tensor, "B HG T"] | None = None,
    ):
        self._queries, self._keys = queries, keys
        self._positions, self._query_positions = positions, query_positions
        self._scale, self._has_empty = scale, has_empty
        # log of what each query's softmax adds up to over tokens that are in no slot
        self._beyond = beyond
        self._known: dict[tuple[int | None, float, float], Tensor] = {}

    def received(self, last: int | None = None, *, power: float = 1.0, decay: float = 1.0) -> Float[Tensor, "B H N"]:
        """Softmax mass from the last `last` tokens (all new ones if None): mean over the group, sum over queries.

        Args:
            power: each query's attention is raised to it before it is summed.
            decay: each query counts so many times as much as the one after it.
        """
        if last is not None and last >= self._queries.shape[2]:
            last = None
        asked = (last, power, decay)
        if asked not in self._known:
            self._known[asked] = self._sum(*self._newest(last), power, decay)
        return self._known[asked]

    @cached_property
    def logits(self) -> Float[Tensor, "B H G N"] | None:
        """Scaled products of the only new token with what every slot holds, in fp32; None where it is not so simple."""
        if self._queries.shape[2] != 1 or self._has_empty:
            return None
        grouped = self._queries.unflatten(1, (self._keys.shape[1], -1))[:, :, :, 0]
        # scores stay fp32, whatever is around the model: bf16 ties make eviction depend on slot order
        with torch.autocast(grouped.device.type, enabled=False):
            return (grouped.float() * self._scale) @ self._keys.float().mT

    def _newest(self, last: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The last `last` queries that are not padding, per sequence, with what is beyond the slots for them."""
        if last is None:
            return self._queries, self._query_positions, self._beyond
        beyond = self._beyond
        if not self._has_empty:
            newest = None if beyond is None else beyond[:, :, -last:]
            return self._queries[:, :, -last:], self._query_positions[:, -last:], newest
        # padding carries position -1 and sorts before every token
        at, order = self._query_positions.sort(dim=1, stable=True)
        order = order[:, None, -last:].expand(-1, self._queries.shape[1], -1)
        queries = self._queries.gather(2, order[..., None].expand(*order.shape, self._queries.shape[3]))
        return queries, at[:, -last:], None if beyond is None else beyond.gather(2, order)

    def _sum(
        self, queries: Tensor, query_positions: Tensor, beyond: Tensor | None, power: float, decay: float
    ) -> Tensor:
        if self.logits is not None:
            more = None if beyond is None else beyond.view(*self.logits.shape[:3], 1)
            return _weights(self.logits, more, power).mean(2)
        B, HG, T, D = queries.shape
        H, N = self._keys.shape[1:3]
        G = HG // H
        keys = self._keys.float().transpose(-1, -2)
        total = keys.new_zeros(B, H, N)
        earliest, latest = self._positions.amin((0, 1)), self._positions.amax((0, 1))
        latest = latest.masked_fill(earliest == EMPTY, _NEVER)
        counts = query_weights(query_positions, decay=decay)
        tile = _tile(_SUM_TILES * G, N)
        grouped = queries.reshape(B, H, G, T, D)
        further = [None] * -(-T // tile) if beyond is None else beyond.view(B, H, G, T, 1).split(tile, dim=3)
        parts = (grouped.split(tile, dim=3), query_positions.split(tile, dim=1), counts.split(tile, dim=1), further)
        for rows, at, count, more in zip(*parts, strict=True):
            reach = _reach(earliest, at)
            # packed: broadcasting the keys over the group would copy them for every tile
            packed = (rows.float() * self._scale).reshape(B, H, -1, D)
            logits = (packed @ keys[..., :reach]).view(B, H, G, -1, reach)
            seen = min(reach, seen_by_all(latest, at))
            logits[..., seen:].masked_fill_(~visible(self._positions[..., seen:reach], at)[:, :, None], -torch.inf)
            share = (count / G)[:, None, None].expand(B, 1, G, -1)
            weights = _weights(logits, more, power).view(B, H, -1, reach)
            total[..., :reach] += (share.reshape(B, 1, 1, -1) @ weights)[:, :, 0]
        return total


def query_weights(
    query_positions: Int[Tensor, "B T"], last: int | None = None, *, decay: float = 1.0
) -> Float[Tensor, "B T"]:
    """How much each query counts in a sum over the last `last` tokens: padding gives nothing."""
    behind = query_positions.amax(1, keepdim=True) - query_positions
    counted = (query_positions >= 0) if last is None else (query_positions >= 0) & (behind < last)
    return counted * torch.full_like(behind, decay, dtype=torch.float32).pow(behind)


def _weights(logits: Tensor, beyond: Tensor | None, power: float) -> Tensor:
    """Softmax over the logits and what is beyond them, raised to `power`."""
    if beyond is None:
        weights = logits.softmax(-1)
    else:
        weights = (logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), beyond)).exp()
    return weights if power == 1 else weights.pow(power)


def visible(positions: Int[Tensor, "B H N"], query_positions: Int[Tensor, "B t"]) -> Bool[Tensor, "B H t N"]:
    at = query_positions[:, None, :, None]
    slots = positions[:, :, None, :]
    # a padding query sees everything: its row must be finite and is read by nobody
    return ((slots >= 0) & (slots <= at)) | (at < 0)


def seen_by_all(latest: Int[Tensor, " N"], query_positions: Int[Tensor, "B t"]) -> int:
    """Slots before the first that some query may not see, given each slot's latest position in any head."""
    # padding sees everything
    first = query_positions.masked_fill(query_positions == EMPTY, _NEVER).amin()
    hidden = latest > first
    return int(hidden.int().argmax()) if bool(hidden.any()) else len(hidden)


def _reach(earliest: Int[Tensor, " N"], query_positions: Int[Tensor, "B t"]) -> int:
    """Slots up to the last that any of the queries may see, given each slot's earliest position in any head."""
    hidden = (earliest > query_positions.amax()).flip(0)
    # argmin finds the first that is not hidden, or slot 0 where all are
    return len(hidden) - int(hidden.int().argmin())


def _attend_tile(rows: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    B, H, G, t, D = rows.shape
    N = keys.shape[2]

    def shared(slots: Tensor) -> Tensor:
        # the G query heads read the slots of their KV head through a stride of zero
        return slots.reshape(B * H, 1, N, slots.shape[-1]).expand(-1, G, -1, -1)

    mask = visible.reshape(B * H, 1, t, N)
    out = scaled_dot_product_attention(rows.reshape(B * H, G, t, D), shared(keys), shared(values), mask, scale=scale)
    return out.view(B, H, G, t, -1)


def _tile(group: int, num_slots: int) -> int:
    return max(1, _TILE_LOGITS // (group * max(1, num_slots)))
