"""What the attention output loses with a few neighbouring tokens, in closed form.

B sequences, H KV heads, G query heads per KV head, N slots, T queries, D head size, E hidden size, C chunks of c
neighbours each. All first neighbours lie side by side, then all second ones, so that sums over queries and over a chunk
are sums of rows.

A query gives the weights a to the tokens it sees and reads o. Without the tokens j of a chunk the weights of the others
grow, and it reads o + d:

    d = sum_j a_j (o - v_j) / (1 - sum_j a_j)

That costs |W d|^2, W being the query head's part of the output projection. Summed over queries it is a quadratic form
in the values: arrays of queries x tokens and of tokens x head size are all it takes.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention.streamed import seen_by_all
from ..slots import EMPTY, Slots

# numbers in an array over queries and slots, which should stay in a processor's cache, and in one over slots and head
# size: 4 and 16 MiB in fp32
_QUERY_TILE = 2**20
_SLOT_TILE = 2**22
# queries at least, so that few products are small
_LEAST_QUERIES = 8


class Projection:
    """The output projection of one layer, as far as it changes the length of what a query head reads.

    Args:
        weight: `[E, H * G * Dv]`, as a linear layer holds it.
        num_heads: H.
        group: G.
    """

    def __init__(self, weight: Float[Tensor, "E HGDv"], num_heads: int, group: int):
        self._weight, self._num_heads, self._group = weight, num_heads, group
        self._known: dict[tuple[bool, torch.dtype], Tensor] = {}

    def gram(self, *, joint: bool, dtype: torch.dtype) -> Float[Tensor, "H S G Dv Dv"]:
        """W_g^T W_g of every query head g (S = 1), or if `joint` W_g^T W_{g+s} for every shift s within the group."""
        if (joint, dtype) not in self._known:
            parts = self._weight.detach().to(dtype).unflatten(1, (self._num_heads, self._group, -1))
            parts = parts.permute(1, 2, 3, 0)
            shifts = range(self._group if joint else 1)
            self._known[joint, dtype] = torch.stack([parts @ parts.roll(-s, 1).mT for s in shifts], 1)
        return self._known[joint, dtype]


class Asked(NamedTuple):
    """Queries `[B, H * G, T, D]` after rotation, the position up to which each sees, and how much each counts.

    Padding has position -1 and weight 0.
    """

    queries: Float[Tensor, "B HG T D"]
    positions: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]


def deletion_cost(
    slots: Slots,
    asked: Asked,
    scale: float,
    *,
    chunk: int,
    gram: Float[Tensor, "H S G Dv Dv"] | None,
    guard: float,
    reserve: Bool[Tensor, "B H N"],
    epsilon: float,
) -> Float[Tensor, "B H N"]:
    """For each slot, what it costs when its chunk goes, summed over queries and heads and divided by the chunk's size.

    Tokens are of one chunk where position // chunk agrees. Leave-one-out finds nothing lost with one of two tokens that
    say the same, and so with both. Hence a chunk is worth at least `guard` times what the tokens in `reserve` would
    miss: its attention squared, times the squared distance of what it says from what they say.

    Args:
        gram: see `Projection`; None measures before the projection.
        reserve: tokens that stay in any case.
        epsilon: added to 1 - sum a_j.

    Returns:
        In fp32, or in fp64 for inputs in fp64.
    """
    joint = gram is not None and gram.shape[1] > 1
    cells = _Cells(slots, chunk, torch.float64 if joint else torch.float32)
    inner = _inner(cells.values, gram)
    cost = mass = square = cells.values.new_zeros(())
    for part in _tiles(asked, cells):
        reading = _read(cells, part, scale)
        # one row of weights a query head, which sums over queries
        weights = part.weights.to(cells.values.dtype)[:, None, None, None]
        cost = cost + _leave_out(cells, reading, weights, inner, gram, epsilon)
        mass = mass + (weights @ reading.attention.flatten(4)).unflatten(-1, (chunk, -1))[..., 0, :, :]
        square = square + (weights @ reading.of_chunks.square())[..., 0, :]
    if guard:
        least = _unlike_reserve(cells, mass, cells.of(reserve), inner, gram)
        cost = torch.maximum(cost, guard * (square * least).sum(2))
    return cells.spread(cost / cells.sizes)


def attention_mass(slots: Slots, asked: Asked, scale: float, *, chunk: int) -> Float[Tensor, "B H N"]:
    """For each slot, the attention its chunk receives from all queries and heads, divided by the chunk's size."""
    cells = _Cells(slots, chunk, torch.float32)
    total = cells.values.new_zeros(())
    for part in _tiles(asked, cells):
        weights = part.weights.to(cells.values.dtype)[:, None, None, None]
        total = total + (weights @ _read(cells, part, scale).of_chunks).sum((2, 3))
    return cells.spread(total / cells.sizes)


