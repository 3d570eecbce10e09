"""LORE-KV: sample the future, keep what it reads.

B sequences, H KV heads, G query heads per KV head, N slots, M futures, D head size.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .base import Futures, Look, Observation, Policy
from .deletion import Asked, attention_mass, deletion_cost, own_loss, squared

OBJECTIVES = ("projected", "unprojected", "joint", "mass", "response")
# what likelihood, entropy and disagreement count (the paper's beta, gamma and lambda_D)
RELIABILITY = {"E": (1.0, 1.3, 0.0), "D": (1.0, 1.0, 0.3), "uniform": (0.0, 0.0, 0.0)}


@dataclass(frozen=True, kw_only=True)
class LoreKV(Policy):
    """LORE-KV (arXiv 2610.07643): what the output would lose with a token, for the last queries and sampled futures.

    After a prompt that is over budget, `futures` continuations of `steps` tokens are sampled from the model itself,
    at temperature 1. A token is worth the mean cost of losing it for the queries of the last `window` tokens, plus
    `weight` times that for the queries of the futures; neighbours go together in chunks. Not in the paper: `guard`, and
    that the budget holds in decoding too, where a new token is worth what its own query would lose with it.

    Attributes:
        futures: M; 0 judges by the window alone.
        steps: T, tokens of each future.
        window: last tokens of the prompt whose queries count.
        weight: lambda_L, weight of the futures against the window.
        chunk: neighbours that stay or go together.
        reliability: how futures are weighed: "E" by likelihood and entropy, "D" also by disagreement, or "uniform".
        objective: cost after the output projection ("projected"), before it ("unprojected"), of all query heads of a
            KV head together ("joint"), attention alone ("mass"), or projected for the futures alone ("response").
        guard: least worth of what others say too; 0 is the paper's. See `deletion_cost`.
        kept: `kvkeep.generate` reads the answer's first `steps` tokens under the full cache and evicts by their
            queries, in place of sampling; elsewhere the likeliest continuation is looked at and taken back.
        surplus: fewest tokens that must go for a look-ahead to be worth its time; fewer go by what the window says.
        seed: of the futures; the same prompt has the same ones in any batch.
        epsilon: added to one minus a chunk's attention.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries", "projection"})
    side: ClassVar[tuple[str, ...]] = ("lorekv",)

    futures: int = 4
    steps: int = 8
    window: int = 32
    weight: float = 1.0
    chunk: int = 4
    reliability: str = "E"
    objective: str = "projected"
    guard: float = 1.0
    kept: bool = False
    surplus: int = 32
    seed: int = 0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        least_of = {"futures": 0, "steps": 1, "window": 1, "weight": 0, "chunk": 1, "guard": 0, "surplus": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if self.reliability not in RELIABILITY:
            raise ValueError(f"unknown reliability {self.reliability!r}; choose one of {', '.join(RELIABILITY)}")

    @property
    def look(self) -> Look | None:
        if self.kept:
            return Look(1, self.steps, self.seed, greedy=True, keeps=True, surplus=self.surplus)
        return Look(self.futures, self.steps, self.seed, surplus=self.surplus) if self.futures else None

    def trust(
        self, likelihood: Float[Tensor, "B M"], entropy: Float[Tensor, "B M"], disagreement: Float[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        beta, gamma, delta = RELIABILITY[self.reliability]
        reliable = beta * likelihood - gamma * entropy - delta * _standardised(disagreement)
        return reliable.softmax(-1)

    def remember(self, seen: Observation) -> Observation:
        asked = self._window(seen)
        # a prompt's queries take more room than its keys and values
        return replace(seen, queries=asked.queries.clone(), query_positions=asked.positions, attention=None)

    def track(self, seen: Observation) -> None:
        if seen.held and self.look is not None:
            # one pass will do for the window, the futures, and what of them stays
            return
        with torch.autocast(seen.slots.keys.device.type, enabled=False):
            if seen.num_new == 1 and not seen.ahead:
                seen.put("lorekv", self._own(seen))
            else:
                self._judge(seen)

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return seen.slots.side("lorekv")

    def _judge(self, seen: Observation) -> None:
        """The worth of all tokens up to the newest query; what older queries found fades as the window moves on."""
        window, futures = self._window(seen), seen.futures
        fresh = window.weights.sum(1)[:, None, None]
        end = window.positions.amax(1)
        if futures is not None and self.objective == "response":
            fresh = torch.ones_like(fresh)
            window = _where_nothing_follows(window, futures)
        asked = window if futures is None else _joined(window, futures, end, self.weight)
        cost = self._cost(seen, asked, end)
        side, known = seen.slots.side("lorekv"), seen.slots.positions <= asked.positions.amax(1)[:, None, None]
        side.copy_(torch.where(known, side * (1 - fresh) + cost, side))

    def _cost(self, seen: Observation, asked: Asked, end: Int[Tensor, " B"]) -> Float[Tensor, "B H N"]:
        assert seen.scale is not None
        if self.objective == "mass":
            return attention_mass(seen.slots, asked, seen.scale, chunk=self.chunk)
        positions = seen.slots.positions
        return deletion_cost(
            seen.slots,
            asked,
            seen.scale,
            chunk=self.chunk,
            gram=self._gram(seen),
            guard=self.guard,
            reserve=(positions == 0) | (positions > (end - self.window)[:, None, None]),
            epsilon=self.epsilon,
        )

    def _own(self, seen: Observation) -> Float[Tensor, "B H 1"]:
        """What the newest token's own query would lose with it."""
        assert seen.queries is not None and seen.scale is not None
        share, lost = own_loss(seen.slots, seen.queries, seen.new_positions, seen.new_values, seen.scale, self.epsilon)
        return share.sum(2) if self.objective == "mass" else squared(lost, self._gram(seen)).sum(2)

    def _gram(self, seen: Observation) -> Tensor | None:
        if seen.projection is None or self.objective == "unprojected":
            return None
        joint = self.objective == "joint"
        dtype = torch.promote_types(seen.slots.keys.dtype, torch.float64 if joint else torch.float32)
        return seen.projection.gram(joint=joint, dtype=dtype)

    def _window(self, seen: Observation) -> Asked:
        """The last queries that are not padding, each with an equal part of what the window counts."""
        assert seen.queries is not None and seen.query_positions is not None
        # padding has position -1 and sorts before every token
        at, order = seen.query_positions.sort(dim=1, stable=True)
        at, order = at[:, -self.window :], order[:, -self.window :]
        rows = torch.arange(len(order), device=order.device)[:, None]
        queries = seen.queries.transpose(1, 2)[rows, order].transpose(1, 2)
        full = seen.lengths.clamp(max=self.window)[:, None]
        return Asked(queries, at, (at >= 0) / full)


def _where_nothing_follows(window: Asked, futures: Futures) -> Asked:
    """The window's queries, which count where no future was looked at; none of them if there is no such sequence."""
    followed = futures.weights.any(1, keepdim=True)
    if bool(followed.all()):
        return Asked(window.queries[:, :, :0], window.positions[:, :0], window.weights[:, :0])
    return window._replace(weights=torch.where(followed, 0, window.weights))


def _joined(window: Asked, futures: Futures, end: Int[Tensor, " B"], weight: float) -> Asked:
    """The window's queries, and those of the futures behind the prompt that ends at `end`."""
    at = end[:, None].expand_as(futures.weights) if futures.positions is None else futures.positions
    return Asked(
        torch.cat([window.queries, futures.queries], 2),
        torch.cat([window.positions, at], 1),
        torch.cat([window.weights, futures.weights * weight], 1),
    )


def _standardised(disagreement: Float[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """Distance from the mean over futures in standard deviations; 0 for fewer than three, and where all are alike."""
    deviation = disagreement.std(1, correction=0, keepdim=True)
    apart = disagreement - disagreement.mean(1, keepdim=True)
    some = (deviation > 1e-6) & (disagreement.shape[1] > 2)
    return torch.where(some, apart / deviation.clamp(min=1e-6), 0)
