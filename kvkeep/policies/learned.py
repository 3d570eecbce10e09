"""What policies with trained weights have in common: where the weights are, which model they serve, how they travel."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from ..fingerprint import refuse_other_model
from .base import Policy
from .files import PolicyFile, push_policy, read_policy, write_policy

Network = TypeVar("Network", bound=nn.Module)
Learned = TypeVar("Learned", bound="LearnedPolicy")


class Trained(Generic[Network]):
    """A network with the file it came from, on each device where it is asked."""

    def __init__(self, file: PolicyFile, network: Network):
        self.file, self.digest = file, file.digest
        self._on = {torch.device("cpu"): network}

    def on(self, device: torch.device) -> Network:
        if device not in self._on:
            self._on[device] = deepcopy(self._on[torch.device("cpu")]).to(device)
        return self._on[device]

    def rows(self, layer: int, num_heads: int) -> slice:
        """The KV heads of one layer among all that there are weights for."""
        start = self.file.layers.index(layer) * num_heads
        return slice(start, start + num_heads)


@dataclass(frozen=True, kw_only=True)
class LearnedPolicy(Policy):
    """A policy with weights.

    Class attributes:
        method: what files of its weights say they are for, and its folder among those that ship.
    """

    method: ClassVar[str]

    weights: str = field(default="smollm2", compare=False)
    digest: str | None = None
    trained: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        trained = self.trained or self._trained_in(read_policy(self.weights, self.method))
        if self.digest not in (None, trained.digest):
            raise ValueError(
                f"the weights {self.weights!r} have changed: their checksum is {trained.digest[:12]}, wanted is "
                f"{str(self.digest)[:12]}; restore the old ones"
            )
        object.__setattr__(self, "trained", trained)
        object.__setattr__(self, "digest", trained.digest)

    @classmethod
    @abstractmethod
    def network_of(cls, file: PolicyFile) -> Trained:
        """The network that is stored in a file; ValueError where its tensors are not those of its architecture."""

    @classmethod
    @abstractmethod
    def untrained_file(
        cls, fingerprint: Mapping[str, Any], layers: Sequence[int], seed: int, **options: Any
    ) -> PolicyFile:
        """Small weights as they are before training."""

    @classmethod
    def from_pretrained(cls: type[Learned], weights: str | Path) -> Learned:
        """The policy stored in a folder or a hub repository, or shipped under that name."""
        return cls(weights=str(weights))

    @classmethod
    def untrained(
        cls: type[Learned],
        fingerprint: Mapping[str, Any],
        *,
        layers: Sequence[int] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Learned:
        """Weights as they are before training, for a model of this fingerprint; good for tests alone."""
        layers = list(range(fingerprint["number of layers"])) if layers is None else list(layers)
        file = cls.untrained_file(fingerprint, layers, seed, **options)
        return cls(weights="untrained", trained=cls.network_of(file))

    @classmethod
    def _trained_in(cls, file: PolicyFile) -> Trained:
        return _network_of(cls, file)

    @property
    def file(self) -> PolicyFile:
        """Weights, model fingerprint and training manifest."""
        return self.trained.file

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
        refuse_other_model(theirs, fingerprint, f"the policy {self.method} ({self.weights})")
        if self.file.layers != list(layers):
            raise ValueError(
                f"the policy {self.method} ({self.weights}) has weights for layers {self.file.layers}, and the layers "
                f"to manage are {list(layers)}; train it on traces of all of them"
            )

    def shard(self: Learned, index: int, count: int) -> Learned:
        heads = self.file.fingerprint["number of KV heads"]
        # more workers than heads share them
        first, own = index * heads // count, max(1, heads // count)
        agents = torch.arange(len(self.file.layers) * heads).view(-1, heads)[:, first : first + own].flatten()
        # what has one dimension belongs to no agent
        tensors = {name: array[agents] if array.ndim > 1 else array for name, array in self.file.tensors.items()}
        architecture = {**self.file.architecture, "num_agents": len(agents)}
        file = replace(self.file, tensors=tensors, architecture=architecture)
        return replace(self, digest=None, trained=self.network_of(file))


# one for each file, which is itself read once
@lru_cache(maxsize=8)
def _network_of(kind: type[LearnedPolicy], file: PolicyFile) -> Trained:
    return kind.network_of(file)


def policy_file(
    network: nn.Module,
    method: str,
    architecture: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    layers: Sequence[int],
    training: Mapping[str, Any],
) -> PolicyFile:
    """A network as it is stored: weights in bf16, what it was calibrated with in fp32."""
    weights = {name: weight.detach().bfloat16() for name, weight in network.named_parameters()}
    return PolicyFile(
        method=method,
        fingerprint=dict(fingerprint),
        layers=list(layers),
        architecture=dict(architecture),
        training=dict(training),
        tensors={**weights, **dict(network.named_buffers())},
    )


def sizes_for(fingerprint: Mapping[str, Any], layers: Sequence[int]) -> dict[str, int]:
    """Sizes of a network with an agent for each KV head of these layers, for a model of this fingerprint."""
    size = fingerprint["head size"]
    num_agents = len(layers) * fingerprint["number of KV heads"]
    return {"key_size": size, "value_size": size, "num_agents": num_agents}
