"""Attention over slots and the mass slots receive equal the slow reference, and never build a whole map."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvkeep.attention import AttentionMass, attend, reference, streamed
from kvkeep.slots import EMPTY

# B sequences, H KV heads, G query heads per KV head, N slots, T queries, D head size
B, H, D, DV = 2, 2, 8, 5
SCALE = 0.4


class Case(NamedTuple):
    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    query_positions: Tensor

    @property
    def packed(self) -> Tensor:
        """Queries as the engine takes them, `[B, H * G, T, D]`."""
        return self.queries.flatten(1, 2)

    @property
    def valid(self) -> Tensor:
        """Marks `[B, 1, 1, T, 1]` the queries that are no padding."""
        return (self.query_positions >= 0)[:, None, None, :, None]

    def to(self, dtype: torch.dtype) -> "Case":
        cast = (array.to(dtype) for array in self[:3])
        return Case(*cast, *self[3:])


def case(held: int, T: int, G: int, *, empty: bool = False, padding: str = "none", seed: int = 0) -> Case:
    """T new tokens behind `held` survivors of about three times as many, others in every head.

    With `empty` a third of the survivors is empty; `padding` puts padding among the new tokens of the second row.
    """
    generator = torch.Generator().manual_seed(seed)
    survivors = torch.rand(B, H, 3 * held, generator=generator).argsort(-1)[..., :held].sort(-1).values
    if empty:
        survivors[torch.rand(survivors.shape, generator=generator) < 1 / 3] = EMPTY
    new = 3 * held + torch.arange(T).expand(B, T).clone()
    if padding == "left":
        new[1] = torch.cat([torch.full((T // 2,), EMPTY), new[1, : T - T // 2]])
    elif padding == "right":
        new[1, T - T // 2 :] = EMPTY
    positions = torch.cat([survivors, new[:, None].expand(-1, H, -1)], -1)
    shapes = ((B, H, G, T, D), (B, H, held + T, D), (B, H, held + T, DV))
    queries, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return Case(queries, keys, values, positions.int(), new.int())


def attended(at: Case, **options: bool) -> Tensor:
    out = attend(at.packed, *at[1:], SCALE, **{"has_empty": True, **options})
    return out.view(*at.queries.shape[:4], -1)


def received(at: Case, last: int | None = None, has_empty: bool = True) -> Tensor:
    return AttentionMass(at.packed, at.keys, at.positions, at.query_positions, SCALE, has_empty=has_empty).received(
        last
    )


def expected_mass(at: Case, last: int | None = None) -> Tensor:
    return reference.attention_mass(at.queries, at.keys, at.positions, at.query_positions, SCALE, last)


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert (got.float() - expected).abs().max() <= tolerance


# logits a tile may hold: one row, some rows, everything
TILES = (1, 250, streamed._TILE_LOGITS)

sizes = pytest.mark.parametrize(
    ("held", "T", "G"), [(held, T, G) for held in (0, 1, 17, 63) for T in (1, 2, 17) for G in (1, 3)]
)
paddings = pytest.mark.parametrize("padding", ["none", "left", "right"])


@sizes
def test_attention_over_slots_without_gaps_equals_the_reference(monkeypatch, held, T, G):
    at = case(held, T, G)
    expected = reference.attend(*at, SCALE)
    for tile in TILES:
        monkeypatch.setattr(streamed, "_TILE_LOGITS", tile)
        assert_close(attended(at, has_empty=False), expected)
        assert_close(attended(at, has_empty=True), expected)


@sizes
@paddings
def test_attention_with_empty_slots_and_padding_equals_the_reference(monkeypatch, held, T, G, padding):
    at = case(held, T, G, empty=True, padding=padding)
    expected = reference.attend(*at, SCALE)
    for tile in TILES:
        monkeypatch.setattr(streamed, "_TILE_LOGITS", tile)
        got = attended(at)
        # what a padding query reads is meaningless, but it goes on through the model
        assert got.isfinite().all()
        assert_close(got.where(at.valid, 0), expected)


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize(("N", "T"), [(1, 1), (18, 1), (63, 1), (17, 17), (63, 17)])
def test_attention_before_any_eviction_equals_the_reference(N, T, G):
    at = case(N - T, T, G)
    at.positions.copy_(torch.arange(N))
    at.query_positions.copy_(torch.arange(N - T, N))
    assert_close(attended(at, has_empty=False, whole=True), reference.attend(*at, SCALE))


@sizes
@paddings
def test_the_mass_that_slots_receive_equals_the_reference(monkeypatch, held, T, G, padding):
    at, full = case(held, T, G, empty=True, padding=padding), case(held, T, G)
    for tile in TILES:
        monkeypatch.setattr(streamed, "_TILE_LOGITS", tile)
        for last in (None, 1, 5, 100):
            assert_close(received(at, last), expected_mass(at, last))
            assert_close(received(full, last, has_empty=False), expected_mass(full, last))


def test_mass_of_equal_keys_is_the_harmonic_sum_by_hand():
    at = case(0, 4, 3)._replace(keys=torch.zeros(B, H, 4, D))
    # query t spreads 1 over t + 1 slots
    rows = [1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]
    for got in (received(at, has_empty=False), expected_mass(at)):
        assert_close(got, torch.tensor(rows).expand(B, H, -1))
    assert_close(received(at, last=1), torch.full((B, H, 4), 1 / 4))


def test_mass_adds_up_to_the_number_of_queries_that_are_no_padding():
    at = case(17, 6, 3, empty=True, padding="left")
    assert_close(received(at).sum(-1), torch.tensor([6.0, 3.0])[:, None].expand(-1, H))
    assert_close(received(at, last=2).sum(-1), torch.full((B, H), 2.0))
    assert_close(received(at, last=5).sum(-1), torch.tensor([5.0, 3.0])[:, None].expand(-1, H))


def test_mass_that_was_asked_for_once_is_remembered():
    at = case(5, 4, 1)
    mass = AttentionMass(at.packed, at.keys, at.positions, at.query_positions, SCALE, has_empty=False)
    assert mass.received() is mass.received(last=4) is mass.received(last=99)
    assert mass.received(last=2) is mass.received(last=2) is not mass.received()


@pytest.mark.parametrize("T", [1, 2])
def test_a_row_of_padding_alone_gives_finite_output_and_no_mass(T):
    at = case(3, T, 3)
    at.positions[1], at.query_positions[1] = EMPTY, EMPTY
    assert attended(at).isfinite().all()
    assert_close(received(at), expected_mass(at))
    assert (received(at)[1] == 0).all()


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize(("held", "T"), [(0, 17), (17, 1), (17, 5)])
def test_16_bit_attention_is_close_and_its_mass_exact(held, T, G):
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        at = case(held, T, G, empty=True).to(dtype)
        got = attended(at)
        assert got.dtype == dtype
        assert_close(got, reference.attend(*at, SCALE), tolerance)
        mass = received(at)
        assert mass.dtype == torch.float32
        assert_close(mass, expected_mass(at))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("held", "T"), [(0, 9), (17, 1), (17, 5)])
def test_extreme_keys_give_neither_nan_nor_infinite_attention(held, T, dtype):
    at = case(held, T, 3, empty=True, padding="left")
    at = at._replace(keys=at.keys * 1e4, queries=at.queries * 1e2).to(dtype)
    assert attended(at).isfinite().all()
    mass = received(at)
    assert mass.isfinite().all()
    assert_close(mass, expected_mass(at))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(out) if isinstance(leaf, Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "has_empty"), [(2048, False), (2048, True), (1024, False)])
def test_no_map_over_all_queries_and_slots_is_ever_built(T, has_empty, dtype):
    N, G = 2048, 3
    tile, full = streamed._TILE_LOGITS, G * T * N
    assert tile < full
    queries, keys = torch.randn(1, G, T, D, dtype=dtype), torch.randn(1, 1, N, D, dtype=dtype)
    positions = torch.arange(N, dtype=torch.int32)
    at, slots = positions[None, N - T :], positions[None, None]
    with Largest() as attention:
        attend(queries, keys, keys, slots, at, SCALE, has_empty=has_empty)
    with Largest() as mass:
        AttentionMass(queries, keys, slots, at, SCALE, has_empty=has_empty).received()
    assert attention.elements <= tile
    assert tile // (2 * streamed._SUM_TILES) < mass.elements <= tile


@pytest.mark.parametrize("has_empty", [False, True])
def test_keys_and_values_are_never_repeated_for_the_heads_of_a_group(monkeypatch, has_empty):
    # keys and values are the largest thing there is, so a copy for each query head would show
    monkeypatch.setattr(streamed, "_TILE_LOGITS", 2**12)
    G, T, N = 4, 8, 256
    queries, keys = torch.randn(B, H * G, T, 64), torch.randn(B, H, N, 64)
    slots, at = torch.arange(N, dtype=torch.int32).expand(B, H, N), torch.arange(N - T, N, dtype=torch.int32)
    with Largest() as largest:
        attend(queries, keys, keys, slots, at.expand(B, T), SCALE, has_empty=has_empty)
        AttentionMass(queries, keys, slots, at.expand(B, T), SCALE, has_empty=has_empty).received()
    assert largest.elements <= keys.numel()
