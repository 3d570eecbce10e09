"""A budget says exactly how many slots stay, and refuses what cannot be with the smallest that can."""

import re
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from twins import share_of

from kvkeep import KVCache
from kvkeep.budget import SCHEDULES, Budget

# a busy machine is no reason to fail
laws = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def lengths(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


# what a user writes


@pytest.mark.parametrize(
    ("value", "field", "amount"),
    [
        (512, "tokens", 512),
        ("512", "tokens", 512),
        (" 4_096 ", "tokens", 4096),
        (0.25, "share", 0.25),
        ("0.25", "share", 0.25),
        ("25%", "share", 0.25),
        ("12.5 %", "share", 0.125),
        (1.0, "share", 1.0),
        ("100%", "share", 1.0),
        ("64MiB", "bytes", 64 * 2**20),
        ("64 mib", "bytes", 64 * 2**20),
        ("1.5GB", "bytes", 1_500_000_000),
        ("1.5KiB", "bytes", 1536),
        ("30000B", "bytes", 30_000),
    ],
)
def test_every_form_is_read(value, field, amount):
    budget = Budget.parse(value)
    assert {name: getattr(budget, name) for name in ("tokens", "share", "bytes")} == {
        "tokens": None,
        "share": None,
        "bytes": None,
        field: amount,
    }


@pytest.mark.parametrize("value", [None, "full", 1.0, "100%", Budget()])
def test_full_budgets_are_unlimited_and_say_so(value):
    assert Budget.parse(value).unlimited
    assert str(Budget.parse(value)) == "full"


@pytest.mark.parametrize("value", [512, 0.25, "64MiB", "12.5%"])
def test_limits_are_limits_and_their_text_reads_back_as_the_same_budget(value):
    budget = Budget.parse(value)
    assert not budget.unlimited
    assert Budget.parse(str(budget)) == budget


def test_options_go_with_every_form_and_change_a_given_budget():
    options = {"sinks": 2, "recent": 3, "schedule": "pyramid"}
    for value in (None, 512, 0.25, "64MiB", Budget(tokens=512)):
        budget = Budget.parse(value, **options)
        assert {name: getattr(budget, name) for name in options} == options
    assert Budget.parse(Budget(tokens=512), sinks=1).tokens == 512


# refusals: each names what came, the limit and the way out


@pytest.mark.parametrize(
    ("value", "came", "limit", "way_out"),
    [
        (0, "0 tokens", "4 sinks and 16 recent", "smallest possible is 20"),
        ("0", "0 tokens", "4 sinks and 16 recent", "smallest possible is 20"),
        (-5, "-5 tokens", "4 sinks and 16 recent", "smallest possible is 20"),
        (19, "19 tokens", "4 sinks and 16 recent", "lower sinks= and recent="),
        (0.0, "0.0", "(0, 1]", "tokens are given as a whole number"),
        (1.5, "1.5", "(0, 1]", "tokens are given as a whole number"),
        ("150%", "1.5", "(0, 1]", "tokens are given as a whole number"),
        ("1.5", "1.5", "(0, 1]", "tokens are given as a whole number"),
        (-0.25, "-0.25", "(0, 1]", "tokens are given as a whole number"),
        (512.0, "512.0", "(0, 1]", "tokens are given as a whole number"),
        (float("nan"), "nan", "(0, 1]", "tokens are given as a whole number"),
        (float("inf"), "inf", "(0, 1]", "tokens are given as a whole number"),
        ("0MiB", "0 bytes", "holds nothing", "'64MiB'"),
        ("abc", "'abc'", "cannot read", "tokens (512)"),
        ("", "''", "cannot read", "tokens (512)"),
        ("-5", "'-5'", "cannot read", "tokens (512)"),
        ("-25%", "'-25%'", "cannot read", "'25%'"),
        ("1e3", "'1e3'", "cannot read", "tokens (512)"),
        ("12 parsecs", "'12 parsecs'", "unknown unit 'parsecs'", "MiB"),
        (True, "True", "a budget is", "'64MiB'"),
        (False, "False", "a budget is", "'full'"),
        ([512], "[512]", "a budget is", "tokens (512)"),
    ],
)
def test_a_wrong_budget_is_refused_with_what_came_the_limit_and_the_way_out(value, came, limit, way_out):
    # the checked signature would stop some of these before our own words do
    parse = Budget.parse.__func__
    with pytest.raises(ValueError) as refused:
        getattr(parse, "__wrapped__", parse)(Budget, value)
    for part in (came, limit, way_out):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tokens": 512, "share": 0.25}, ("tokens=512", "share=0.25", "one of")),
        ({"bytes": 10**6, "share": 0.25}, ("bytes=1000000", "share=0.25", "one of")),
        ({"tokens": 512, "sinks": -1}, ("sinks=-1", "negative")),
        ({"tokens": 512, "recent": -2}, ("recent=-2", "negative")),
        ({"tokens": 30, "sinks": 20, "recent": 16}, ("30 tokens", "20 sinks", "16 recent", "36")),
        ({"tokens": 0, "sinks": 0, "recent": 0}, ("0 tokens", "smallest possible is 1")),
        ({"bytes": -1}, ("-1 bytes", "64MiB")),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields, parts):
    with pytest.raises(ValueError) as refused:
        Budget(**fields)
    assert all(part in str(refused.value) for part in parts)


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    init = Budget.__post_init__
    budget = Budget()
    object.__setattr__(budget, "schedule", "cone")
    with pytest.raises(ValueError, match=r"'cone'.*uniform, pyramid"):
        getattr(init, "__wrapped__", init)(budget)


