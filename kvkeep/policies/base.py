"""What a policy sees and what it answers.

B sequences, H KV heads, G query heads per KV head, N slots, T new tokens, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import AttentionMass
from ..slots import Slots

# maps positions [..., T] to (cos, sin), each [..., T, R] with R <= D rotated dimensions, halves repeated
Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One layer right after the attention of T new tokens, before anything is evicted.

    Attributes:
        slots: everything held, the new tokens included; `slots.positions` is -1 where a slot is empty.
        new: slot index of each new token `[B, H, T]`, or None when they are the last T slots.
        num_new: T.
        lengths: tokens each sequence has seen, `[B]`, padding not counted.
        attention: mass the slots receive from the new queries (None without queries).
        queries: `[B, H * G, T, D]`, after rotation (None when the policy does not need them).
        query_positions: `[B, T]`, -1 for padding.
        scale: what the model multiplies query-key products by.
        rotary: the model's rotation, for policies that need it.
        layer: index of the layer.
        ahead: the new tokens are a look-ahead that will be taken back.
    """

    slots: Slots
    new: Int[Tensor, "B H T"] | None
    num_new: int
    lengths: Int[Tensor, " B"]
    layer: int
    attention: AttentionMass | None = None
    queries: Float[Tensor, "B HG T D"] | None = None
    query_positions: Int[Tensor, "B T"] | None = None
    scale: float | None = None
    rotary: Rotary | None = None
    ahead: bool = False

    @property
    def new_keys(self) -> Float[Tensor, "B H T D"]:
        return self._of_new(self.slots.keys)

    @property
    def new_values(self) -> Float[Tensor, "B H T Dv"]:
        return self._of_new(self.slots.values)

    @property
    def new_positions(self) -> Int[Tensor, "B H T"]:
        return self._of_new(self.slots.positions)

    def put(self, name: str, worth: Float[Tensor, "B H T"]) -> None:
        """Write the side array `name` at the slots of the new tokens."""
        side = self.slots.side(name)
        if self.new is None:
            side[:, :, -self.num_new :] = worth
        else:
            side.scatter_(2, self.new, worth.to(side.dtype))

    def _of_new(self, array: Tensor) -> Tensor:
        if self.new is None:
            return array[:, :, array.shape[2] - self.num_new :]
        index = self.new if array.ndim == 3 else self.new[..., None].expand(-1, -1, -1, array.shape[-1])
        return array.gather(2, index)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Says how much each slot is worth. A policy holds settings only: all state lives in the cache.

    Class attributes:
        needs: what it reads beyond keys, values and positions: "queries" (the model must be attached), "rotary",
            "future" (a future must be supplied to `prefill`).
        side: names of fp32 arrays `[B, H, N]` the cache carries beside the slots for it.
        schedule: the layer schedule it comes with.
        chunk_free: whether one prefill and a chunked one keep the same tokens under a budget in tokens.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    side: ClassVar[tuple[str, ...]] = ()
    schedule: ClassVar[str] = "uniform"
    chunk_free: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        """What makes this policy again, as plain JSON: `type(policy)(**policy.settings())`."""
        return asdict(self)

    def check(self, fingerprint: Mapping[str, Any], layers: Sequence[int]) -> None:
        """ValueError if this policy cannot serve a model (`kvkeep.fingerprint`) whose layers `layers` are managed."""
        return

    def streams(self, num_heads: int, group: int, head_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the fp32 arrays `[B, ...]` the cache carries per sequence for it (`slots.streams`)."""
        return {}

    def track(self, seen: Observation) -> None:
        """Update the side arrays after every forward, whether or not something must go. Default: nothing."""
        return

    @abstractmethod
    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        """Worth of every slot in fp32; the greatest are kept. Values at empty slots are ignored."""


def hashed_uniform(positions: Int[Tensor, "B H N"], seed: int) -> Float[Tensor, "B H N"]:
    """Uniform numbers in [0, 1) that depend on seed, head and position alone: the same in any chunking or batch."""
    heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    start = seed * 0xC2B2AE3D & 0xFFFFFFFF
    mixed = (positions.long() * 0x9E3779B1 + heads * 0x85EBCA77 + start) & 0xFFFFFFFF
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = ((mixed ^ (mixed >> 16)) * multiplier) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) >> 8).float() / 2**24
