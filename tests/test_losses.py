"""Rankings, their costs and their gradients, against all permutations of a few tokens.

A agents, n tokens, K sampled rankings.
"""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from kvkeep.losses import (
    best_cost,
    draw_orders,
    expected_cost,
    expected_cost_ratio,
    log_probability,
    ranking_cost,
    reward,
    sampled_loss,
)


def case(A: int = 3, n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores and importances of A agents, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(A, n, generator=generator, dtype=torch.float64)
    return scores.requires_grad_(), torch.rand(A, n, generator=generator, dtype=torch.float64)


def every_order(n: int, A: int = 1) -> Tensor:
    return torch.tensor(list(permutations(range(n))))[:, None].expand(-1, A, -1)


def cost_by_budgets(importance: list[float], order: list[int]) -> float:
    """What budgets of 1 .. n - 1 tokens evict, added up."""
    return sum(importance[i] for budget in range(1, len(order)) for i in order[budget:])


def probability(scores: list[float], order: list[int]) -> float:
    """Plackett-Luce, one place after the other."""
    weights, product = torch.tensor(scores, dtype=torch.float64).exp().tolist(), 1.0
    for place, token in enumerate(order):
        product *= weights[token] / sum(weights[i] for i in order[place:])
    return product


def gradient(loss: Tensor, scores: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), scores)[0]


# costs


def test_the_cost_of_a_ranking_is_what_all_budgets_evict_added_up():
    _, importance = case(A=1, n=6)
    orders = every_order(6)
    costs = ranking_cost(importance.expand(orders.shape), orders)
    expected = [cost_by_budgets(importance[0].tolist(), order) for order in orders[:, 0].tolist()]
    assert costs[:, 0].tolist() == pytest.approx(expected)


def test_no_ranking_costs_less_than_the_one_by_importance():
    _, importance = case(A=1, n=6)
    orders = every_order(6)
    assert ranking_cost(importance.expand(orders.shape), orders).min() == pytest.approx(best_cost(importance).item())


def test_the_reward_is_minus_one_for_the_best_ranking_and_below_for_all_others():
    _, importance = case(A=1, n=5)
    rewards = reward(importance, every_order(5))[:, 0].sort(descending=True).values
    assert rewards[0] == -1
    assert (rewards[1:] < -1).all()


@pytest.mark.parametrize("importance", ([0.0] * 5, [0, 0, 7.0, 0, 0]))
def test_a_head_that_needs_at_most_one_token_has_a_finite_reward_and_loss(importance):
    importance, scores = torch.tensor([importance]), torch.zeros(1, 5, requires_grad=True)
    rewards = reward(importance, every_order(5))
    assert rewards.isfinite().all() and (rewards <= -1).all()
    assert gradient(expected_cost_ratio(scores, importance), scores).isfinite().all()


def test_the_scale_of_importance_changes_no_reward_and_no_ratio():
    scores, importance = case()
    orders = draw_orders(scores, 4, torch.Generator().manual_seed(0))
    assert torch.allclose(reward(importance * 1e-6, orders), reward(importance, orders))
    assert torch.allclose(expected_cost_ratio(scores, importance * 1e3), expected_cost_ratio(scores, importance))


# rankings


def test_the_probability_of_a_ranking_is_a_product_over_places_and_all_add_up_to_one():
    scores, _ = case(A=1, n=5)
    orders = every_order(5)
    likelihood = log_probability(scores, orders)[:, 0]
    expected = [probability(scores[0].tolist(), order) for order in orders[:, 0].tolist()]
    assert likelihood.exp().tolist() == pytest.approx(expected)
    assert likelihood.exp().sum().item() == pytest.approx(1)


def test_rankings_are_drawn_as_often_as_their_probability_says():
    scores = torch.tensor([[0.3, -1.0, 1.2]])
    drawn = draw_orders(scores, 60_000, torch.Generator().manual_seed(0))[:, 0].tolist()
    for order in permutations(range(3)):
        p = probability(scores[0].tolist(), list(order))
        # four standard errors
        assert abs(drawn.count(list(order)) / 60_000 - p) < 4 * (p * (1 - p) / 60_000) ** 0.5


def test_one_token_stands_before_another_with_the_sigmoid_of_their_difference():
    scores, _ = case(A=1, n=5)
    orders = every_order(5)
    weights = log_probability(scores, orders)[:, 0].exp()
    place = orders[:, 0].argsort(-1)
    for i, j in permutations(range(5), 2):
        before = weights[place[:, j] < place[:, i]].sum()
        assert before.item() == pytest.approx((scores[0, j] - scores[0, i]).sigmoid().item())


