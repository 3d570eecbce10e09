"""Future importance equals the dense twin in every tiling, and never builds a map over all queries and keys.

B sequences, H KV heads, G query heads per KV head, T queries, S keys, D head size.
"""

import pytest
import torch
from test_attention import Largest
from torch import Tensor

from kvkeep import future
from kvkeep.attention import AttentionMass, reference
from kvkeep.future import future_importance

B, H, D = 2, 2, 8
SCALE = 0.4


def draw(T: int, S: int, G: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the last T of S tokens, the keys, and the queries' positions."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(B, H, *shape, D, generator=generator) * 2 for shape in ((G, T), (S,)))
    return queries, keys, torch.arange(S - T, S).expand(B, T)


def check(queries: Tensor, keys: Tensor, at: Tensor, **window: int | None) -> None:
    got = future_importance(queries.flatten(1, 2), keys, at, SCALE, **window)
    for name, mine, twin in zip(
        got._fields, got, reference.future_importance(queries, keys, at, SCALE, **window), strict=True
    ):
        torch.testing.assert_close(mine, twin, atol=1e-5, rtol=1e-5, msg=name)


@pytest.fixture(params=[(2**20, 2**14), (64, 5), (24, 16), (1, 1)], ids=["whole", "small", "narrow", "single"])
def tiles(request, monkeypatch) -> None:
    """Tiles of all sizes: logits in a tile, and keys."""
    monkeypatch.setattr(future, "_TILE_LOGITS", request.param[0])
    monkeypatch.setattr(future, "_TILE_KEYS", request.param[1])


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize(("T", "S"), [(0, 5), (1, 1), (1, 17), (17, 17), (16, 33), (33, 63)])
def test_importance_equals_the_dense_twin(tiles, T, S, G):
    check(*draw(T, S, G))


@pytest.mark.parametrize(("delay", "horizon"), [(0, 1), (1, None), (4, None), (0, 7), (3, 9), (40, None), (0, 500)])
def test_delay_and_horizon_count_the_pairs_between_them(tiles, delay, horizon):
    check(*draw(21, 33, 2), delay=delay, horizon=horizon)


@pytest.mark.parametrize("window", [{}, {"delay": 2, "horizon": 6}])
def test_rows_of_other_lengths_count_their_tokens_alone(tiles, window):
    queries, keys, at = draw(9, 20, 2)
    at = at.clone()
    # the second row ends earlier, then the whole row is padding
    at[1] = torch.cat([torch.arange(4, 9), torch.full((4,), -1)])
    check(queries, keys, at, **window)
    at[1] = -1
    check(queries, keys, at, **window)
    assert bool((future_importance(queries.flatten(1, 2), keys, at, SCALE, **window).max[1] == 0).all())


def test_a_first_position_stands_for_queries_in_a_row(tiles):
    queries, keys, at = draw(6, 20, 2)
    by_first = future_importance(queries.flatten(1, 2), keys, 14, SCALE)
    assert all(map(torch.equal, by_first, future_importance(queries.flatten(1, 2), keys, at, SCALE)))


def test_importance_of_equal_keys_by_hand():
    # query j shares its attention equally among j + 1 keys: 1/3 from the third token and 1/4 from the fourth
    importance = future_importance(torch.randn(1, 2, 2, D), torch.ones(1, 1, 4, D), 2, SCALE)
    expected = torch.tensor([[[7 / 12, 7 / 12, 7 / 12, 1 / 4]]])
    torch.testing.assert_close(importance.max, expected)
    torch.testing.assert_close(importance.mean, expected)
    squared = 1 / 9 + 1 / 16
    torch.testing.assert_close(importance.square, torch.tensor([[[squared, squared, squared, 1 / 16]]]))


def test_the_largest_head_is_taken_for_each_query_before_the_sum():
    # two query heads that look hard at one key each: at another for every query
    far = 100 * torch.eye(D)
    keys = far[None, None, :4]
    queries = torch.stack([far[[0, 1]], far[[1, 0]]])[None]
    importance = future_importance(queries, keys, 2, 1.0)
    torch.testing.assert_close(importance.max, torch.tensor([[[2.0, 2.0, 0.0, 0.0]]]))
    torch.testing.assert_close(importance.mean, torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]))


def test_the_mean_is_the_mass_that_the_engine_measures():
    queries, keys, at = draw(12, 40, 3)
    slots = torch.arange(40, dtype=torch.int32).expand(B, H, 40)
    mass = AttentionMass(queries.flatten(1, 2), keys, slots, at.int(), SCALE, has_empty=False).received()
    torch.testing.assert_close(future_importance(queries.flatten(1, 2), keys, at, SCALE).mean, mass)


def test_16_bit_inputs_give_fp32_of_the_same_numbers():
    queries, keys, at = draw(12, 40, 3)
    rounded = [array.bfloat16() for array in (queries, keys)]
    check(*(array.float() for array in rounded), at)
    got = future_importance(rounded[0].flatten(1, 2), rounded[1], at, SCALE)
    wide = future_importance(rounded[0].float().flatten(1, 2), rounded[1].float(), at, SCALE)
    assert got.max.dtype == torch.float32 and all(map(torch.equal, got, wide))


def test_extreme_logits_stay_finite(tiles):
    queries, keys, at = draw(9, 20, 2)
    importance = future_importance(1e4 * queries.flatten(1, 2), 1e4 * keys, at, SCALE)
    assert all(bool(array.isfinite().all()) for array in importance)


@pytest.mark.parametrize("keys_of_a_tile", [2**6, 2**14])
def test_memory_grows_with_the_keys_and_not_with_the_map(monkeypatch, keys_of_a_tile):
    monkeypatch.setattr(future, "_TILE_LOGITS", 2**12)
    monkeypatch.setattr(future, "_TILE_KEYS", keys_of_a_tile)
    G, S = 3, 1024
    queries, keys = torch.randn(1, G, S, 2), torch.randn(1, 1, S, 2)
    with Largest() as largest:
        future_importance(queries, keys, 0, SCALE, delay=1, horizon=900)
    assert largest.elements <= queries.numel() < 2**13 < G * S * S / 100


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"delay": -1}, "delay must be at least 0"),
        ({"delay": 3, "horizon": 3}, "horizon more than delay, got 3 and 3"),
        ({"horizon": 0}, "got 0 and 0"),
    ],
)
def test_a_window_that_counts_nothing_is_refused(window, message):
    queries, keys, at = draw(4, 9, 1)
    with pytest.raises(ValueError, match=message):
        future_importance(queries.flatten(1, 2), keys, at, SCALE, **window)


def test_queries_without_their_keys_are_refused():
    queries, keys, _ = draw(4, 9, 1)
    with pytest.raises(ValueError, match="a query at position 9 needs the keys up to it, but there are 9 keys"):
        future_importance(queries.flatten(1, 2), keys, 6, SCALE)
