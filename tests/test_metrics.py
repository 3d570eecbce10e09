"""Each measure against a brute-force twin that holds everything, and against values by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.metrics import FutureMass, Revivals, churn, cosine, heaviest, recovered, tier_mass


def masses(steps: int, start: int = 5, *, lead: tuple[int, ...] = (2, 3), seed: int = 0) -> list[torch.Tensor]:
    """Attention of each step to all tokens so far, one more each time."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*lead, start + step, generator=generator).softmax(-1) for step in range(steps)]


# mass within a horizon


@pytest.mark.parametrize("horizon", [1, 3, 8])
def test_the_mass_within_a_horizon_is_the_sum_of_its_steps(horizon):
    rows, future, closed = masses(30), FutureMass(horizon), []
    for step, mass in enumerate(rows):
        closed += future.add(mass)
        if step % 4 == 0:
            future.mark(step)
    assert [event.note for event in closed] == [step for step in range(0, 30, 4) if step + horizon < 30]
    for event in closed:
        n = rows[event.note].shape[-1]
        expected = sum(mass[..., :n] for mass in rows[event.note + 1 : event.note + 1 + horizon])
        assert event.mass.shape[-1] == n
        torch.testing.assert_close(event.mass, expected, atol=1e-6, rtol=0)


def test_the_caller_keeps_what_it_gave():
    mass = torch.ones(2, 4, dtype=torch.float64)
    future = FutureMass(1)
    future.add(mass)
    future.add(mass)
    assert mass.eq(1).all()


def test_mass_of_tiers_by_hand():
    mass = torch.tensor([[4.0, 1, 2, 2, 1], [1, 1, 1, 1, 1]])
    tiers = torch.tensor([[-1, 0, 2, 2, 0], [0, 0, 0, 1, -1]])
    assert tier_mass(mass, tiers, 3).tolist() == [[2, 0, 4], [3, 1, 0]]


def test_missed_mass_of_uniform_attention_is_the_dropped_share():
    tiers = torch.tensor([0] * 30 + [1] * 70)
    assert float(tier_mass(torch.full((100,), 0.01), tiers, 2)[1]) == pytest.approx(0.7)


# selections


def test_churn_by_hand():
    before = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    now = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    assert churn(before, now).tolist() == [0.5, 0, 1]


def test_the_heaviest_windows_by_hand():
    mass = torch.tensor([9.0, 1, 1, 5, 0, 3, 3, 9, 9])
    # windows of two from token 1 to 7: (1, 1), (5, 0), (3, 3)
    assert heaviest(mass, 1, omega=2, first=1, until=7).nonzero()[:, 0].tolist() == [5, 6]
    assert heaviest(mass, 2, omega=2, first=1, until=8).nonzero()[:, 0].tolist() == [3, 4, 5, 6]
    assert not heaviest(mass, 2, omega=2, first=1, until=2).any()


def rescues_by_hand(history: list[list[bool]], born: list[int], least: int, within: int) -> tuple[int, ...]:
    """Walk each token's events: `history[event][token]` says whether it is selected, from event `born[token]` on."""
    lasting = rescued = decided = in_time = waits = 0
    for token, first in enumerate(born):
        run = 0
        for event in [*range(first, len(history)), None]:
            out = event is not None and not history[event][token]
            if out:
                run += 1
                continue
            if run >= least:
                end = len(history) if event is None else event
                wait, back = run - least + 1, event is not None
                followed = end - wait + within < len(history)
                lasting += 1
                rescued += back
                waits += wait * back
                decided += followed
                in_time += followed and back and wait <= within
            run = 0
    return lasting, rescued, decided, in_time, waits


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rescues_equal_a_walk_through_each_tokens_events(data):
    events, tokens = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6))
    least, within = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    born = sorted(data.draw(st.lists(st.integers(0, events), min_size=tokens, max_size=tokens)))
    rare = st.integers(0, 3).map(lambda number: number == 0)
    history = data.draw(st.lists(st.lists(rare, min_size=tokens, max_size=tokens), min_size=events, max_size=events))
    revivals = Revivals(least=least, within=within)
    for event in range(events):
        there = sum(first <= event for first in born)
        revivals.add(torch.tensor(history[event][:there]).bool(), torch.ones(there).bool())
    assert tuple(int(count) for count in revivals.counts) == rescues_by_hand(history, born, least, within)


def test_a_token_that_may_not_be_selected_yet_begins_no_episode():
    revivals = Revivals(least=1, within=1)
    revivals.add(torch.tensor([[False, False]]), torch.tensor([[True, False]]))
    assert revivals.counts.lasting.tolist() == [1]


def test_what_never_comes_back_has_no_rescue():
    revivals = Revivals()
    for _ in range(20):
        revivals.add(torch.zeros(2, 3, 7).bool(), torch.ones(2, 3, 7).bool())
    counts = revivals.counts
    assert counts.lasting.eq(7).all() and counts.decided.eq(7).all() and counts.rescued.eq(0).all()


def test_an_early_rescue_counts_only_if_others_had_the_same_time():
    # out for two events, then back; the text ends one event later, before the limit of three
    revivals = Revivals(least=2, within=3)
    for selected in (False, False, True, True):
        revivals.add(torch.tensor([selected]), torch.tensor([True]))
    assert (int(revivals.counts.rescued), int(revivals.counts.decided), int(revivals.counts.in_time)) == (1, 0, 0)
    revivals.add(torch.tensor([True]), torch.tensor([True]))
    assert (int(revivals.counts.decided), int(revivals.counts.in_time)) == (1, 1)


# scores through another tier's keys


def test_equal_scores_agree_fully_and_orthogonal_ones_not_at_all():
    true, among = torch.tensor([1.0, 2, 5]), torch.tensor([True, True, False])
    assert float(cosine(3 * true, true, among)) == pytest.approx(1)
    assert float(cosine(torch.tensor([2.0, -1, 7]), true, among)) == pytest.approx(0)
    assert float(recovered(true / 2, true, among)) == pytest.approx(0.5)
    assert float(recovered(3 * true, true, among)) == pytest.approx(1)
    assert math.isnan(float(cosine(true, true, torch.zeros(3).bool())))


@pytest.mark.parametrize("wrong", [lambda: FutureMass(0), lambda: Revivals(least=0), lambda: Revivals(within=0)])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        wrong()
