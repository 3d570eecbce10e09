"""What the attention output loses with a few neighbouring tokens, in closed form.

B sequences, H KV heads, G query heads per KV head, N slots, T queries, D head size, E hidden size, C chunks of c
neighbours each.

A query gives the weights a to the tokens it sees and reads o. Without the tokens j of a chunk the weights of the others
grow, and it reads o + d:

    d = sum_j a_j (o - v_j) / (1 - sum_j a_j)

That costs |W d|^2, W being the query head's part of the output projection. Summed over queries it is a quadratic form
in the values: arrays of queries x tokens and of tokens x head size are all it takes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..slots import EMPTY, Slots

# numbers in an array over queries and slots, and in one over slots and head size: 64 and 16 MiB in fp32
_QUERY_TILE = 2**24
_SLOT_TILE = 2**22


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
    cost = mass = square = cells.values.new_zeros(())
    for part in _tiles(asked, cells):
        weights = part.weights.to(cells.values.dtype)[:, None, None, :, None]
        attention, output = _attention(cells, part, scale)
        cost = cost + _leave_out(cells, attention, output, weights, gram, epsilon)
        mass = mass + (attention * weights[..., None]).sum(3)
        square = square + (attention.sum(-1).square() * weights).sum(3)
    if guard:
        cost = torch.maximum(cost, guard * _unlike_reserve(cells, mass, square, cells.of(reserve), gram))
    return cells.spread(cost / cells.sizes)


def attention_mass(slots: Slots, asked: Asked, scale: float, *, chunk: int) -> Float[Tensor, "B H N"]:
    """For each slot, the attention its chunk receives from all queries and heads, divided by the chunk's size."""
    cells = _Cells(slots, chunk, torch.float32)
    total = cells.values.new_zeros(())
    for part in _tiles(asked, cells):
        weights = part.weights.to(cells.values.dtype)[:, None, None, :, None, None]
        total = total + (_attention(cells, part, scale)[0] * weights).sum((2, 3, 5))
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

    `keys` `[B, H, C * c, D]`, `values` `[B, H, C, c, Dv]`, `positions` `[B, H, C * c]` (-1: no token), `sizes`
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
        place = torch.where(at != EMPTY, rank * chunk + at % chunk, num_chunks * chunk)
        cell = order.new_full((*at.shape[:2], num_chunks * chunk + 1), EMPTY).scatter_(-1, place, order)[..., :-1]
        self.chunk, self._slot = chunk, cell.clamp(min=0)
        self._home = torch.zeros_like(order).scatter_(-1, order, rank.clamp(min=0))
        self.positions = positions.gather(-1, self._slot).masked_fill(cell == EMPTY, EMPTY)
        self.sizes = (cell != EMPTY).unflatten(-1, (-1, chunk)).sum(-1).clamp(min=1)
        rows, heads = (torch.arange(size, device=at.device) for size in at.shape[:2])
        whole = rows[:, None, None], heads[:, None], self._slot
        dtype = torch.promote_types(slots.keys.dtype, dtype)
        self.keys = slots.keys[whole].to(dtype)
        self.values = slots.values[whole].to(dtype).unflatten(2, (-1, chunk))

    def of(self, marks: Bool[Tensor, "B H N"]) -> Bool[Tensor, "B H C c"]:
        """Marks of slots, at their cells."""
        return (marks.gather(-1, self._slot) & (self.positions != EMPTY)).unflatten(-1, (-1, self.chunk))

    def spread(self, worth: Float[Tensor, "B H C"]) -> Float[Tensor, "B H N"]:
        """Each chunk's worth, at its slots."""
        return worth.gather(-1, self._home)