def test_far_apart_scores_and_a_seed_give_one_ranking():
    scores = torch.tensor([[0.0, 1e4, -1e4, 5e3]])
    orders = draw_orders(scores, 50, torch.Generator().manual_seed(0))
    assert (orders == torch.tensor([1, 3, 0, 2])).all()
    assert log_probability(scores, orders).abs().max() < 1e-6
    close = torch.zeros(2, 40)
    one, same, other = (draw_orders(close, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


# the exact objective


@pytest.mark.parametrize("n", (2, 3, 4, 5, 6))
def test_the_expected_cost_is_the_mean_over_all_permutations(n):
    scores, importance = case(A=2, n=n)
    orders = every_order(n, 2)
    weights = log_probability(scores, orders).exp()
    mean = (weights * ranking_cost(importance.expand(orders.shape), orders)).sum(0)
    got = expected_cost(scores, importance)
    assert torch.allclose(got, mean)
    assert torch.allclose(gradient(got, scores), gradient(mean, scores))


def test_random_subsets_give_the_expected_cost_and_its_gradient_on_average():
    scores, importance = case(A=1, n=6)
    # every subset of size 2 as often
    subsets = [torch.tensor([i, j]) for i in range(6) for j in range(6) if i != j]
    costs = torch.stack([expected_cost(scores, importance, subset) for subset in subsets])
    exact = expected_cost(scores, importance)
    assert torch.allclose(costs.mean(0), exact)
    assert torch.allclose(gradient(costs.mean(0), scores), gradient(exact, scores))


def test_tiles_of_agents_change_nothing(monkeypatch):
    scores, importance = case(A=7, n=9)
    whole = expected_cost(scores, importance)
    monkeypatch.setattr("kvkeep.losses._TILE", 170)
    parts = expected_cost(scores, importance)
    assert torch.equal(whole, parts) and torch.equal(gradient(whole, scores), gradient(parts, scores))


def test_a_constant_added_to_all_scores_changes_nothing():
    scores, importance = case()
    orders = draw_orders(scores, 3, torch.Generator().manual_seed(0))
    assert torch.allclose(log_probability(scores + 5, orders), log_probability(scores, orders))
    assert torch.allclose(expected_cost(scores + 5, importance), expected_cost(scores, importance))
    assert gradient(expected_cost(scores, importance), scores).sum(-1).abs().max() < 1e-12


def test_the_order_of_tokens_and_of_agents_does_not_matter():
    scores, importance = case(A=3, n=8)
    tokens, agents = torch.randperm(8), torch.tensor([2, 0, 1])
    moved = expected_cost(scores[agents][:, tokens], importance[agents][:, tokens])
    assert torch.allclose(moved, expected_cost(scores, importance)[agents])


# the policy gradient


def test_sampled_gradients_average_to_the_exact_gradient():
    scores, importance = case(A=2, n=6)
    exact = gradient(expected_cost_ratio(scores, importance), scores)
    generator, gradients = torch.Generator().manual_seed(0), []
    for _ in range(1500):
        orders = draw_orders(scores, 4, generator)
        gradients.append(gradient(sampled_loss(scores, importance, orders, scale=False).loss, scores))
    mean, deviation = torch.stack(gradients).mean(0), torch.stack(gradients).std(0)
    # twelve numbers: four standard errors
    assert ((mean - exact).abs() < 4 * deviation / 1500**0.5).all()


def test_the_scaled_gradient_points_the_exact_ones_way():
    scores, importance = case(A=1, n=12)
    exact = gradient(expected_cost_ratio(scores, importance), scores)
    orders = draw_orders(scores, 4000, torch.Generator().manual_seed(0))
    sampled = gradient(sampled_loss(scores, importance, orders).loss, scores)
    assert torch.cosine_similarity(sampled, exact).item() > 0.95


def test_equal_rewards_teach_nothing():
    scores, importance = case(A=1, n=5)
    orders = torch.arange(5).expand(4, 1, 5)
    assert gradient(sampled_loss(scores, importance, orders).loss, scores).abs().max() == 0


def test_one_draw_is_refused_since_it_has_no_baseline():
    scores, importance = case(A=1, n=5)
    with pytest.raises(ValueError, match="at least 2 draws, got 1"):
        sampled_loss(scores, importance, torch.arange(5).expand(1, 1, 5))
