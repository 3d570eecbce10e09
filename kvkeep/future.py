"""Future importance: the attention that every key gets from later queries, in tiles of queries and keys.

B sequences, H KV heads, G query heads per KV head, T queries, S keys, D head size, t queries and s keys of a tile.

No map over all queries and keys exists at any time: beyond tiles of fixed size, memory grows with S alone. It is what
learned policies are trained on and what the oracle knows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# fp32 logits of all heads in a tile (4 MiB, within a processor's cache), and keys of a tile
_TILE_LOGITS = 2**20
_TILE_KEYS = 2**14


class Importance(NamedTuple):
    """Attention of later queries summed for each key.

    Attributes:
        max: of a group's query heads the largest for each query.
        heads: of each query head of the group.
        square: the largest squared: a token that one query reads alone outweighs one that many read a little of, as
            it does in what outputs lose with it (`policies.deletion`).
    """

    max: Float[Tensor, "B H S"]
    heads: Float[Tensor, "B H G S"]
    square: Float[Tensor, "B H S"]

    @property
    def mean(self) -> Float[Tensor, "B H S"]:
        """Of a group's query heads the mean for each query."""
        return self.heads.mean(2)


class _Window(NamedTuple):
    """A query at j counts for a token at i if delay <= j - i < horizon."""

    delay: int
    horizon: int


class _Tile(NamedTuple):
    """Some queries: scaled rows `[B, H, G * t, D]` in fp32, positions `[B, t]`, and the least and greatest of them."""

    rows: Tensor
    at: Tensor
    first: int
    last: int
    padded: bool