def own_loss(
    slots: Slots,
    queries: Float[Tensor, "B HG 1 D"],
    position: Int[Tensor, "B H 1"],
    value: Float[Tensor, "B H 1 Dv"],
    scale: float,
    epsilon: float,
) -> tuple[Float[Tensor, "B H G 1"], Float[Tensor, "B H G 1 Dv"]]:
    """The attention a query gives to the newest token, and what its output loses with that token."""
    (B, HG, _, D), H = queries.shape, slots.keys.shape[1]
    dtype = torch.promote_types(slots.keys.dtype, torch.float32)
    logits = (queries.to(dtype) * scale).reshape(B, H, HG // H, D) @ slots.keys.to(dtype).mT
    attention = logits.masked_fill(~slots.occupied[:, :, None], -torch.inf).softmax(-1)
    share = (attention * (slots.positions == position)[:, :, None]).sum(-1, keepdim=True)
    apart = attention @ slots.values.to(dtype) - value.to(dtype)
    return share, (apart * share / (1 - share + epsilon))[..., None, :]


def squared(
    vectors: Float[Tensor, "B H G X Dv"], gram: Float[Tensor, "H S G Dv Dv"] | None
) -> Float[Tensor, "B H G X"]:
    """|W x|^2 of the vectors x of each query head."""
    return (vectors * (vectors if gram is None else vectors.to(gram.dtype) @ gram[:, 0])).sum(-1)


class _Cells:
    """Slots in order of position, each chunk in c cells of its own; cells without a token lie in between.

    `keys` `[B, H, c * C, D]`, `values` `[B, H, c, C, Dv]`, `positions` `[B, H, c * C]` (-1: no token), `sizes`
    `[B, H, C]`.
    """

    def __init__(self, slots: Slots, chunk: int, dtype: torch.dtype):
        positions = slots.positions.long()
        at, order = positions.sort(dim=-1, stable=True)
        part = torch.div(at, chunk, rounding_mode="floor")
        first = (at != EMPTY) & (part != part.roll(1, -1).index_fill(-1, part.new_zeros(1), EMPTY))
        rank = first.long().cumsum(-1) - 1
        num_chunks = int(rank.max()) + 1
        # empty slots share a cell behind all others, which is cut off
        place = torch.where(at != EMPTY, at % chunk * num_chunks + rank, num_chunks * chunk)
        cell = order.new_full((*at.shape[:2], num_chunks * chunk + 1), EMPTY).scatter_(-1, place, order)[..., :-1]
        self.chunk, self._slot = chunk, cell.clamp(min=0)
        self._home = torch.zeros_like(order).scatter_(-1, order, rank.clamp(min=0))
        self.positions = positions.gather(-1, self._slot).masked_fill(cell == EMPTY, EMPTY)
        self.sizes = (cell != EMPTY).unflatten(-1, (chunk, -1)).sum(-2).clamp(min=1)
        dtype = torch.promote_types(slots.keys.dtype, dtype)
        keys, values = slots.tokens(self._slot)
        self.keys, self.values = keys.to(dtype), values.to(dtype).unflatten(2, (chunk, -1))

    def of(self, marks: Bool[Tensor, "B H N"]) -> Bool[Tensor, "B H c C"]:
        """Marks of slots, at their cells."""
        return (marks.gather(-1, self._slot) & (self.positions != EMPTY)).unflatten(-1, (self.chunk, -1))

    def spread(self, worth: Float[Tensor, "B H C"]) -> Float[Tensor, "B H N"]:
        """Each chunk's worth, at its slots."""
        return worth.gather(-1, self._home)


def _tiles(asked: Asked, cells: _Cells) -> list[Asked]:
    rows = asked.queries.shape[1] * cells.positions.shape[-1]
    num_queries = asked.queries.shape[2]
    num_tiles = math.ceil(num_queries / max(_LEAST_QUERIES, _QUERY_TILE // rows))
    size = math.ceil(num_queries / num_tiles)
    return [
        Asked(*parts)
        for parts in zip(
            asked.queries.split(size, 2), asked.positions.split(size, 1), asked.weights.split(size, 1), strict=True
        )
    ]


class _Reading(NamedTuple):
    """What each query gives to each cell and to each chunk, and what it reads."""

    attention: Float[Tensor, "B H G T c C"]
    of_chunks: Float[Tensor, "B H G T C"]
    output: Float[Tensor, "B H G T Dv"]


def _read(cells: _Cells, asked: Asked, scale: float) -> _Reading:
    (B, HG, T, D), H = asked.queries.shape, cells.keys.shape[1]
    rows = (asked.queries.to(cells.keys.dtype) * scale).reshape(B, H, -1, D)
    logits = (rows @ cells.keys.mT).view(B, H, HG // H, T, -1)
    _hide(logits, cells, asked.positions)
    attention = logits.softmax(-1)
    output = (attention.view(B, H, HG // H * T, -1) @ cells.values.flatten(2, 3)).view(B, H, HG // H, T, -1)
    attention = attention.unflatten(-1, (cells.chunk, -1))
    return _Reading(attention, attention.sum(-2), output)


def _hide(logits: Float[Tensor, "B H G T cC"], cells: _Cells, at: Int[Tensor, "B T"]) -> None:
    """Let no query see an empty cell or what came after it, in place."""
    empty = cells.positions == EMPTY
    if bool(empty.any()):
        logits.masked_fill_(empty[:, :, None, None], -torch.inf)
    # padding sees everything, so that its rows, which count nothing, are finite
    reach = at.masked_fill(at == EMPTY, torch.iinfo(at.dtype).max)
    positions = cells.positions.unflatten(-1, (cells.chunk, -1))
    # most chunks come before every query
    start = seen_by_all(positions.amax((0, 1, 2)), at)
    tail = positions[:, :, None, None, :, start:] > reach[:, None, None, :, None, None]
    logits.unflatten(-1, (cells.chunk, -1))[..., start:].masked_fill_(tail, -torch.inf)


def _inner(values: Float[Tensor, "B H c C Dv"], gram: Tensor | None) -> Float[Tensor, "B H S G c c C"]:
    """Inner products of the projected values of each chunk, for every pair of query heads that `gram` has."""
    values = values.transpose(2, 3).contiguous()
    (B, H, _, chunk, size), pairs = values.shape, (1, 1) if gram is None else gram.shape[1:3]
    # all pairs side by side: one product a KV head, whose rows are the chunks' again
    beside = None if gram is None else gram.permute(0, 3, 1, 2, 4).flatten(2)
    parts = []
    for part in values.split(max(1, _SLOT_TILE // (B * H * math.prod(pairs) * chunk * size)), 2):
        turned = (
            part if beside is None else (part.flatten(2, 3) @ beside).view(B, H, -1, chunk * math.prod(pairs), size)
        )
        parts.append((turned @ part.mT).unflatten(3, (chunk, *pairs)))
    return torch.cat(parts, dim=2).permute(0, 1, 4, 5, 3, 6, 2).contiguous()


def _leave_out(
    cells: _Cells,
    reading: _Reading,
    weights: Float[Tensor, "B 1 1 1 T"],
    inner: Tensor,
    gram: Tensor | None,
    eps: float,
) -> Float[Tensor, "B H C"]:
    """sum over queries and heads of weight * |W d|^2 for each chunk."""
    mass, root = reading.of_chunks, weights.mT.sqrt()
    factor = root / (1 - mass + eps)
    if gram is not None and gram.shape[1] > 1:
        return _energy(cells, reading, factor, inner, gram)
    # where a query reads little else, the quadratic form is a small difference of large numbers: there d is worked out
    top = mass.argmax(-1, keepdim=True)
    rest = mass.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    # where nothing else is seen, nothing could be read in its place
    grown = torch.where(rest > 0, root / (rest + eps), 0.0)
    largest = squared(_lost(cells, reading, top) * grown, gram)
    others = _energy(cells, reading, factor.scatter(-1, top, 0.0), inner, gram)
    return others.scatter_add(-1, top.flatten(2), largest.flatten(2))


def _lost(cells: _Cells, reading: _Reading, chunk: Int[Tensor, "B H G T 1"]) -> Float[Tensor, "B H G T Dv"]:
    """sum_j a_j (v_j - o) over one chunk for each query."""
    rows, heads = (torch.arange(size, device=chunk.device) for size in chunk.shape[:2])
    values = cells.values[rows[:, None, None, None], heads[:, None, None], :, chunk[..., 0]]
    shares = reading.attention.gather(5, chunk[..., None].expand(*chunk.shape[:4], cells.chunk, 1))
    return ((values - reading.output[..., None, :]) * shares).sum(-2)


def _energy(
    cells: _Cells, reading: _Reading, factor: Float[Tensor, "B H G T C"], inner: Tensor, gram: Tensor | None
) -> Float[Tensor, "B H C"]:
    """sum over queries q of |sum over heads and j of W factor_q a_qj (v_j - o_q)|^2 for each chunk.

    Where `gram` has no shifts, heads are added up behind the square.
    """
    share, sums = reading.attention * factor[..., None, :], reading.of_chunks * factor
    total = share.new_zeros(())
    for shift in range(inner.shape[2]):
        # a roll by nothing is a copy all the same
        others, theirs, read = (x.roll(-shift, 2) if shift else x for x in (share, sums, reading.output))
        turned = read if gram is None else read @ gram[:, shift].mT
        toward = _products(turned, cells).mul_(share).sum(-2)
        lengths = (turned * reading.output).sum(-1, keepdim=True)
        apart = theirs * (sums * lengths - 2 * toward)
        total = total + _among(share, others, inner[:, :, shift]) + apart.sum((2, 3))
    return total


def _among(
    share: Float[Tensor, "B H G T c C"], others: Float[Tensor, "B H G T c C"], inner: Tensor
) -> Float[Tensor, "B H C"]:
    """sum over queries, heads and pairs of neighbours of share * others * inner for each chunk."""
    total = share.new_zeros(())
    for place in range(share.shape[4]):
        # among the same shares each pair of two neighbours is met once and counts twice
        first = place if others is share else 0
        pairs = (share[..., place, None, :] * others[..., first:, :]).sum(3)
        worth = (pairs * inner[:, :, :, place, first:]).sum(2)
        total = total + (2 * worth.sum(2) - worth[:, :, 0] if others is share else worth.sum(2))
    return total


def _products(vectors: Float[Tensor, "B H G T Dv"], cells: _Cells) -> Float[Tensor, "B H G T c C"]:
    """Inner products with every cell's value; the heads of a group read the same values."""
    products = vectors.flatten(2, 3) @ cells.values.flatten(2, 3).mT
    return products.unflatten(2, vectors.shape[2:4]).unflatten(-1, (cells.chunk, -1))


def _unlike_reserve(
    cells: _Cells,
    mass: Float[Tensor, "B H G c C"],
    reserve: Bool[Tensor, "B H c C"],
    inner: Tensor,
    gram: Tensor | None,
) -> Float[Tensor, "B H G C"]:
    """|W x|^2 for each chunk, x from what the reserve says to what the chunk says.

    What tokens say is the mean of their values by `mass`, the attention that each receives in all.
    """
    least = torch.finfo(mass.dtype).tiny
    shares = mass / mass.sum(-2, keepdim=True).clamp(min=least)
    kept = mass.masked_fill(~reserve[:, :, None], 0.0).flatten(3)
    anchor = (kept / kept.sum(-1, keepdim=True).clamp(min=least)) @ cells.values.flatten(2, 3)
    turned = anchor[..., None, :] if gram is None else anchor[..., None, :] @ gram[:, 0]
    own = (shares[..., None, :] * shares[..., None, :, :] * inner[:, :, 0]).sum((3, 4))
    toward = (shares * _products(turned, cells)[:, :, :, 0]).sum(-2)
    return (own - 2 * toward + (turned[..., 0, :] * anchor).sum(-1, keepdim=True)).clamp(min=0.0)
