"""What a ranking costs, and two ways to learn one: a policy gradient over sampled rankings, and its exact mean.

And what a running top-k costs that keeps and drops others than it should, one pair of tokens at a time.

A agents (one per KV head of each layer), n ranked tokens, K sampled rankings, m tokens compared with or in a pool, P
pairs.

Each agent scores its tokens. Plackett-Luce turns scores into a random ranking: the next place goes to token i with
probability proportional to exp(score_i) among those still without a place. Source: arXiv 2602.10238; the exact twin
is ours.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

# rewards below are as bad as this one (released code of the paper)
WORST_REWARD = -200.0
LARGEST_ADVANTAGE = 2.0

# a best ranking that leaves less than this share of the importance behind counts as leaving this much
_LEAST_COST = 1e-6
# numbers of one tile of comparisons; below the size from which an allocator asks the system for fresh pages
_TILE = 4_000_000


def ranking_cost(importance: Float[Tensor, "*A n"], order: Int[Tensor, "*A n"]) -> Float[Tensor, "*A"]:
    """Importance evicted by a ranking, summed over all budgets 1 .. n - 1: sum of (place - 1) * importance.

    Args:
        importance: of each token, not negative.
        order: tokens from the one kept longest to the one evicted first.
    """
    places = torch.arange(order.shape[-1], dtype=importance.dtype, device=importance.device)
    return importance.gather(-1, order) @ places


def best_cost(importance: Float[Tensor, "*A n"]) -> Float[Tensor, "*A"]:
    """Cost of the ranking by importance itself, which no other undercuts."""
    return ranking_cost(importance, importance.argsort(dim=-1, descending=True))


def reward(importance: Float[Tensor, "A n"], order: Int[Tensor, "*K A n"]) -> Float[Tensor, "*K A"]:
    """Minus the cost relative to the best ranking's: -1 is the best there is."""
    cost = ranking_cost(importance.expand(order.shape), order)
    least = _LEAST_COST * importance.sum(-1)
    return -_at_least(cost, least) / _at_least(best_cost(importance), least)


def draw_orders(scores: Float[Tensor, "A n"], num_draws: int, generator: torch.Generator) -> Int[Tensor, "K A n"]:
    """K rankings of each agent from its Plackett-Luce distribution: sort by score plus Gumbel noise."""
    shape = (num_draws, *scores.shape)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device)
    # rand may return 0, whose noise would be infinite
    exponential = -uniform.clamp(min=torch.finfo(torch.float32).tiny).log()
    return (scores.detach() - exponential.to(scores.device).log()).argsort(dim=-1, descending=True)


def log_probability(scores: Float[Tensor, "A n"], orders: Int[Tensor, "*K A n"]) -> Float[Tensor, "*K A"]:
    """Log-probability of rankings under Plackett-Luce: over places, score - logsumexp(scores from here on), summed."""
    drawn = scores.expand(orders.shape).gather(-1, orders)
    remaining = drawn.flip(-1).logcumsumexp(-1).flip(-1)
    return (drawn - remaining).sum(-1)


class Sampled(NamedTuple):
    """Loss of each agent, and the rewards it comes from."""

    loss: Float[Tensor, " A"]
    rewards: Float[Tensor, "K A"]


def sampled_loss(
    scores: Float[Tensor, "A n"], importance: Float[Tensor, "A n"], orders: Int[Tensor, "K A n"], *, scale: bool = True
) -> Sampled:
    """REINFORCE with a leave-one-out baseline over the K rankings of one prompt.

    Args:
        orders: rankings drawn from these scores.
        scale: the paper's form: advantages divided by their standard deviation and clipped, log-probabilities
            averaged over places. Without it the expected gradient is exactly that of `expected_cost_ratio`.

    Raises:
        ValueError: for fewer than two rankings, which leave no baseline.
    """
    num_draws, _, n = orders.shape
    if num_draws < 2:
        raise ValueError(f"a leave-one-out baseline needs at least 2 draws, got {num_draws}")
    rewards = reward(importance, orders)
    floored = rewards.clamp(min=WORST_REWARD) if scale else rewards
    advantages = (floored - floored.mean(0)) * (num_draws / (num_draws - 1))
    likelihood = log_probability(scores, orders)
    if scale:
        advantages = advantages / advantages.std(0).clamp(min=1e-8)
        advantages = advantages.clamp(-LARGEST_ADVANTAGE, LARGEST_ADVANTAGE)
        likelihood = likelihood / n
    return Sampled(-(advantages * likelihood).mean(0), rewards)