def future_importance(
    queries: Float[Tensor, "B HG T D"],
    keys: Float[Tensor, "B H S D"],
    query_positions: Int[Tensor, "B T"] | int,
    scale: float,
    *,
    delay: int = 0,
    horizon: int | None = None,
) -> Importance:
    """Sum over queries of the causal softmax that each key gets, in fp32.

    The key at place i has position i. A query sees all keys up to its own position, whichever of them count.

    Args:
        queries: after rotation, query heads of a group side by side; those of the future alone, or all.
        query_positions: true positions, -1 for padding; or the position of the first of T in a row.
        scale: what the model multiplies query-key products by.
        delay: a query at j counts for the token at i only if j - i >= delay.
        horizon: and only if j - i < horizon.

    Raises:
        ValueError: for a negative delay, a horizon that leaves nothing, or queries beyond the last key.
    """
    at = _positions(queries, query_positions)
    window = _checked(at, keys.shape[2], delay, horizon)
    B, HG = queries.shape[:2]
    H, S = keys.shape[1:3]
    total = Importance(*(keys.new_zeros(B, H, *each, S, dtype=torch.float32) for each in ((), (HG // H,), ())))
    for tile in _tiles(queries, at, scale, keys):
        _add(total, tile, keys, window)
    return total


def log_importance(
    queries: Float[Tensor, "B HG T D"],
    keys: Float[Tensor, "B H S D"],
    query_positions: Int[Tensor, "B T"] | int,
    scale: float,
    normaliser: Float[Tensor, "B HG T"],
    *,
    delay: int = 0,
) -> Float[Tensor, "B H G S"]:
    """Log of the sum over queries of exp(logit - normaliser), for each key and query head; -inf where none counts.

    With the log-sum-exp of a query's own causal logits as its normaliser this is the log of
    `future_importance(...).heads`. A query that was allowed fewer keys has a smaller one, and terms of keys it did not
    see may be of any size: sums are carried as logarithms.

    Args:
        queries, keys, query_positions, scale, delay: as for `future_importance`.
        normaliser: log-sum-exp of each query over what it saw.

    Raises:
        ValueError: as `future_importance`.
    """
    at = _positions(queries, query_positions)
    window = _checked(at, keys.shape[2], delay, None)
    B, HG = queries.shape[:2]
    H, S = keys.shape[1:3]
    total = keys.new_full((B, H, HG // H, S), -torch.inf, dtype=torch.float32)
    size = _tile_size(queries, keys)
    pieces = normaliser.float().unflatten(1, (H, -1)).split(size, dim=3)
    for tile, less in zip(_tiles(queries, at, scale, keys, padding=True), pieces, strict=True):
        for start in range(0, tile.last + 1 - delay, _TILE_KEYS):
            logits = _grouped(_logits(tile, keys, start, tile.last + 1), tile) - less[..., None]
            stop = start + logits.shape[-1]
            uncounted = (_between(tile, start, stop) < window.delay) | (tile.at < 0)[:, None, None, :, None]
            part = logits.masked_fill_(uncounted, -torch.inf).logsumexp(3)
            total[..., start:stop] = torch.logaddexp(total[..., start:stop], part)
    return total


def _tile_size(queries: Tensor, keys: Tensor) -> int:
    B, HG = queries.shape[:2]
    return max(1, _TILE_LOGITS // (B * HG * min(max(1, keys.shape[2]), _TILE_KEYS)))


def _positions(queries: Tensor, query_positions: Tensor | int) -> Tensor:
    if isinstance(query_positions, Tensor):
        return query_positions
    B, _, T, _ = queries.shape
    return (query_positions + torch.arange(T, device=queries.device)).expand(B, T)


def _checked(at: Tensor, num_keys: int, delay: int, horizon: int | None) -> _Window:
    if delay < 0 or (horizon is not None and horizon <= delay):
        raise ValueError(f"delay must be at least 0 and horizon more than delay, got {delay} and {horizon}")
    if at.numel() and int(at.max()) >= num_keys:
        raise ValueError(f"a query at position {int(at.max())} needs the keys up to it, but there are {num_keys} keys")
    # no two tokens are further apart than all keys
    return _Window(delay, num_keys if horizon is None else horizon)


def _tiles(queries: Tensor, at: Tensor, scale: float, keys: Tensor, *, padding: bool = False) -> Iterator[_Tile]:
    """Tiles of queries; those that are padding alone, which see no key, only if asked for."""
    B, H, _, D = keys.shape
    size = _tile_size(queries, keys)
    grouped = queries.unflatten(1, (H, -1))
    for rows, places in zip(grouped.split(size, dim=3), at.split(size, dim=1), strict=True):
        held = places[places >= 0]
        if held.numel() or padding:
            packed = (rows.float() * scale).reshape(B, H, -1, D)
            first, last = (int(held.min()), int(held.max())) if held.numel() else (-1, -1)
            yield _Tile(packed, places, first, last, held.numel() < places.numel())


def _add(total: Importance, tile: _Tile, keys: Tensor, window: _Window) -> None:
    """Add what the queries of a tile give."""
    reach = tile.last + 1
    if reach <= _TILE_KEYS:
        weights = _logits(tile, keys, 0, reach).softmax(-1)
        _count(total, tile, weights, 0, window)
        return
    starts = range(0, reach, _TILE_KEYS)
    # once for the normaliser, once more for the weights: what lies between is too large to keep
    normaliser = torch.stack([_logits(tile, keys, a, reach).logsumexp(-1) for a in starts]).logsumexp(0)
    for start in starts:
        if start <= tile.last - window.delay and min(start + _TILE_KEYS, reach) > tile.first - window.horizon + 1:
            weights = _logits(tile, keys, start, reach).sub_(normaliser[..., None]).exp_()
            _count(total, tile, weights, start, window)


def _logits(tile: _Tile, keys: Tensor, start: int, reach: int) -> Float[Tensor, "B H R s"]:
    """Logits over the keys of one tile from `start` on, -inf where a key lies behind the query."""
    stop = min(start + _TILE_KEYS, reach)
    logits = tile.rows @ keys[:, :, start:stop].float().transpose(-1, -2)
    # only columns behind the first query's position hold anything hidden
    edge = max(start, tile.first + 1)
    if edge < stop:
        hidden = _between(tile, edge, stop) < 0
        _grouped(logits, tile)[..., edge - start :].masked_fill_(hidden, -torch.inf)
    return logits


def _count(total: Importance, tile: _Tile, weights: Tensor, start: int, window: _Window) -> None:
    """Add the weights of a tile to the keys from `start` on."""
    stop = start + weights.shape[-1]
    grouped = _grouped(weights, tile)
    if tile.padded:
        # a row of padding may be NaN until here: it saw nothing
        grouped.masked_fill_((tile.at < 0)[:, None, None, :, None], 0)
    late, early = max(start, tile.first - window.delay + 1), min(stop, tile.last - window.horizon + 1)
    if window.delay and late < stop:
        grouped[..., late - start :].masked_fill_(_between(tile, late, stop) < window.delay, 0)
    if early > start:
        grouped[..., : early - start].masked_fill_(_between(tile, start, early) >= window.horizon, 0)
    largest = grouped.amax(2)
    total.max[..., start:stop] += largest.sum(2)
    total.square[..., start:stop] += largest.square_().sum(2)
    total.heads[..., start:stop] += grouped.sum(3)


def _between(tile: _Tile, start: int, stop: int) -> Int[Tensor, "B 1 1 t s"]:
    """How far each query lies behind each of the keys from `start` to `stop`."""
    return tile.at[:, None, None, :, None] - torch.arange(start, stop, device=tile.at.device)


def _grouped(weights: Float[Tensor, "B H R s"], tile: _Tile) -> Float[Tensor, "B H G t s"]:
    """The same tile with the query heads of a group on an axis of their own; a view."""
    B, H, _, s = weights.shape
    return weights.view(B, H, -1, tile.at.shape[1], s)