@laws
@given(sinks=st.integers(0, 40), recent=st.integers(0, 40))
def test_the_smallest_number_of_tokens_named_is_possible_and_one_less_is_not(sinks, recent):
    with pytest.raises(ValueError) as refused:
        Budget(tokens=0, sinks=sinks, recent=recent)
    smallest = int(re.search(r"smallest possible is (\d+)", str(refused.value))[1])
    assert smallest == max(1, sinks + recent)
    Budget(tokens=smallest, sinks=sinks, recent=recent)
    with pytest.raises(ValueError, match=f"smallest possible is {smallest}"):
        Budget(tokens=smallest - 1, sinks=sinks, recent=recent)


# shares


@laws
@given(share=st.decimals("0.0001", "1", places=4), num_tokens=st.integers(0, 2_000_000))
# in floats 7.000000000000001
@example(share=Decimal("0.07"), num_tokens=100)
def test_a_share_is_rounded_up_exactly(share, num_tokens):
    budget = Budget(share=float(share), sinks=0, recent=0)
    if budget.unlimited:
        return
    assert budget.slots(lengths(num_tokens), 1).item() == max(1, share_of(Fraction(share), num_tokens))


@laws
@given(percent=st.decimals("0.1", "99.9", places=1), num_tokens=st.integers(0, 2_000_000))
@example(percent=Decimal("7.0"), num_tokens=100)
def test_a_written_percentage_is_rounded_up_exactly(percent, num_tokens):
    budget = Budget.parse(f"{percent}%", sinks=0, recent=0)
    assert budget.slots(lengths(num_tokens), 1).item() == max(1, share_of(Fraction(percent) / 100, num_tokens))


def test_a_share_never_goes_below_sinks_and_recent_tokens():
    assert Budget(share=0.1).slots(lengths(0, 10, 200, 210), 3).tolist() == [[20, 20, 20, 21]] * 3


def test_each_sequence_and_layer_gets_the_tokens_asked_for():
    assert Budget(tokens=50).slots(lengths(3, 1000), 2).tolist() == [[50, 50], [50, 50]]


# bytes


@laws
@given(
    seen=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    num_layers=st.integers(1, 80),
    slot_bytes=st.integers(1, 10**5),
    fixed_bytes=st.integers(0, 10**5),
    spare=st.integers(0, 10**9),
    floor=st.integers(0, 40),
)
def test_bytes_are_never_exceeded_and_one_more_slot_would(seen, num_layers, slot_bytes, fixed_bytes, spare, floor):
    def cost(slots: int) -> int:
        # the kept slots of every layer and sequence, the one that the next token takes, and what does not grow
        return len(seen) * num_layers * ((slots + 1) * slot_bytes + fixed_bytes)

    limit = cost(max(1, floor)) + spare
    budget = Budget(bytes=limit, sinks=0, recent=floor)
    slots = budget.slots_for_bytes(lengths(*seen), num_layers, slot_bytes=slot_bytes, fixed_bytes=fixed_bytes)
    assert slots.shape == (num_layers, len(seen))
    assert slots.unique().numel() == 1
    assert cost(int(slots[0, 0])) <= limit < cost(int(slots[0, 0]) + 1)


