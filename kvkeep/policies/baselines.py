"""The published baselines, each as its paper gives it unless its docstring says otherwise.

B sequences, H KV heads, G query heads per KV head, N slots, T new tokens, D head size.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from ..budget import Budget
from ..rotation import rotate, unrotate
from .base import Observation, Policy, hashed_uniform


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep tokens at random, the same ones in any chunking or batch. The floor every method must beat."""

    chunk_free: ClassVar[bool] = True

    seed: int = 0

    def shard(self, index: int, count: int) -> Policy:
        if count > 1:
            raise ValueError("random draws by the number of a head, which workers of tensor parallel do not know")
        return self

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return hashed_uniform(seen.slots.positions, self.seed + 1_000_003 * seen.layer)


@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """StreamingLLM (arXiv 2309.17453): sinks and the most recent tokens. Positions stay the true ones."""

    chunk_free: ClassVar[bool] = True

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.positions.float()

    def visible(self, seen: Observation, limits: Int[Tensor, " T"], budget: Budget) -> Bool[Tensor, "B H T N"]:
        assert seen.query_positions is not None
        at, held = seen.query_positions[:, None, :, None], seen.slots.positions[:, :, None]
        # right before the token at q the latest ones kept are those from q - (limit - sinks) on
        first = at - (limits.to(at) - budget.sinks)[:, None]
        return (held <= at) & ((held < budget.sinks) | (held >= first))


@dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """L2 norm of the key, smallest kept (arXiv 2406.11430)."""

    side: ClassVar[tuple[str, ...]] = ("knorm",)
    chunk_free: ClassVar[bool] = True

    def track(self, seen: Observation) -> None:
        seen.put("knorm", -seen.new_keys.float().norm(dim=-1))

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("knorm")


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """KeyDiff (arXiv 2504.15364): keep the keys least similar to the mean of the normalised keys."""

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        directions = normalize(seen.slots.keys.float(), dim=-1)
        held = seen.slots.occupied[..., None]
        anchor = directions.masked_fill(~held, 0).sum(2, keepdim=True)
        return -(directions * normalize(anchor, dim=-1)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """LagKV (arXiv 2504.04704): tokens that stand out when measured by the next partition's range of values.

    A partition of `lag` tokens is ranked once the partition after it is complete; tokens not ranked yet are worth
    more than any ranked one. Sinks are outside the partitions.
    """

    side: ClassVar[tuple[str, ...]] = ("lagkv",)

    lag: int = 128
    sinks: int = 4

    _UNRANKED: ClassVar[float] = 2.0

    def track(self, seen: Observation) -> None:
        seen.put("lagkv", torch.full_like(seen.new_positions, self._UNRANKED, dtype=torch.float32))
        before = seen.lengths - seen.num_new
        if bool((self._num_ranked(seen.lengths) > self._num_ranked(before)).any()):
            self._rank(seen)

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("lagkv")

    def _num_ranked(self, lengths: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        return ((lengths - self.sinks) // self.lag - 1).clamp(min=0)

    def _rank(self, seen: Observation) -> None:
        part = torch.div(seen.slots.positions - self.sinks, self.lag, rounding_mode="floor").long()
        ranked = self._num_ranked(seen.lengths)[:, None, None]
        side = seen.slots.side("lagkv")
        due = (part >= 0) & (part < ranked) & (side == self._UNRANKED)
        # sinks and empty slots go to a partition of their own, behind the others
        part = torch.where(part >= 0, part, part.amax() + 2)
        worth = sum(_lag_score(array.float(), part) for array in (seen.slots.keys, seen.slots.values))
        side.copy_(torch.where(due, _rank_within(worth, part), side))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Tova(Policy):
    """TOVA (arXiv 2401.06104): attention of the newest token.

    Here each KV head keeps tokens of its own, by the mean over its query heads; the paper averages all heads of a
    layer, which `share_heads=True` does.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})

    share_heads: bool = False

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        assert seen.attention is not None
        return self._of_heads(seen.attention.received(last=1))

    def revise(self, worth: Float[Tensor, "B H W"], seen: Observation) -> Float[Tensor, "B H W"]:
        assert seen.coded is not None
        return self._of_heads(seen.coded.received(last=1))

    def _of_heads(self, mass: Float[Tensor, "B H N"]) -> Float[Tensor, "B H N"]:
        return mass.mean(1, keepdim=True).expand_as(mass) if self.share_heads else mass


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """H2O (arXiv 2306.14048): attention summed over all queries so far.

    Attributes:
        decay: what the sum is multiplied by at each token; 1 is the paper's.
        norm: attention of each query is raised to it before it is summed; 1 is the paper's.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    side: ClassVar[tuple[str, ...]] = ("h2o",)

    decay: float = 1.0
    norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1 or not self.norm > 0:
            raise ValueError(f"decay must lie in (0, 1] and norm be positive, got {self.decay} and {self.norm}")

    def track(self, seen: Observation) -> None:
        assert seen.attention is not None
        side = seen.slots.side("h2o")
        if self.decay < 1:
            side.mul_(self._fade(seen))
        side.add_(seen.attention.received(power=self.norm, decay=self.decay))

    def revise(self, worth: Float[Tensor, "B H W"], seen: Observation) -> Float[Tensor, "B H W"]:
        assert seen.coded is not None
        return worth * self._fade(seen) + seen.coded.received(power=self.norm, decay=self.decay)

    def _fade(self, seen: Observation) -> Float[Tensor, "B 1 1"]:
        assert seen.query_positions is not None
        fresh = (seen.query_positions >= 0).sum(1)[:, None, None]
        return torch.full_like(fresh, self.decay, dtype=torch.float32) ** fresh

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("h2o")


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """SnapKV (arXiv 2404.14469): attention of the last `window` tokens, max-pooled over neighbours.

    The paper evicts once, after the prompt, and always keeps the window. Here the budget protects its own recent
    window, 16 tokens unless told otherwise, and what else of the window stays is decided by worth. In decoding the
    window mean is carried on as a moving average of the same length, without pooling.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    side: ClassVar[tuple[str, ...]] = ("snapkv",)

    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window must be positive and kernel odd, got {self.window} and {self.kernel}")

    def track(self, seen: Observation) -> None:
        assert seen.attention is not None
        mass = seen.attention.received(last=self.window) / self.window
        if seen.num_new > 1:
            mass = self._pooled(mass, seen.slots.positions)
        seen.slots.side("snapkv").mul_(1 - self._fresh(seen) / self.window).add_(mass)

    def revise(self, worth: Float[Tensor, "B H W"], seen: Observation) -> Float[Tensor, "B H W"]:
        assert seen.coded is not None
        return worth * (1 - self._fresh(seen) / self.window) + seen.coded.received(last=self.window) / self.window

    def _fresh(self, seen: Observation) -> int | Int[Tensor, "B 1 1"]:
        """New queries that the window holds."""
        assert seen.query_positions is not None
        if seen.num_new == 1:
            return 1
        # padding looked at nothing, so it moves no average
        return (seen.query_positions >= 0).sum(1).clamp(max=self.window)[:, None, None]

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("snapkv")

    def _pooled(self, mass: Float[Tensor, "B H N"], positions: Int[Tensor, "B H N"]) -> Float[Tensor, "B H N"]:
        """The largest mass among the tokens held next to each, before and after it; empty slots lie between none."""
        order = positions.argsort(dim=-1, stable=True)
        pooled = max_pool1d(mass.gather(-1, order), self.kernel, stride=1, padding=self.kernel // 2)
        return torch.empty_like(mass).scatter_(-1, order, pooled)


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """PyramidKV (arXiv 2406.02069): SnapKV's worth, with more slots in lower layers and fewer in upper ones."""

    schedule: ClassVar[str] = "pyramid"


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Expected Attention (arXiv 2510.00636): attention expected from the next `horizon` queries, times value norm.

    Queries before rotation are taken as Gaussian with the mean and covariance seen in the prompt, and rotated to
    the average future position. In decoding a new token is judged by the same Gaussian with its covariance's
    diagonal; older tokens keep their worth.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries", "rotary"})
    side: ClassVar[tuple[str, ...]] = ("expected",)

    horizon: int = 512
    sinks: int = 4
    epsilon: float = 0.0

    def streams(self, num_heads: int, group: int, head_size: int) -> dict[str, tuple[int, ...]]:
        heads = num_heads * group
        return {"mean": (heads, head_size), "variance": (heads, head_size), "normaliser": (heads, 1)}

    def track(self, seen: Observation) -> None:
        if seen.num_new > 1:
            seen.slots.side("expected").copy_(self._judge_all(seen))
        else:
            seen.put("expected", self._judge_new(seen))

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("expected")

    def _judge_all(self, seen: Observation) -> Float[Tensor, "B H N"]:
        mean, covariance = self._future_queries(seen)
        slots = seen.slots
        B, H, _, D = slots.keys.shape
        keys = slots.keys.float()[:, :, None]
        mean, covariance = mean.view(B, H, -1, 1, D), covariance.view(B, H, -1, D, D)
        logits = _expected_logits((keys * mean).sum(-1), ((keys @ covariance) * keys).sum(-1), seen)
        # sinks would take nearly all of it: they are kept, and the others share the attention among themselves
        sinks = slots.positions < self._num_sinks(seen)[:, None]
        logits = logits.masked_fill((sinks | ~slots.occupied)[:, :, None], -torch.inf)
        normaliser = logits.logsumexp(-1, keepdim=True)
        slots.streams["mean"].copy_(mean.reshape(B, -1, D))
        slots.streams["variance"].copy_(covariance.diagonal(dim1=-2, dim2=-1).reshape(B, -1, D))
        slots.streams["normaliser"].copy_(normaliser.reshape(B, -1, 1))
        expected = (logits - normaliser).exp().mean(2)
        worth = (expected + self.epsilon) * slots.values.float().norm(dim=-1)
        return torch.where(sinks, worth.amax(-1, keepdim=True) + 1, worth)

    def _judge_new(self, seen: Observation) -> Float[Tensor, "B H 1"]:
        keys = seen.new_keys.float()
        B, H = keys.shape[:2]
        streams = {name: stream.view(B, H, -1, stream.shape[-1]) for name, stream in seen.slots.streams.items()}
        logits = _expected_logits((keys * streams["mean"]).sum(-1), (keys**2 * streams["variance"]).sum(-1), seen)
        expected = (logits - streams["normaliser"][..., 0]).exp().mean(-1, keepdim=True)
        return (expected + self.epsilon) * seen.new_values.float().norm(dim=-1)

    def _num_sinks(self, seen: Observation) -> Int[Tensor, "B 1"]:
        # a prompt of sinks alone has nothing else
        return torch.where(seen.lengths > self.sinks, self.sinks, 0)[:, None]

    def _future_queries(self, seen: Observation) -> tuple[Float[Tensor, "B HG D"], Float[Tensor, "B HG D D"]]:
        """Mean and covariance of the queries, rotated to the average of the next `horizon` positions."""
        assert seen.queries is not None and seen.query_positions is not None and seen.rotary is not None
        at = seen.query_positions.long()
        cos, sin = (table[:, None] for table in seen.rotary(at.clamp(min=0)))
        plain = unrotate(seen.queries.float(), cos, sin)
        # sinks are no typical queries
        counted = at >= self._num_sinks(seen)
        weight = counted[:, None, :, None] / counted.sum(1)[:, None, None, None].clamp(min=1)
        mean = (plain * weight).sum(2)
        centred = plain - mean[:, :, None]
        covariance = (centred * weight).mT @ centred
        ahead = seen.lengths.long()[:, None] + torch.arange(self.horizon, device=at.device)
        cos, sin = (table.mean(1)[:, None, None] for table in seen.rotary(ahead))
        turned = rotate(rotate(covariance, cos, sin).mT, cos, sin)
        return rotate(mean[:, :, None], cos, sin)[:, :, 0], turned


@dataclass(frozen=True, kw_only=True)
class Oracle(Policy):
    """The attention the supplied future really pays: what no method can know. See `kvkeep.prefill(future=)`.

    Tokens read after that future was supplied are not in it; each counts as read once.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries", "future"})
    side: ClassVar[tuple[str, ...]] = ("oracle",)

    def track(self, seen: Observation) -> None:
        assert seen.attention is not None
        if seen.ahead:
            seen.slots.side("oracle").copy_(seen.attention.received())
        else:
            seen.put("oracle", torch.ones_like(seen.new_positions, dtype=torch.float32))

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("oracle")


def _expected_logits(product: Tensor, spread: Tensor, seen: Observation) -> Tensor:
    """Log of the mean of exp(scale * q . k) over Gaussian q, from mean . k and k . covariance . k."""
    assert seen.scale is not None
    return product * seen.scale + spread * (seen.scale**2 / 2)


def _lag_score(array: Float[Tensor, "B H N D"], part: Int[Tensor, "B H N"]) -> Float[Tensor, "B H N"]:
    """Softmax within each partition of the spread over D, after scaling by the next partition's range."""
    B, H, _, D = array.shape
    num_parts = int(part.max()) + 2
    shape, index = (B, H, num_parts, D), part[..., None].expand_as(array)
    low = array.new_full(shape, torch.inf).scatter_reduce(2, index, array, "amin")
    high = array.new_full(shape, -torch.inf).scatter_reduce(2, index, array, "amax")
    scaled = (array - low.gather(2, index + 1)) / (high - low).gather(2, index + 1).clamp(min=1e-6)
    spread = scaled.std(-1)
    peak = spread.new_full((B, H, num_parts), -torch.inf).scatter_reduce(2, part, spread, "amax")
    weight = (spread - peak.gather(2, part)).exp()
    total = weight.new_zeros(B, H, num_parts).scatter_add(2, part, weight)
    return weight / total.gather(2, part)


def _rank_within(worth: Float[Tensor, "B H N"], part: Int[Tensor, "B H N"]) -> Float[Tensor, "B H N"]:
    """Rank of each slot within its partition, from 0 (least) to below 1."""
    # of equal worths the newest is ranked highest
    order = worth.argsort(dim=-1, stable=True)
    order = order.gather(-1, part.gather(-1, order).argsort(dim=-1, stable=True))
    sizes = part.new_zeros(*part.shape[:2], int(part.max()) + 1).scatter_add(-1, part, torch.ones_like(part))
    starts = sizes.cumsum(-1) - sizes
    place = torch.arange(part.shape[-1], device=part.device).expand_as(part)
    ranks = torch.zeros_like(part).scatter(-1, order, place) - starts.gather(-1, part)
    # a worth that is no number must not turn into a rank
    return (ranks / sizes.gather(-1, part)).masked_fill(worth.isnan(), torch.nan)
