"""KVP: a ranking of the cache that was learned per head from future attention (arXiv 2602.10238).

B sequences, H KV heads, N slots, T new tokens, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..fingerprint import refuse_other_model
from ..slots import EMPTY
from .agents import Agents, AgentShape, load_agents, make_agents
from .base import Observation, Policy
from .files import PolicyFile, push_policy, read_policy, write_policy

METHOD = "kvp"

# a token that was not ranked yet is worth more than any that was
_UNRANKED = torch.finfo(torch.float32).max


class Ranking:
    """Trained agents with where they came from, ready for the layers of the model they were trained for.

    Raises:
        ValueError: where the file's tensors are not those of its architecture.
    """

    def __init__(self, file: PolicyFile):
        self.file = file
        self.digest = file.digest
        self.shape = AgentShape(**file.architecture)
        self._agents = {torch.device("cpu"): load_agents(self.shape, file.tensors)}

    def score(
        self,
        layer: int,
        keys: Float[Tensor, "B H N D"],
        values: Float[Tensor, "B H N V"],
        positions: Int[Tensor, "B H N"],
        lengths: Int[Tensor, " B"],
    ) -> Float[Tensor, "B H N"]:
        """What the agents of one layer say of its slots."""
        num_heads = keys.shape[1]
        start = self.file.layers.index(layer) * num_heads
        with torch.no_grad():
            return self._on(keys.device)(keys, values, positions, lengths, slice(start, start + num_heads))

    def _on(self, device: torch.device) -> Agents:
        if device not in self._agents:
            self._agents[device] = load_agents(self.shape, self.file.tensors).to(device)
        return self._agents[device]


@dataclass(frozen=True, kw_only=True)
class KVP(Policy):
    """KVP (arXiv 2602.10238): small agents, one per KV head, rank tokens by key, value and position; see docs/kvp.md.

    Everything is ranked after a prompt, and in decoding whenever a sequence's length is a multiple of 16, the last
    chance before a token leaves the recent window; a token that came since is worth more than any ranked one.

    Args:
        weights: weights shipped with kvkeep ("smollm2"), a folder, or a hub id.
        digest: checksum that the weights must have, if given.
        ranking: agents at hand, in place of stored ones.

    Raises:
        ValueError: for unknown weights, or others than those of `digest`.
    """

    side: ClassVar[tuple[str, ...]] = ("kvp",)
    # what deeper layers read depends on what earlier chunks kept
    chunk_free: ClassVar[bool] = False

    weights: str = field(default="smollm2", compare=False)
    digest: str | None = None
    ranking: Ranking | None = field(default=None, repr=False, compare=False)

    _EVERY: ClassVar[int] = 16

    def __post_init__(self) -> None:
        ranking = self.ranking or _ranking(self.weights)
        if self.digest not in (None, ranking.digest):
            raise ValueError(
                f"the weights {self.weights!r} have changed: their checksum is {ranking.digest[:12]}, wanted is "
                f"{str(self.digest)[:12]}; restore the old ones"
            )
        object.__setattr__(self, "ranking", ranking)
        object.__setattr__(self, "digest", ranking.digest)

    @classmethod
    def from_pretrained(cls, weights: str | Path) -> "KVP":
        """The policy stored in a folder or a hub repository, or shipped under that name."""
        return cls(weights=str(weights))

    @classmethod
    def untrained(cls, fingerprint: Mapping[str, Any], *, layers: Sequence[int] | None = None, seed: int = 0) -> "KVP":
        """Agents as they are before training, for a model of this fingerprint; good for tests alone."""
        layers = list(range(fingerprint["number of layers"])) if layers is None else list(layers)
        size = fingerprint["head size"]
        shape = AgentShape(
            num_agents=len(layers) * fingerprint["number of KV heads"], key_size=size, value_size=size, hidden=16
        )
        file = policy_file(make_agents(shape, seed), fingerprint, layers, {"note": "not trained"})
        return cls(weights="untrained", ranking=Ranking(file))

    @property
    def file(self) -> PolicyFile:
        """Weights, model fingerprint and training manifest."""
        assert self.ranking is not None
        return self.ranking.file

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `policy.safetensors` and `policy.json` into `folder`, whole or not at all."""
        write_policy(folder, self.file)

    def push_to_hub(self, repository: str, *, private: bool = False) -> str:
        """Upload the policy to "owner/name"; returns the address of the commit."""
        return push_policy(self.file, repository, private=private)

    def settings(self) -> dict[str, Any]:
        # the network stays where it is; the checksum tells whether it is still the same
        place = Path(self.weights)
        return {"weights": str(place.resolve()) if place.is_dir() else self.weights, "digest": self.digest}

    def check(self, fingerprint: Mapping[str, Any], layers: Sequence[int]) -> None:
        # weights do not depend on the words a model knows
        theirs = {name: value for name, value in self.file.fingerprint.items() if name != "vocabulary"}
        refuse_other_model(theirs, fingerprint, f"the policy kvp ({self.weights})")
        if self.file.layers != list(layers):
            raise ValueError(
                f"the policy kvp ({self.weights}) has agents for layers {self.file.layers}, and the layers to manage "
                f"are {list(layers)}; train it on traces of all of them"
            )

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
        assert self.ranking is not None
        slots, side = seen.slots, seen.slots.side("kvp")
        arrays = (slots.keys, slots.values, slots.positions, seen.lengths)
        if bool(due.all()):
            side.copy_(self.ranking.score(seen.layer, *arrays))
        else:
            side[due] = self.ranking.score(seen.layer, *(array[due] for array in arrays))


def policy_file(
    agents: Agents, fingerprint: Mapping[str, Any], layers: Sequence[int], training: Mapping[str, Any]
) -> PolicyFile:
    """Agents as they are stored: weights in bf16, what they were calibrated with in fp32."""
    weights = {name: weight.detach().bfloat16() for name, weight in agents.named_parameters()}
    return PolicyFile(
        method=METHOD,
        fingerprint=dict(fingerprint),
        layers=list(layers),
        architecture=asdict(agents.shape),
        training=dict(training),
        tensors={**weights, **dict(agents.named_buffers())},
    )


def _ranking(weights: str) -> Ranking:
    return _ranking_of(read_policy(weights, METHOD))


# one for each file, which is itself read once
@lru_cache(maxsize=8)
def _ranking_of(file: PolicyFile) -> Ranking:
    return Ranking(file)
