"""Which slots survive: the policy says worth, the budget says how many, this module says which.

B sequences, H KV heads, N slots, M survivors.

Protected slots are marked by index and win by being infinite among clamped finite worths; empty slots go first;
equal worths keep the newest token.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .slots import EMPTY


def protected(
    positions: Int[Tensor, "B H N"], lengths: Int[Tensor, " B"], *, sinks: int, recent: int
) -> Bool[Tensor, "B H N"]:
    """The first `sinks` and last `recent` tokens of each sequence that has seen `lengths` tokens.

    Empty slots may be marked too; nothing here protects them.
    """
    first_recent = (lengths - recent)[:, None, None]
    return (positions < sinks) | (positions >= first_recent)


def survivors(
    score: Float[Tensor, "B H N"], positions: Int[Tensor, "B H N"], guarded: Bool[Tensor, "B H N"], count: int
) -> Int[Tensor, "B H M"]:
    """Indices of the `count` slots of greatest worth, in order of position, empty slots first."""
    ranked = by_worth(score, positions, guarded)[..., :count]
    return ranked.gather(-1, positions.gather(-1, ranked).argsort(dim=-1))


def surplus(
    score: Float[Tensor, "B H N"],
    positions: Int[Tensor, "B H N"],
    guarded: Bool[Tensor, "B H N"],
    count: Int[Tensor, " B"],
) -> Bool[Tensor, "B H N"]:
    """Marks the slots of each sequence that are not among its `count` of greatest worth."""
    ranked = by_worth(score, positions, guarded)
    beyond = torch.arange(score.shape[-1], device=score.device) >= count[:, None, None]
    return torch.zeros_like(guarded).scatter_(-1, ranked, beyond.expand_as(ranked))


def victim(
    score: Float[Tensor, "B H N"], positions: Int[Tensor, "B H N"], guarded: Bool[Tensor, "B H N"]
) -> Int[Tensor, "B H"]:
    """The token of least worth of each head, of equal worths the oldest; empty slots are not candidates."""
    worth = _guarded(score, guarded | (positions == EMPTY))
    tied = worth == worth.amin(-1, keepdim=True)
    return torch.where(tied, positions, torch.iinfo(positions.dtype).max).argmin(-1)


def finite_or_recent(score: Float[Tensor, "B H N"], positions: Int[Tensor, "B H N"]) -> tuple[Tensor, bool]:
    """Replace the worth of heads that hold a NaN by recency; says whether any head did."""
    missing = score.isnan()
    if not bool(missing.any()):
        return score, False
    broken = (missing & (positions != EMPTY)).any(-1, keepdim=True)
    if not bool(broken.any()):
        return score, False
    return torch.where(broken, positions.to(score.dtype), score), True


def _guarded(score: Tensor, guarded: Tensor) -> Tensor:
    largest = torch.finfo(score.dtype).max
    return score.clamp(-largest, largest).masked_fill_(guarded, torch.inf)


def by_worth(score: Tensor, positions: Tensor, guarded: Tensor) -> Tensor:
    """Slots from the greatest worth to the least."""
    # decoding fills slots in place, in any order; a stable sort from the newest on puts the newest of equals first
    newest = positions.argsort(dim=-1, descending=True, stable=True)
    worth = _guarded(score, guarded).masked_fill_(positions == EMPTY, -torch.inf).gather(-1, newest)
    return newest.gather(-1, worth.argsort(dim=-1, descending=True, stable=True))
