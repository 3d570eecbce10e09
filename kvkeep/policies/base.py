"""What a policy sees and what it answers.

B sequences, H KV heads, G query heads per KV head, N slots, T new tokens, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import AttentionMass, WindowAttention
from ..budget import Budget
from ..rotation import Rotary
from ..slots import Slots
from ..windows import WindowShape
from .deletion import Projection


class Look(NamedTuple):
    """What a policy wants to see of the future before a prompt is evicted.

    `futures` continuations of `steps` tokens each, sampled by `seed`, or the likeliest tokens if `greedy`. Where
    `kvkeep.generate` can, it `keeps` the answer's first tokens as the only continuation instead. Sequences from which
    fewer than `surplus` tokens must go are evicted without it.
    """

    futures: int
    steps: int
    seed: int = 0
    greedy: bool = False
    keeps: bool = False
    surplus: int = 1


class Futures(NamedTuple):
    """Queries `[B, H * G, F, D]` of tokens that may follow, after rotation, and how much each counts `[B, F]`.

    `positions` `[B, F]` says where they stand if they were read into the slots; the others see the prompt alone.
    """

    queries: Float[Tensor, "B HG F D"]
    weights: Float[Tensor, "B F"]
    positions: Int[Tensor, "B F"] | None = None


class Tiers(NamedTuple):
    """How a policy wants windows of tokens held as codes: see `policies.tiered.TieredPolicy`."""

    window: int
    bits: int
    quantized: float
    share_heads: bool
    guard: float
    element_bytes: int
    promote: bool
    neighbours: bool
    first_after: int

    def window_shape(self, key_size: int, value_size: int) -> WindowShape:
        """A window of codes, with the bits that are asked for."""
        return WindowShape(
            window=self.window,
            key_bits=self.bits,
            value_bits=self.bits,
            key_size=key_size,
            value_size=value_size,
            scattered=not self.neighbours,
        )


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
        projection: this layer's output projection, for policies that need it; None where a head's output passes through
            something else first.
        layer: index of the layer.
        coded: attention of the new queries over windows held as codes; None where there are none.
        ahead: the new tokens are a look-ahead that will be taken back.
        held: nothing is evicted before the policy has seen the futures it asked for (`Policy.look`).
        futures: those futures. The rest is what the policy remembered of the prompt (`Policy.remember`), with `ahead`.
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
    projection: Projection | None = None
    coded: WindowAttention | None = None
    ahead: bool = False
    held: bool = False
    futures: Futures | None = None

    @cached_property
    def new_keys(self) -> Float[Tensor, "B H T D"]:
        return self._of_new(self.slots.keys)

    @cached_property
    def new_values(self) -> Float[Tensor, "B H T Dv"]:
        return self._of_new(self.slots.values)

    @cached_property
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
            "projection", "future" (a future must be supplied to `prefill`).
        side: names of fp32 arrays `[B, H, N]` the cache carries beside the slots for it.
        schedule: the layer schedule it comes with.
        chunk_free: whether one prefill and a chunked one keep the same tokens under a budget in tokens.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    side: ClassVar[tuple[str, ...]] = ()
    schedule: ClassVar[str] = "uniform"
    chunk_free: ClassVar[bool] = False

    @property
    def tiers(self) -> Tiers | None:
        """How it wants tokens held as codes before they go. Default: not at all."""
        return None

    @property
    def glimpses(self) -> Mapping[int, str]:
        """All it sees of queries, if that is mean attention from so many newest ones: the policies whose worth each is.

        Traces hold such worths, so that no model need run to ask it. Default: none, for it sees no queries, or more.
        """
        return {}

    def settings(self) -> dict[str, Any]:
        """What makes this policy again, as plain JSON: `type(policy)(**policy.settings())`."""
        return asdict(self)

    def check(self, fingerprint: Mapping[str, Any], layers: Sequence[int]) -> None:
        """ValueError if this policy cannot serve a model (`kvkeep.fingerprint`) whose layers `layers` are managed."""
        return

    def shard(self, index: int, count: int) -> "Policy":
        """What worker `index` of `count` needs, each of which has as many neighbouring KV heads of every layer.

        Default: all of it, for heads are alike.

        Raises:
            ValueError: where heads differ by more than a worker can know.
        """
        return self

    @property
    def look(self) -> Look | None:
        """The look-ahead it wants after a prompt that is over budget. Default: none."""
        return None

    def trust(
        self, likelihood: Float[Tensor, "B M"], entropy: Float[Tensor, "B M"], disagreement: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        """How much each of M sampled futures counts, up to a factor. Default: all the same.

        Args:
            likelihood: mean over its steps of log probability + entropy, in nats, which is 0 on average.
            entropy: mean entropy of the distributions it was drawn from, in nats.
            disagreement: 1 - cosine of its queries and other futures', mean over steps, layers and query heads.
        """
        return torch.ones_like(likelihood)

    def remember(self, seen: Observation) -> Observation:
        """What it must still know of a prompt once it has seen the futures. Default: everything."""
        return seen

    def streams(self, num_heads: int, group: int, head_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the fp32 arrays `[B, ...]` the cache carries per sequence for it (`slots.streams`)."""
        return {}

    def track(self, seen: Observation) -> None:
        """Update the side arrays after every forward, whether or not something must go. Default: nothing."""
        return

    def forget(self, seen: Observation) -> None:
        """Undo in `slots.streams` what `track` did for the new tokens, which are about to be taken back.

        They are the last slots, and nothing was evicted since they came. Default: nothing.
        """
        return

    def visible(self, seen: Observation, limits: Int[Tensor, " T"], budget: Budget) -> Bool[Tensor, "B H T N"] | None:
        """Which of all tokens so far each new one would still find; None where that cannot be told beforehand.

        With this a long text can be read in few forwards, and gives what evicting token by token would have given.

        Args:
            seen: everything so far, nothing evicted.
            limits: slots kept right before each new token.
            budget: sinks and recent tokens that are always kept.
        """
        return None

    def revise(self, worth: Float[Tensor, "B H W"], seen: Observation) -> Float[Tensor, "B H W"]:
        """What windows held as codes are worth after a forward (`seen.coded`): the mean of what their tokens would be.

        Default: what they were worth when they were last held in full precision.
        """
        return worth

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
