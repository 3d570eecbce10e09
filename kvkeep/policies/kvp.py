"""KVP: a ranking of the cache that was learned per head from future attention (arXiv 2602.10238).

B sequences, H KV heads, N slots, T new tokens, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..slots import EMPTY
from .agents import Agents, AgentShape, load_agents, make_agents
from .base import Observation
from .baselines import SnapKV
from .files import PolicyFile
from .learned import LearnedPolicy, Trained, policy_file, sizes_for
from .spelling import spell

# newest queries that agents see unless told otherwise
GLANCE = 32
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
        received: Float[Tensor, "B H N 2"] | None,
    ) -> Float[Tensor, "B H N"]:
        """What the agents of one layer say of its slots."""
        with torch.no_grad():
            return self.on(keys.device)(keys, values, positions, lengths, received, self.rows(layer, keys.shape[1]))


@dataclass(frozen=True, kw_only=True)
class KVP(LearnedPolicy):
    """KVP (arXiv 2602.10238): small agents, one per KV head, rank tokens by key, value and position; see docs/kvp.md.

    Agents that glance (`AgentShape.glance`) also see what the newest queries read, as `Tova` and `SnapKV` do.

    Everything is ranked after a prompt, and in decoding whenever a sequence's length is a multiple of 16, the last
    chance before a token leaves the recent window; a token that came since is worth more than any ranked one.

    Args:
        weights: weights shipped with kvkeep ("smollm2", or "smollm2-no-queries"), a folder, or a hub id.
        digest: checksum that the weights must have, if given.
        trained: agents at hand, in place of stored ones.

    Raises:
        ValueError: for unknown weights, or others than those of `digest`.
    """

    method: ClassVar[str] = "kvp"
    needs: ClassVar[frozenset[str]] = SnapKV.needs
    side: ClassVar[tuple[str, ...]] = ("kvp", *SnapKV.side)
    # what deeper layers read depends on what earlier chunks kept
    chunk_free: ClassVar[bool] = False

    # how it sees the newest queries but for the last, or None
    glance: ClassVar[SnapKV | None] = None

    _EVERY: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        glance = AgentShape(**self.trained.file.architecture).glance
        if glance:
            object.__setattr__(self, "glance", SnapKV(window=glance, kernel=1))
        else:
            object.__setattr__(self, "needs", frozenset())
            object.__setattr__(self, "side", self.side[:1])

    @classmethod
    def network_of(cls, file: PolicyFile) -> Ranking:
        return Ranking(file, load_agents(AgentShape(**file.architecture), file.tensors))

    @classmethod
    def untrained_file(
        cls, fingerprint: Mapping[str, Any], layers: Sequence[int], seed: int, **options: Any
    ) -> PolicyFile:
        shape = AgentShape(**{"hidden": 16, "glance": GLANCE, **sizes_for(fingerprint, layers), **options})
        return agents_file(make_agents(shape, seed), fingerprint, layers, {"note": "not trained"})

    @property
    def glimpses(self) -> Mapping[int, str]:
        return glimpses_of(self.glance.window) if self.glance else {}

    def track(self, seen: Observation) -> None:
        if self.glance:
            self.glance.track(seen)
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
        received = None
        if self.glance:
            assert seen.attention is not None
            received = torch.stack([self.glance.score(seen), seen.attention.received(last=1)], dim=-1)
        arrays = (slots.keys, slots.values, slots.positions, seen.lengths, received)
        if bool(due.all()):
            side.copy_(self.trained.score(seen.layer, *arrays))
        else:
            of_due = (None if array is None else array[due] for array in arrays)
            side[due] = self.trained.score(seen.layer, *of_due)


def glimpses_of(glance: int) -> dict[int, str]:
    """What agents see of queries by this glance, as `Policy.glimpses`."""
    return {glance: spell("snapkv", {"window": glance, "kernel": 1}, SnapKV), 1: "tova"}


def agents_file(
    agents: Agents, fingerprint: Mapping[str, Any], layers: Sequence[int], training: Mapping[str, Any]
) -> PolicyFile:
    """Agents as they are stored."""
    return policy_file(agents, KVP.method, asdict(agents.shape), fingerprint, layers, training)