def expected_cost(
    scores: Float[Tensor, "A n"], importance: Float[Tensor, "A n"], against: Int[Tensor, " m"] | None = None
) -> Float[Tensor, " A"]:
    """Expected cost of a Plackett-Luce ranking, without drawing one: sum_i I_i sum_{j != i} sigmoid(f_j - f_i).

    Token j stands before token i with probability sigmoid(f_j - f_i), so the inner sum is i's expected place.

    Args:
        against: distinct tokens j to compare with; drawn uniformly, they give an unbiased estimate in O(n m). None
            compares with all of them.
    """
    n = scores.shape[-1]
    others = torch.arange(n, device=scores.device) if against is None else against
    return _PairCost.apply(scores, importance, others) * (n / len(others))


def expected_cost_ratio(
    scores: Float[Tensor, "A n"], importance: Float[Tensor, "A n"], against: Int[Tensor, " m"] | None = None
) -> Float[Tensor, " A"]:
    """`expected_cost` relative to the best ranking's cost: minus the expected reward, so 1 is the best there is."""
    least = _LEAST_COST * importance.sum(-1)
    return expected_cost(scores, importance, against) / _at_least(best_cost(importance), least)


class _PairCost(torch.autograd.Function):
    """The sum over i and j of I_i sigmoid(f_j - f_i), i != j, with its gradient, in tiles of agents.

    Both come from the same sigmoids, so they are worked out together and nothing of size n x m is kept.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, scores: Tensor, importance: Tensor, others: Tensor) -> Tensor:
        agents = max(1, _TILE // (scores.shape[-1] * len(others)))
        tiles = zip(scores.split(agents), importance.split(agents), strict=True)
        costs, slopes = zip(*(_pair_cost(*tile, others) for tile in tiles), strict=True)
        ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(costs)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return upstream[0][:, None] * slopes, None, None


def _pair_cost(scores: Tensor, importance: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Cost of each agent and its gradient in the scores."""
    ahead = (scores[:, None, others] - scores[:, :, None]).sigmoid_()
    # a token does not stand before itself
    ahead[:, others, torch.arange(len(others), device=others.device)] = 0
    cost = (ahead.sum(-1) * importance).sum(-1)
    weighted = ahead.addcmul_(ahead, ahead, value=-1).mul_(importance[..., None])
    return cost, (-weighted.sum(-1)).index_add_(1, others, weighted.sum(1))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """How much each pair at the cutoff counts (arXiv 2607.05061; what the paper does not say is ours).

    Attributes:
        temperature: nats of score by which a decision softens.
        least_weight: of a pair that hardly matters; one that matters much weighs 1.
        margin: nats of target between two tokens that begin to matter.
        balance: largest factor by which the rarer of keeping and dropping counts more, and least inverse.
    """

    temperature: float = 1.0
    least_weight: float = 0.1
    margin: float = 1.0
    balance: float = 4.0

    def __post_init__(self) -> None:
        if min(self.temperature, self.margin) <= 0 or not 0 <= self.least_weight <= 1 or self.balance < 1:
            raise ValueError(f"temperature and margin are above 0, least_weight in [0, 1], balance from 1: {self}")


def boundary_loss(
    priority: Float[Tensor, "A m"],
    worth: Float[Tensor, "A m"],
    kept: Bool[Tensor, "A P"],
    newcomer: Int[Tensor, "A P"],
    boundary: Int[Tensor, "A P"],
    pairs: Pairs,
) -> Float[Tensor, " A"]:
    """Mean over pairs of softplus(-y (priority of the newcomer - that of the boundary) / temperature), weighted.

    Args:
        priority: static priorities as they are learned; their differences are those of effective scores at any time.
        worth: the target that the teacher ranks by.
        kept: whether the teacher keeps the newcomer (y = 1), or not (y = -1).
        newcomer, boundary: places of the tokens of each pair.
    """
    sign = torch.where(kept, 1.0, -1.0)
    ahead = sign * (priority.gather(1, newcomer) - priority.gather(1, boundary))
    gap = (sign * (worth.gather(1, newcomer) - worth.gather(1, boundary))).clamp(min=0)
    share = kept.float().mean(1, keepdim=True)
    balance = 0.5 / torch.where(kept, share, 1 - share)
    weight = pairs.least_weight + (1 - pairs.least_weight) * (gap / pairs.margin).sigmoid()
    weight = weight * balance.clamp(1 / pairs.balance, pairs.balance)
    return (weight * softplus(-ahead / pairs.temperature)).sum(1) / weight.sum(1)


def _at_least(cost: Tensor, least: Tensor) -> Tensor:
    # nothing is ever divided by zero, and equal costs still give 1
    return torch.maximum(cost, least.clamp(min=torch.finfo(cost.dtype).tiny))
