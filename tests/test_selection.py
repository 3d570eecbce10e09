"""The survivors are those a plain sort would take: protected first, then worth, of equal worths the newest."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from twins import kept_by_sorting, victim_by_sorting

from kvkeep.selection import finite_or_recent, protected, surplus, survivors, victim
from kvkeep.slots import EMPTY

# a busy machine is no reason to fail
laws = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# few distinct worths, so that ties are the rule; and those that no sort of floats takes lightly
WORTHS = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -3.0, 3e38, math.inf, -math.inf])


@st.composite
def heads(draw, max_slots=12):
    """Worths, positions in any order and guards of `[B, H, N]`; some slots are empty."""
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, max_slots)))
    count = math.prod(shape)
    score = draw(st.lists(WORTHS, min_size=count, max_size=count))
    empty = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    guarded = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    order = draw(st.permutations(range(shape[-1])))
    at = [EMPTY if out else 3 * order[i % shape[-1]] for i, out in enumerate(empty)]
    guarded = [mark and not out for mark, out in zip(guarded, empty, strict=True)]
    positions = torch.tensor(at, dtype=torch.int32).view(shape)
    return torch.tensor(score).view(shape), positions, torch.tensor(guarded).view(shape)


def every_head(*arrays: Tensor):
    """The rows and heads of `[B, H, ...]` arrays as plain lists."""
    for row in zip(*arrays, strict=True):
        for head in zip(*row, strict=True):
            yield tuple(array.tolist() for array in head)


@laws
@given(heads(), st.integers(0, 14))
def test_survivors_are_the_first_of_a_plain_sort_in_order_of_position(case, count):
    index = survivors(*case, count)
    for kept, score, positions, guarded in every_head(index, *case):
        expected = kept_by_sorting(score, positions, guarded, count)
        empty = len(kept) - len(expected)
        assert len(kept) == min(count, len(score)) and kept[empty:] == expected
        assert all(positions[slot] == EMPTY for slot in kept[:empty])


@laws
@given(heads(), st.lists(st.integers(0, 14), min_size=2, max_size=2))
def test_surplus_marks_what_each_sequence_would_not_keep(case, counts):
    counts = counts[: len(case[0])]
    marked = surplus(*case, torch.tensor(counts))
    for row, count in enumerate(counts):
        for out, *head in every_head(marked[row : row + 1], *(array[row : row + 1] for array in case)):
            kept = kept_by_sorting(*head, count)
            stay = [i for i, gone in enumerate(out) if not gone and head[1][i] != EMPTY]
            assert stay == sorted(kept)


@laws
@given(heads())
def test_the_victim_is_the_last_of_a_plain_sort_in_any_slot_order(case):
    for out, *head in every_head(victim(*case)[..., None], *case):
        if any(at != EMPTY and not safe for at, safe in zip(head[1], head[2], strict=True)):
            assert out == [victim_by_sorting(*head)]


@laws
@given(heads())
def test_survivors_without_one_are_the_others_but_the_victim(case):
    score, positions, guarded = case
    out = victim(*case)
    others = survivors(*case, score.shape[-1] - 1)
    for gone, kept, at, safe in every_head(out[..., None], others, positions, guarded):
        if EMPTY not in at and not all(safe):
            assert sorted(kept + gone) == list(range(len(at)))


def test_protected_tokens_survive_worths_that_bf16_cannot_tell_apart():
    # in bf16 the greatest worth plus one is the greatest worth: 257 is rounded to 256
    score = torch.tensor([256.0, 257.0, 255.0, 256.0]).bfloat16().float().view(1, 1, 4)
    positions = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    guarded = torch.tensor([True, False, False, False]).view(1, 1, 4)
    assert survivors(score, positions, guarded, 1).tolist() == [[[0]]]
    assert survivors(score, positions, guarded, 2).tolist() == [[[0, 3]]]


@pytest.mark.parametrize("greatest", [math.inf, torch.finfo(torch.float32).max])
def test_protected_tokens_survive_infinite_worths_and_of_those_the_newest_wins(greatest):
    score = torch.tensor([greatest, -math.inf, greatest, greatest, 5.0]).view(1, 1, 5)
    positions = torch.tensor([0, 1, 2, 3, EMPTY], dtype=torch.int32).view(1, 1, 5)
    guarded = torch.tensor([False, True, False, False, False]).view(1, 1, 5)
    assert survivors(score, positions, guarded, 2).tolist() == [[[1, 3]]]
    assert victim(score, positions, guarded).tolist() == [[0]]


def test_the_least_possible_worth_still_beats_an_empty_slot():
    score = torch.tensor([math.inf, -math.inf, math.nan]).view(1, 1, 3)
    positions = torch.tensor([EMPTY, 0, EMPTY], dtype=torch.int32).view(1, 1, 3)
    assert survivors(score, positions, torch.zeros(1, 1, 3, dtype=torch.bool), 1).tolist() == [[[1]]]


@laws
@given(
    seen=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    sinks=st.integers(0, 6),
    recent=st.integers(0, 8),
)
def test_sinks_and_recent_tokens_of_each_sequence_are_protected_wherever_they_stand(seen, sinks, recent):
    positions = torch.full((len(seen), 2, 30), EMPTY, dtype=torch.int32)
    for row, length in enumerate(seen):
        positions[row, 0, :length] = torch.arange(length)
        # the other head holds them in another order, behind its empty slots
        positions[row, 1, 30 - length :] = torch.arange(length).flip(0)
    marked = protected(positions, torch.tensor(seen, dtype=torch.int32), sinks=sinks, recent=recent)
    for row, length in enumerate(seen):
        expected = {at for at in range(length) if at < sinks or at >= length - recent}
        for head in range(2):
            assert set(positions[row, head][marked[row, head]].tolist()) - {EMPTY} == expected


def test_only_heads_that_hold_a_nan_fall_back_to_recency():
    positions = torch.tensor([[[0, 1, 2], [0, 1, 2]], [[5, 4, EMPTY], [0, EMPTY, 2]]], dtype=torch.int32)
    score = torch.tensor([[[1.0, 2, 3], [4, math.nan, 6]], [[math.nan, 1, 2], [7, math.nan, 9]]])
    replaced, fell_back = finite_or_recent(score, positions)
    assert fell_back
    assert replaced[0].tolist() == [[1, 2, 3], [0, 1, 2]]
    assert replaced[1, 0].tolist() == [5, 4, EMPTY]
    # what stands in an empty slot is no worth, and no reason
    assert replaced[1, 1, [0, 2]].tolist() == [7, 9]


def test_worths_without_nan_are_left_as_they_are():
    score = torch.tensor([[[math.inf, -math.inf, 0.0, math.nan]]])
    positions = torch.tensor([[[0, 1, 2, EMPTY]]], dtype=torch.int32)
    replaced, fell_back = finite_or_recent(score, positions)
    assert replaced is score and not fell_back