@laws
@given(
    batch_size=st.integers(1, 4),
    num_layers=st.integers(1, 80),
    slot_bytes=st.integers(1, 10**5),
    fixed_bytes=st.integers(0, 10**5),
)
def test_the_smallest_number_of_bytes_named_is_possible_and_one_less_is_not(
    batch_size, num_layers, slot_bytes, fixed_bytes
):
    def slots(limit):
        costs = {"slot_bytes": slot_bytes, "fixed_bytes": fixed_bytes}
        return Budget(bytes=limit).slots_for_bytes(lengths(*[100] * batch_size), num_layers, **costs)

    with pytest.raises(ValueError) as refused:
        slots(1)
    smallest = int(re.search(r"smallest possible is (\d+) bytes", str(refused.value))[1])
    assert slots(smallest).tolist() == [[20] * batch_size] * num_layers
    with pytest.raises(ValueError, match=f"smallest possible is {smallest} bytes"):
        slots(smallest - 1)


def cache_of(heads: int, group: int, size: int, num_layers: int, dtype: torch.dtype, budget: str) -> KVCache:
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        num_attention_heads=heads * group,
        num_key_value_heads=heads,
        head_dim=size,
        hidden_size=heads * group * size,
        dtype=dtype,
    )
    return KVCache(config, policy="knorm", budget=budget)


@settings(laws, max_examples=60)
@given(
    heads=st.integers(1, 4),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 8, 10]),
    num_layers=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spare=st.integers(0, 20_000),
    steps=st.lists(st.sampled_from([1, 1, 1, 30, 130]), min_size=1, max_size=8),
)
def test_the_measured_bytes_of_a_real_cache_stay_within_its_budget(heads, group, size, num_layers, dtype, spare, steps):
    with pytest.raises(ValueError) as refused:
        cache_of(heads, group, size, num_layers, dtype, "1B")
    limit = int(re.search(r"smallest possible is (\d+) bytes", str(refused.value))[1]) + spare
    with pytest.raises(ValueError, match="smallest possible"):
        cache_of(heads, group, size, num_layers, dtype, f"{limit - spare - 1}B")
    cache = cache_of(heads, group, size, num_layers, dtype, f"{limit}B")
    slot = num_layers * heads * (2 * size * dtype.itemsize + 8)
    for num_new in steps:
        # what a model that is called with this cache says of its tokens: none is padding
        cache.plan.vouched = cache.get_seq_length()
        for layer in range(num_layers):
            cache.update(*torch.randn(2, 1, heads, num_new, size).to(dtype), layer)
        assert cache.report().bytes <= limit
    if sum(steps) > 130 + limit // slot:
        # one more slot in every layer would not fit
        assert cache.report().bytes + slot > limit


# pyramids


@laws
@given(mean=st.integers(20, 2_000_000), num_layers=st.integers(1, 100), seen=st.integers(0, 4_000_000))
def test_a_pyramid_falls_keeps_the_floor_and_spends_no_more_than_its_mean(mean, num_layers, seen):
    slots = Budget(tokens=mean, schedule="pyramid").slots(lengths(seen), num_layers)[:, 0].tolist()
    assert sum(slots) <= num_layers * mean
    assert slots == sorted(slots, reverse=True)
    assert min(slots) >= 20
    # rounding down costs less than one slot a layer
    assert sum(slots) > num_layers * (mean - 1)
    if seen <= mean:
        assert slots == [mean] * num_layers
    elif num_layers > 1:
        assert slots[-1] == max(20, mean // 20)
        assert slots[0] == 2 * mean - slots[-1]


def test_a_pyramid_of_three_layers_by_hand():
    assert Budget(tokens=100, schedule="pyramid").slots(lengths(50, 500), 3).tolist() == [
        [100, 180],
        [100, 100],
        [100, 20],
    ]


def test_a_pyramid_in_bytes_spends_no_more_than_its_bytes():
    budget = Budget(bytes=10**6, schedule="pyramid")
    slots = budget.slots_for_bytes(lengths(5000), 7, slot_bytes=96, fixed_bytes=10)
    assert int((slots + 1).sum()) * 96 + 7 * 10 <= 10**6
    assert slots[0] > slots[-1]


def test_schedules_are_those_that_budgets_take():
    assert [Budget(tokens=50, schedule=name).schedule for name in SCHEDULES] == ["uniform", "pyramid"]