def _tiles(asked: Asked, cells: _Cells) -> list[Asked]:
    rows = asked.queries.shape[1] * cells.positions.shape[-1]
    size = max(1, _QUERY_TILE // rows)
    return [
        Asked(*parts)
        for parts in zip(
            asked.queries.split(size, 2), asked.positions.split(size, 1), asked.weights.split(size, 1), strict=True
        )
    ]


def _attention(
    cells: _Cells, asked: Asked, scale: float
) -> tuple[Float[Tensor, "B H G T C c"], Float[Tensor, "B H G T Dv"]]:
    """What each query gives to each cell, and what it reads."""
    (B, HG, T, D), H = asked.queries.shape, cells.keys.shape[1]
    rows = (asked.queries.to(cells.keys.dtype) * scale).reshape(B, H, -1, D)
    logits = (rows @ cells.keys.mT).view(B, H, HG // H, T, -1)
    at, seen = asked.positions[:, None, None, :, None], cells.positions[:, :, None, None]
    # padding sees everything, so that its rows, which count nothing, are finite
    logits.masked_fill_((seen == EMPTY) | ((seen > at) & (at != EMPTY)), -torch.inf)
    attention = logits.softmax(-1)
    output = (attention.view(B, H, HG // H * T, -1) @ cells.values.flatten(2, 3)).view(B, H, HG // H, T, -1)
    return attention.unflatten(-1, (-1, cells.chunk)), output


def _leave_out(
    cells: _Cells, attention: Tensor, output: Tensor, weights: Tensor, gram: Tensor | None, epsilon: float
) -> Float[Tensor, "B H C"]:
    """sum over queries of weight * |W d|^2 for each chunk."""
    mass = attention.sum(-1)
    factor = weights.sqrt() / (1 - mass + epsilon)
    if gram is not None and gram.shape[1] > 1:
        return _energy(cells, attention * factor[..., None], output, gram)
    # where a query reads little else, the quadratic form is a small difference of large numbers: there d is worked out
    top = mass.argmax(-1, keepdim=True)
    rest = mass.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    # where nothing else is seen, nothing could be read in its place
    grown = torch.where(rest > 0, weights.sqrt() / (rest + epsilon), 0.0)
    largest = squared(_lost(cells, attention, output, top) * grown, gram)
    others = _energy(cells, attention * factor.scatter(-1, top, 0.0)[..., None], output, gram)
    return others.scatter_add(-1, top.flatten(2), largest.flatten(2))


def _lost(
    cells: _Cells, attention: Tensor, output: Tensor, chunk: Int[Tensor, "B H G T 1"]
) -> Float[Tensor, "B H G T Dv"]:
    """sum_j a_j (v_j - o) over one chunk for each query."""
    rows, heads = (torch.arange(size, device=chunk.device) for size in chunk.shape[:2])
    values = cells.values[rows[:, None, None, None], heads[:, None, None], chunk[..., 0]]
    shares = attention.gather(4, chunk[..., None].expand(*chunk.shape, cells.chunk))
    return ((values - output[..., None, :]) * shares[..., 0, :, None]).sum(-2)


def _energy(cells: _Cells, share: Tensor, output: Tensor, gram: Tensor | None) -> Float[Tensor, "B H C"]:
    """sum over queries q and heads of |W sum_j share_qj (v_j - o_q)|^2 for each chunk."""
    B, H, G, _, _, c = share.shape
    # queries last: a chunk's shares lie together, and products with outputs need no transpose
    rows = share.flatten(4).mT.unflatten(3, (-1, c))
    size = max(1, _SLOT_TILE // (B * H * G * c * output.shape[-1]))
    parts = []
    for tile, values in zip(rows.split(size, 3), cells.values.split(size, 2), strict=True):
        tile = tile.contiguous()
        shifted = [_crossed(tile, output, values, s, part) for s, part in enumerate(_shifts(gram))]
        parts.append(torch.stack(shifted).sum(0))
    return torch.cat(parts, dim=-1)


def _shifts(gram: Tensor | None) -> Sequence[Tensor | None]:
    return [None] if gram is None else gram.unbind(1)


def _crossed(
    rows: Float[Tensor, "B H G C c T"],
    output: Float[Tensor, "B H G T Dv"],
    values: Float[Tensor, "B H C c Dv"],
    shift: int,
    gram: Float[Tensor, "H G Dv Dv"] | None,
) -> Float[Tensor, "B H C"]:
    """Products of what query head g misses with what head g + shift of its group misses, summed over g and queries."""
    others, read = rows.roll(-shift, 2), output.roll(-shift, 2)
    turned, turned_output = _turned(values[:, :, None], gram), _turned(output, gram)
    sums, other_sums = rows.sum(-2), others.sum(-2)
    among = ((rows @ others.mT) * (turned @ values[:, :, None].mT)).sum((2, 4, 5))
    toward = ((rows * other_sums[..., None, :]).flatten(3, 4) @ read).unflatten(3, rows.shape[3:5])
    lengths = (turned_output * read).sum(-1)
    return among - 2 * (toward * turned).sum((2, 4, 5)) + (sums * other_sums * lengths[..., None, :]).sum((2, 4))


def _turned(vectors: Tensor, gram: Tensor | None) -> Tensor:
    """Vectors `[B, H, 1 or G, ..., Dv]` of every query head, times its W^T W."""
    if gram is None:
        return vectors
    flat = vectors.flatten(3, -2) if vectors.ndim > 4 else vectors
    return (flat @ gram).unflatten(3, vectors.shape[3:-1])


def _unlike_reserve(
    cells: _Cells, mass: Tensor, square: Tensor, reserve: Bool[Tensor, "B H C c"], gram: Tensor | None
) -> Float[Tensor, "B H C"]:
    """Each chunk's squared attention `[B, H, G, C]` times |W x|^2, x from what the reserve says to what it says.

    What tokens say is the mean of their values by `mass` `[B, H, G, C, c]`, the attention each receives in all.
    """
    least = torch.finfo(mass.dtype).tiny
    shares = mass / mass.sum(-1, keepdim=True).clamp(min=least)
    says = (shares[..., None] * cells.values[:, :, None]).sum(-2)
    kept = mass.masked_fill(~reserve[:, :, None], 0.0).flatten(3)
    anchor = (kept / kept.sum(-1, keepdim=True).clamp(min=least))[..., None, :] @ cells.values.flatten(2, 3)[:, :, None]
    return (square * squared(says - anchor, gram)).sum(2)
