"""The running top-k, found at once, is that of a heap, of sorting at every step, and of a mask.

A heads, n tokens, m tokens that enter the pool.
"""

import heapq

import pytest
import torch
from torch import Tensor

from kvkeep.pool import Window, cutoffs, hold, newcomers, ranks, static_priority


def priorities(seed: int) -> tuple[Tensor, int]:
    """Priorities of two heads, with many ties in half of the instances, and a size for the pool."""
    generator = torch.Generator().manual_seed(seed)
    m, size = torch.randint(1, 40, (2,), generator=generator).tolist()
    if seed % 2:
        return torch.randint(0, 4, (2, m), generator=generator).float(), size
    return torch.randn(2, m, generator=generator), size


def by_heap(priority: list[float], size: int) -> list[set[int]]:
    """Tokens held after each one came, of equal ones the newest."""
    heap, held = [], []
    for token, worth in enumerate(priority):
        heapq.heappush(heap, (worth, token))
        if len(heap) > size:
            heapq.heappop(heap)
        held.append({token for _, token in heap})
    return held


def by_sorting(priority: list[float], size: int) -> list[set[int]]:
    order = lambda token: (priority[token], token)  # noqa: E731
    return [set(sorted(range(stop), key=order)[-size:]) for stop in range(1, len(priority) + 1)]


@pytest.mark.parametrize("part", range(4))
def test_cutoffs_sorting_and_a_heap_hold_the_same_tokens(part):
    for seed in range(250 * part, 250 * part + 250):
        priority, size = priorities(seed)
        ranked = ranks(priority)
        last = cutoffs(ranked, size)
        for head in range(2):
            held = [{t for t in range(i + 1) if ranked[head, t] <= last[head, i]} for i in range(priority.shape[1])]
            numbers = priority[head].tolist()
            assert held == by_heap(numbers, size) == by_sorting(numbers, size)


def test_a_large_pool_of_many_tokens():
    priority = torch.randn(3, 3000)
    last, ranked = cutoffs(ranks(priority), 700), ranks(priority)
    for at in (699, 700, 1234, 2999):
        assert torch.equal(last[:, at], ranked[:, : at + 1].sort(-1).values[:, 699])


@pytest.mark.parametrize(("sinks", "recent", "size"), [(2, 3, 4), (0, 1, 1), (4, 6, 50), (1, 0, 3), (3, 5, 0)])
def test_the_mask_shows_what_was_held_before_each_query(sinks, recent, size):
    n = 30
    priority = torch.randint(0, 6, (2, n), generator=torch.Generator().manual_seed(0)).float()
    held = hold(priority, Window(sinks, recent), size)
    seen = held.visible(torch.arange(n))
    for head in range(2):
        for query in range(n):
            entered = range(sinks, max(sinks, query - recent))
            pool = sorted(entered, key=lambda t: (priority[head, t], t))[-size:] if size else []
            expected = {t for t in range(query + 1) if t < sinks or t >= query - recent} | set(pool)
            assert set(seen[head, query].nonzero()[:, 0].tolist()) == expected
    some = torch.tensor([28, 3, 17])
    assert torch.equal(held.visible(some), seen[:, some])


def test_decayed_scores_rank_at_any_time_as_static_priorities_do():
    scores, positions = torch.randn(2, 50).double(), torch.arange(50)
    log_decay = torch.tensor([[-0.05], [-0.001]]).double()
    priority = static_priority(scores, positions, log_decay)
    for now in (50, 500, 20_000):
        assert torch.equal((scores + (now - positions) * log_decay).argsort(-1), priority.argsort(-1))


def test_newcomers_are_kept_or_not_and_name_who_was_last():
    worth = torch.tensor([[5.0, 1.0, 3.0, 4.0, 0.0, 3.0]])
    found = newcomers(worth, 2)
    assert found.kept.tolist() == [[True, True, True, True, False, False]]
    # 5; 5 1; 5 3; 5 4; 5 4; 5 4
    assert found.boundary.tolist() == [[0, 1, 2, 3, 3, 3]]
