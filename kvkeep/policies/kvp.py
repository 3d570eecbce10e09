"""KVP: a ranking of the cache that was learned per head from future attention (arXiv 2602.10238).

B sequences, H KV heads, N slots, T new tokens, D head size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..slots import EMPTY
from .agents import Agents, AgentShape, load_agents, make_agents
from .base import Observation
from .files import PolicyFile
from .learned import LearnedPolicy, Trained, policy_file, sizes_for

# a token that was not ranked yet is worth more than any that was
_UNRANKED = torch.finfo(torch.float32).max


class Ranking(Trained[Agents]):
    """Trained agents, ready for the layers of the model they were trained for."""

    def score(
        self,
        layer: int,
        keys: Float[Tensor, "B H N D"],
        values: Float[Tensor, "B H N V"],
        positions: Int[Tensor, "B H N"],
        lengths: Int[Tensor, " B"],
    ) -> Float[Tensor, "B H N"]:
        """What the agents of one layer say of its slots."""
        with torch.no_grad():
            return self.on(keys.device)(keys, values, positions, lengths, self.rows(layer, keys.shape[1]))


@dataclass(frozen=True, kw_only=True)
class KVP(LearnedPolicy):
    """KVP (arXiv 2602.10238): small agents, one per KV head, rank tokens by key, value and position; see docs/kvp.md.

    Everything is ranked after a prompt, and in decoding whenever a sequence's length is a multiple of 16, the last
    chance before a token leaves the recent window; a token that came since is worth more than any ranked one.

    Args:
        weights: weights shipped with kvkeep ("smollm2"), a folder, or a hub id.
        digest: checksum that the weights must have, if given.
        trained: agents at hand, in place of stored ones.
        reach: tokens so many positions away count in a token's rank; 0 ranks each alone.
        near: how they count. "bridge": a token ranks no lower than the best before it and the best behind it both do,
            so that no digit is lost from the middle of a number; "mean": by the mean score of all of them and itself.

    Raises:
        ValueError: for unknown weights, or others than those of `digest`, a negative reach, and another `near`.
    """

    reach: int = 0
    near: str = "bridge"

    method: ClassVar[str] = "kvp"
    side: ClassVar[tuple[str, ...]] = ("kvp",)
    # what deeper layers read depends on what earlier chunks kept
    chunk_free: ClassVar[bool] = False

    _EVERY: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach < 0:
            raise ValueError(f"reach must be 0 or more positions, got {self.reach}")
        if self.near not in NEIGHBOURS:
            raise ValueError(f"near must be one of {', '.join(NEIGHBOURS)}, got {self.near!r}")

    @classmethod
    def network_of(cls, file: PolicyFile) -> Ranking:
        return Ranking(file, load_agents(AgentShape(**file.architecture), file.tensors))

    @classmethod
    def untrained_file(
        cls, fingerprint: Mapping[str, Any], layers: Sequence[int], seed: int, **options: Any
    ) -> PolicyFile:
        shape = AgentShape(**{"hidden": 16, **sizes_for(fingerprint, layers), **options})
        return agents_file(make_agents(shape, seed), fingerprint, layers, {"note": "not trained"})

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "reach": self.reach, "near": self.near}

    def track(self, seen: Observation) -> None:
        seen.put("kvp", torch.full_like(seen.new_positions, _UNRANKED, dtype=torch.float32))
        due = seen.lengths % self._EVERY == 0
        if seen.num_new > 1:
            # a padded row may have got a single token, which is decoding
            due = due | ((seen.new_positions[:, 0] != EMPTY).sum(-1) > 1)
        if bool(due.any()):
            self._rank(seen, due)

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("kvp")

    def _rank(self, seen: Observation, due: Bool[Tensor, " B"]) -> None:
        """Score all slots of the sequences that are due."""
        slots, side = seen.slots, seen.slots.side("kvp")
        arrays = (slots.keys, slots.values, slots.positions, seen.lengths)
        if bool(due.all()):
            side.copy_(self._scores(seen.layer, *arrays))
        else:
            side[due] = self._scores(seen.layer, *(array[due] for array in arrays))

    def _scores(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        scores = self.trained.score(layer, keys, values, positions, lengths)
        return NEIGHBOURS[self.near](scores, positions, self.reach) if self.reach else scores


def bridged(scores: Float[Tensor, "B H N"], positions: Int[Tensor, "B H N"], reach: int) -> Float[Tensor, "B H N"]:
    """Scores at least as high as the lesser of the best before a token and the best behind it, both within `reach`.

    Slots may be in any order. The order of scores alone decides the order that comes out (a morphological closing).
    """
    at, order = positions.sort(-1)
    own = scores.gather(-1, order)
    before, behind = torch.full_like(own, -torch.inf), torch.full_like(own, -torch.inf)
    for away, near in _pairs(at, reach):
        before[..., away:].clamp_(min=own[..., :-away].masked_fill(~near, -torch.inf))
        behind[..., :-away].clamp_(min=own[..., away:].masked_fill(~near, -torch.inf))
    return torch.empty_like(scores).scatter_(-1, order, torch.maximum(own, torch.minimum(before, behind)))


def mean_within(scores: Float[Tensor, "B H N"], positions: Int[Tensor, "B H N"], reach: int) -> Float[Tensor, "B H N"]:
    """Mean over the tokens held at most `reach` positions away, in any order of slots, the empty ones left out."""
    at, order = positions.sort(-1)
    own = scores.gather(-1, order).masked_fill(at == EMPTY, 0.0)
    sums, counts = own.clone(), torch.ones_like(own)
    for away, near in _pairs(at, reach):
        sums[..., away:] += own[..., :-away] * near
        sums[..., :-away] += own[..., away:] * near
        counts[..., away:] += near
        counts[..., :-away] += near
    return torch.empty_like(scores).scatter_(-1, order, sums / counts)


def _pairs(at: Int[Tensor, "B H N"], reach: int) -> Iterator[tuple[int, Bool[Tensor, "B H M"]]]:
    """For slots in order of position: each distance in slots, and which that far apart hold tokens within reach."""
    # those in reach are no further away in slots
    for away in range(1, min(reach, at.shape[-1] - 1) + 1):
        yield away, (at[..., away:] - at[..., :-away] <= reach) & (at[..., :-away] != EMPTY)


NEIGHBOURS = {"bridge": bridged, "mean": mean_within}


def agents_file(
    agents: Agents, fingerprint: Mapping[str, Any], layers: Sequence[int], training: Mapping[str, Any]
) -> PolicyFile:
    """Agents as they are stored."""
    return policy_file(agents, KVP.method, asdict(agents.shape), fingerprint, layers, training)
