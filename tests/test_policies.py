"""Each policy in POLICIES gives the worths of its slow twin; a new one joins by its row and needs a twin.

B sequences, H KV heads, G query heads per KV head, N tokens, D head size.
"""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from named import policy_named
from torch import Tensor
from twins import TWINS, Run, kept_by_sorting, rotation

import kvkeep
from kvkeep import POLICIES, KVCache
from kvkeep.attention import AttentionMass
from kvkeep.names import nearest
from kvkeep.policies import Observation, Policy, make_policy
from kvkeep.policies.agents import AgentShape, make_agents
from kvkeep.policies.base import hashed_uniform
from kvkeep.policies.kvp import KVP, Ranking, agents_file
from kvkeep.policies.kvpop import scorers_file
from kvkeep.policies.learned import Trained
from kvkeep.policies.scorers import ScorerShape, make_scorers
from kvkeep.policies.tiered import TieredPolicy
from kvkeep.rotation import rotate
from kvkeep.slots import EMPTY, Slots

H, G, D, DV = 2, 3, 8, 6
SCALE = Run.scale
ANGLE = torch.tensor([1.0, 0.3, 0.1, 0.03])


def ranking(**sees: int) -> Ranking:
    """Untrained agents for two layers of these shapes, as if calibrated on other keys and values."""
    shape = AgentShape(num_agents=2 * H, key_size=D, value_size=DV, hidden=5, **sees)
    agents = make_agents(shape, seed=1, frequencies=torch.tensor([0.7, 0.1]))
    with torch.no_grad():
        agents.centre.normal_(0, 0.5)
        agents.spread.uniform_(0.5, 2)
    return KVP.network_of(agents_file(agents, {}, layers=[0, 1], training={}))


def scorers(name: str) -> Trained:
    """Untrained scorers for two layers of these shapes, as if calibrated on other keys and values."""
    shape = ScorerShape(
        num_agents=2 * H,
        key_size=D,
        value_size=DV,
        architecture=POLICIES[name].architecture,
        hidden=5,
        memory=3,
        window=4,
    )
    made = make_scorers(shape, seed=1)
    with torch.no_grad():
        made.centre.normal_(0, 0.5)
        made.spread.uniform_(0.5, 2)
        made.age.normal_()
    return POLICIES[name].network_of(scorers_file(made, {}, layers=[0, 1], training={}))


# what a policy cannot do without on these shapes
NEEDED: dict[str, dict] = {
    "kvp": {"trained": ranking()},
    **{name: {"trained": scorers(name)} for name in ("kvpop", "kvpop_mlp")},
}
# settings small enough to matter on some twenty tokens; what is not listed runs with its defaults
SMALL: dict[str, list[dict]] = {
    "random": [{"seed": 0}, {"seed": 12345}],
    "lagkv": [{"lag": 5, "sinks": 4}, {"lag": 3, "sinks": 0}],
    "tova": [{"share_heads": False}, {"share_heads": True}],
    "h2o": [{}, {"decay": 0.9, "norm": 3.0}],
    "qevict": [{}, {"decay": 0.9, "norm": 0.5}],
    "snapkv": [{"window": 6, "kernel": 5}, {"window": 40, "kernel": 1}],
    "pyramidkv": [{"window": 6, "kernel": 3}],
    "expected_attention": [{"horizon": 1, "sinks": 4, "epsilon": 0.0}, {"horizon": 9, "sinks": 2, "epsilon": 0.05}],
    **{name: [needed] for name, needed in NEEDED.items()},
    "kvp": [NEEDED["kvp"], {"trained": ranking(turned=4, sight=7)}, {"trained": ranking(glance=5)}],
    # the twin deletes for real, without an epsilon
    "lorekv": [
        {"window": 6, "chunk": 2, "guard": 0.0, "epsilon": 1e-9},
        {"window": 40, "chunk": 3, "guard": 1.0, "epsilon": 1e-9},
    ],
}
# it multiplies 16-bit numbers as such, and rounds what comes out
ROUNDING = {"kvp": 0.02}
CHOICES = [(name, options) for name in POLICIES for options in SMALL.get(name, [{}])]
every_choice = pytest.mark.parametrize(("name", "options"), CHOICES)
every_name = pytest.mark.parametrize("name", POLICIES)


def rotary(positions: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    angles = torch.cat([positions[..., None] * ANGLE] * 2, -1)
    return angles.cos() * scale, angles.sin() * scale


def run_of(name: str, sizes: tuple[int, ...], options: dict, seed: int = 0, dtype=torch.float32) -> Run:
    """Random queries, keys and values of one sequence, with everything its policy may want to know."""
    generator = torch.Generator().manual_seed(seed)
    N = sum(sizes)
    queries, keys, values = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((H, G, N, D), (H, N, D), (H, N, DV))
    )
    ahead = sizes[-1] if "future" in POLICIES[name].needs and sizes[-1] > 1 else 0
    return Run(queries, keys, values, sizes, options, layer=1, ahead=ahead, angle=ANGLE)


def empty_slots(policy: Policy, batch: int, dtype: torch.dtype) -> Slots:
    side = {name: torch.zeros(batch, H, 0) for name in policy.side}
    streams = {name: torch.zeros(batch, *shape) for name, shape in policy.streams(H, G, D).items()}
    keys, values = torch.zeros(batch, H, 0, D, dtype=dtype), torch.zeros(batch, H, 0, DV, dtype=dtype)
    return Slots(keys, values, torch.zeros(batch, H, 0, dtype=torch.int32), side, streams)


def observe(slots: Slots, queries: Tensor, at: Tensor, lengths: Tensor, *, new: Tensor | None = None, **more):
    """What a policy sees right after the attention of `queries` `[B, H, G, T, D]` at positions `at` `[B, T]`."""
    packed = queries.flatten(1, 2)
    has_empty = bool((slots.positions == EMPTY).any() | (at == EMPTY).any())
    return Observation(
        slots=slots,
        new=new,
        num_new=at.shape[1],
        lengths=lengths,
        attention=AttentionMass(packed, slots.keys, slots.positions, at, SCALE, has_empty=has_empty),
        queries=packed,
        query_positions=at,
        scale=SCALE,
        **{"layer": 1, "rotary": rotary, **more},
    )


def padded(arrays: list[Tensor], width: int, dim: int) -> Tensor:
    """Arrays of uneven length as one batch, zeros before the shorter ones."""
    return torch.stack(
        [torch.cat([a.new_zeros(*a.shape[:dim], width - a.shape[dim], *a.shape[dim + 1 :]), a], dim) for a in arrays]
    )


def drive(policy: Policy, runs: list[Run], **more) -> list[Tensor]:
    """Worths `[H, N]` of each run after all its forwards, read as one batch padded on the left."""
    slots = empty_slots(policy, len(runs), runs[0].keys.dtype)
    for forwards in zip(*(run.forwards for run in runs), strict=True):
        width, lengths = max(map(len, forwards)), torch.tensor([new.stop for new in forwards], dtype=torch.int32)
        cut = [slice(new.start, new.stop) for new in forwards]
        at = torch.full((len(runs), width), EMPTY, dtype=torch.int32)
        for row, new in enumerate(forwards):
            at[row, width - len(new) :] = torch.tensor(new)
        slots.append(
            padded([run.keys[:, c] for run, c in zip(runs, cut, strict=True)], width, 1),
            padded([run.values[:, c] for run, c in zip(runs, cut, strict=True)], width, 1),
            at[:, None].expand(-1, H, -1),
        )
        queries = padded([run.queries[:, :, c] for run, c in zip(runs, cut, strict=True)], width, 2)
        ahead = bool(runs[0].ahead) and forwards[0].stop == runs[0].keys.shape[1]
        seen = observe(slots, queries, at, lengths, ahead=ahead, **more)
        policy.track(seen)
    score = policy.score(seen)
    assert score.dtype == torch.float32
    return [score[row][slots.positions[row] != EMPTY].view(H, -1) for row in range(len(runs))]


# worths


@every_name
def test_every_policy_has_a_twin(name):
    assert name in TWINS, f"write the worth of {name!r} in tests/twins.py, one formula a line"


@every_choice
@pytest.mark.parametrize("sizes", [(23,), (1, 1, 1), (9, 1, 1, 1, 1), (12, 7, 1, 4), (2, 1, 20)])
def test_worths_equal_the_twins(name, options, sizes):
    run = run_of(name, sizes, options)
    (got,) = drive(make_policy(name, **options), [run])
    assert torch.allclose(got, TWINS[name](run).float(), rtol=1e-4, atol=1e-5)


@every_choice
def test_a_padded_batch_gives_the_worths_of_each_sequence_alone(name, options):
    runs = [replace(run_of(name, (size, 1, 1), options, seed=size), ahead=0) for size in (20, 3, 9)]
    for got, run in zip(drive(make_policy(name, **options), runs), runs, strict=True):
        assert torch.allclose(got, TWINS[name](run).float(), rtol=1e-4, atol=1e-5)


@every_choice
def test_a_second_padded_turn_gives_the_worths_of_each_sequence_alone(name, options):
    turns = [(20, 1, 6, 1), (3, 1, 2, 1), (9, 1, 4, 1)]
    runs = [replace(run_of(name, sizes, options, seed), ahead=0) for seed, sizes in enumerate(turns)]
    for got, run in zip(drive(make_policy(name, **options), runs), runs, strict=True):
        assert torch.allclose(got, TWINS[name](run).float(), rtol=1e-4, atol=1e-5)


@every_choice
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_worths_of_16_bit_inputs_are_those_of_the_same_numbers_in_fp32(name, options, dtype):
    run = run_of(name, (17, 1, 1), options, dtype=dtype)
    exact = replace(run, queries=run.queries.float(), keys=run.keys.float(), values=run.values.float())
    (got,) = drive(make_policy(name, **options), [run])
    atol = ROUNDING.get(name, 1e-5)
    assert torch.allclose(got, TWINS[name](exact).float(), rtol=1e-4, atol=atol)


@every_choice
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_keys_give_no_nan(name, options, dtype):
    for factor in (1e4, torch.where(torch.arange(19) % 5 == 0, 1e4, 1e-2)[:, None]):
        run = run_of(name, (17, 1, 1), options)
        run = replace(run, keys=(run.keys.clamp(-3, 3) * factor).to(dtype))
        run = replace(run, queries=run.queries.to(dtype), values=run.values.to(dtype))
        (got,) = drive(make_policy(name, **options), [run])
        assert not got.isnan().any()


@every_name
def test_a_policy_says_the_same_of_tokens_that_fill_holes(name):
    """Decoding writes into a freed slot: only where a token stands may differ, not what it is worth."""
    policy = make_policy(name, **NEEDED.get(name, {}))
    run = run_of(name, (12, 1), {})
    at, lengths = torch.tensor([[12]], dtype=torch.int32), torch.tensor([13], dtype=torch.int32)
    scores = []
    for place in ("behind", "in a hole"):
        slots = empty_slots(policy, 1, torch.float32)
        first = torch.arange(12, dtype=torch.int32)[None]
        slots.append(run.keys[None, :, :12], run.values[None, :, :12], first[:, None].expand(-1, H, -1))
        policy.track(observe(slots, run.queries[None, :, :, :12], first, lengths - 1))
        token = run.keys[None, :, 12:], run.values[None, :, 12:], at[:, None].expand(-1, H, -1)
        slots.clear(torch.tensor([[3, 7]]))
        if place == "behind":
            slots.append(*token)
            new = None
        else:
            new = slots.fill(*token)
        seen = observe(slots, run.queries[None, :, :, 12:], at, lengths, new=new)
        policy.track(seen)
        score = policy.score(seen)[0]
        by_position = [dict(zip(slots.positions[0, h].tolist(), score[h].tolist(), strict=True)) for h in range(H)]
        scores.append([{at: worth for at, worth in head.items() if at != EMPTY} for head in by_position])
    for behind, filled in zip(*scores, strict=True):
        assert len(behind) == 12
        assert filled == pytest.approx(behind, rel=1e-4)


# real caches


def recorded(policy: Policy) -> tuple[Policy, dict[int, list[Observation]]]:
    """The same policy, and what it saw in each layer before anything was evicted."""
    log: dict[int, list[Observation]] = {}
    kind = type(policy)

    def track(self: Policy, seen: Observation) -> None:
        slots = Slots(seen.slots.keys.clone(), seen.slots.values.clone(), seen.slots.positions.clone())
        log.setdefault(seen.layer, []).append(replace(seen, slots=slots))
        kind.track(self, seen)

    witness = type(kind.__name__, (kind,), {"track": track})
    return witness(**options_of(policy)), log


def options_of(policy: Policy) -> dict:
    return {field.name: getattr(policy, field.name) for field in fields(policy)}


def run_from(log: list[Observation], options: dict) -> Run:
    queries = torch.cat([seen.queries for seen in log], 2)
    slots, layer = log[-1].slots, log[-1].layer
    queries = queries[0].view(slots.keys.shape[1], -1, *queries.shape[2:])
    ahead = log[-1].num_new if log[-1].ahead else 0
    angle = 10_000 ** (-torch.arange(0, 16, 2) / 16)
    sizes = tuple(seen.num_new for seen in log)
    return Run(queries, slots.keys[0], slots.values[0], sizes, options, layer, ahead, angle, 16**-0.5)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(seed))


# what tiers keep is tested in test_tiers.py
@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if not issubclass(kind, TieredPolicy)])
def test_a_prefill_in_one_piece_keeps_what_the_twin_finds_worth_most(tiny, name):
    model, prompt = tiny("llama"), tokens(90)
    # the twin samples no futures and knows no projection
    options = {"lagkv": {"lag": 16}, "lorekv": {"futures": 0, "objective": "unprojected"}}.get(name, {})
    policy, log = recorded(policy_named(name, model, **options))
    cache = KVCache(model, policy=policy, budget=40)
    kvkeep.prefill(model, prompt, cache, future=tokens(6, seed=1) if "future" in policy.needs else None)
    counts = cache.budget.slots(torch.tensor([90]), 3)[:, 0].tolist()
    for layer, count in zip(cache.managed, counts, strict=True):
        worths = TWINS[name](run_from(log[layer.index], options_of(policy)))[:, :90]
        for head, worth in enumerate(worths.tolist()):
            guarded = [at < 4 or at >= 90 - 16 for at in range(90)]
            expected = set(kept_by_sorting(worth, range(90), guarded, count))
            held = layer.slots.positions[0, head]
            kept = set(held[held != EMPTY].tolist())
            assert len(kept) == count
            # sums in another order may swap two tokens of equal worth
            swapped = kept ^ expected
            assert len(swapped) <= 2
            assert max((worth[at] for at in swapped), default=0) == pytest.approx(
                min((worth[at] for at in swapped), default=0), rel=1e-4
            )


@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if kind.chunk_free])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(25, 70), chunk=st.integers(1, 80), budget=st.integers(20, 60), seed=st.integers(0, 99))
def test_chunk_free_policies_keep_the_same_tokens_in_any_chunking(tiny, name, length, chunk, budget, seed):
    # one layer: what deeper ones read depends on what was evicted below them, whatever the policy
    model, prompt = tiny("llama", num_hidden_layers=1), tokens(length, seed)
    held = []
    for size in (None, chunk):
        cache = KVCache(model, policy=policy_named(name, model), budget=budget)
        kvkeep.prefill(model, prompt, cache, chunk=size)
        positions = cache.managed[0].slots.positions.sort(-1).values
        held.append([[at for at in head if at != EMPTY] for head in positions[0].tolist()])
    assert held[0] == held[1]
    assert len(held[0][0]) == min(length, budget)


# random


def test_random_worths_are_uniform():
    worth = hashed_uniform(torch.arange(100_000).view(1, 1, -1), 0)[0, 0].sort().values
    assert worth[0] >= 0 and worth[-1] < 1
    # Kolmogorov-Smirnov at one in a million
    assert (worth - torch.arange(0.5, 100_000) / 100_000).abs().max() < 2.7 / math.sqrt(100_000)


def test_random_worths_of_heads_layers_seeds_and_neighbours_are_unrelated():
    positions = torch.arange(20_000).expand(1, 3, -1)
    policies = [make_policy("random", seed=seed) for seed in (0, 1)]
    series = []
    for policy in policies:
        for layer in (0, 1):
            slots = Slots(torch.zeros(1, 3, 20_000, 1), torch.zeros(1, 3, 20_000, 1), positions)
            lengths = torch.tensor([20_000], dtype=torch.int32)
            series.extend(policy.score(Observation(slots=slots, new=None, num_new=1, lengths=lengths, layer=layer))[0])
    series.extend([series[0].roll(1), series[0].roll(4)])
    correlation = torch.corrcoef(torch.stack(series)) - torch.eye(len(series))
    assert correlation.abs().max() < 0.04


def test_random_worth_belongs_to_the_position_wherever_it_stands_and_whoever_is_beside():
    positions = torch.arange(50).expand(1, 2, -1)
    shuffled = torch.stack([positions[0].flip(-1), positions[0].roll(7, -1)])
    worth, others = hashed_uniform(positions, 3), hashed_uniform(shuffled, 3)
    assert torch.equal(others[0], worth[0].flip(-1))
    assert torch.equal(others[1], worth[0].roll(7, -1))


def test_random_takes_any_whole_number_as_its_seed():
    run = run_of("random", (9,), {"seed": 0})
    worths = [drive(make_policy("random", seed=seed), [run])[0] for seed in (2**80 + 3, 2**40, -1, 1)]
    assert len({tuple(worth.flatten().tolist()) for worth in worths}) == 4


# lagkv


def test_lagkv_survives_a_channel_that_never_changes_in_the_next_partition():
    run = run_of("lagkv", (12,), {"lag": 4, "sinks": 0})
    run.keys[:, 4:8, 2] = 1.5
    (got,) = drive(make_policy("lagkv", lag=4, sinks=0), [run])
    assert not got.isnan().any()
    assert got[0, :8].view(2, 4).sort(-1).values.tolist() == [[0.0, 0.25, 0.5, 0.75]] * 2


def test_lagkv_of_equal_worths_ranks_the_newest_first():
    run = run_of("lagkv", (256,), {"lag": 128, "sinks": 0})
    same = replace(run, keys=run.keys[:, :1].expand(-1, 256, -1), values=run.values[:, :1].expand(-1, 256, -1))
    (got,) = drive(make_policy("lagkv", lag=128, sinks=0), [same])
    assert got[:, :128].tolist() == [[i / 128 for i in range(128)]] * H


# snapkv


def test_snapkvs_window_and_kernel_are_checked():
    for options in ({"window": 0}, {"kernel": 0}, {"kernel": 4}):
        with pytest.raises(ValueError, match="window must be positive and kernel odd"):
            make_policy("snapkv", **options)


def test_snapkv_in_decoding_forgets_the_prompt_in_some_windows():
    run = run_of("snapkv", (10, *[1] * 60), {})
    (got,) = drive(make_policy("snapkv", window=4, kernel=3), [run])
    # a moving average of rows that each add up to one
    assert torch.allclose(got.sum(-1), torch.ones(H), atol=1e-3)


# expected attention


@pytest.mark.parametrize("horizon", [1, 6])
def test_expected_attention_is_the_mean_over_queries_drawn_from_the_gaussian(horizon):
    options = {"horizon": horizon, "sinks": 0, "epsilon": 0.0}
    run = run_of("expected_attention", (15,), options)
    (got,) = drive(make_policy("expected_attention", **options), [run])
    turn = sum(rotation(ANGLE, 15 + step) for step in range(horizon)) / horizon
    generator = torch.Generator().manual_seed(0)
    for head in range(H):
        expected = torch.zeros(15, dtype=torch.float64)
        for member in range(G):
            plain = torch.stack([rotation(ANGLE, -t) @ run.queries[head, member, t].double() for t in range(15)])
            spread = torch.linalg.cholesky(torch.cov(plain.T, correction=0) + 1e-9 * torch.eye(D))
            drawn = plain.mean(0) + torch.randn(200_000, D, generator=generator, dtype=torch.float64) @ spread.T
            products = ((drawn @ turn.T) @ run.keys[head].double().T * SCALE).exp().mean(0)
            expected += products / products.sum() / G
        assert torch.allclose((got[head] / run.values[head].norm(dim=-1)).double(), expected, rtol=0.05)


def test_a_rotation_that_also_scales_changes_nothing_for_the_same_queries():
    """Long-context rotations multiply both tables; the queries seen carry that factor already."""
    run = run_of("expected_attention", (15, 1, 5), {})
    policy = make_policy("expected_attention", horizon=5)
    (plain,), (scaled,) = drive(policy, [run]), drive(policy, [run], rotary=lambda at: rotary(at, 1.3))
    assert torch.allclose(plain, scaled, rtol=1e-4)


def test_rotating_back_undoes_rotating():
    x = torch.randn(3, 7, D)
    cos, sin = rotary(torch.arange(7))
    assert torch.allclose(rotate(rotate(x, cos, sin), cos, -sin), x, atol=1e-6)
    assert not torch.allclose(rotate(x, cos, sin), x, atol=1e-2)


def test_rotating_is_a_multiplication_by_the_rotation_matrix_and_leaves_further_dimensions():
    x = torch.randn(7, D + 3)
    turned = rotate(x, *rotary(torch.arange(7)))
    for t in range(7):
        assert torch.allclose(turned[t, :D], rotation(ANGLE, t).float() @ x[t, :D], atol=1e-5)
    assert torch.equal(turned[:, D:], x[:, D:])


# observations


def test_an_observation_reads_and_writes_its_new_tokens_behind_and_in_holes():
    slots = empty_slots(make_policy("knorm"), 1, torch.float32)
    at = torch.arange(5, dtype=torch.int32).expand(1, H, -1)
    slots.append(torch.randn(1, H, 5, D), torch.randn(1, H, 5, DV), at)
    lengths = torch.tensor([5], dtype=torch.int32)
    behind = Observation(slots=slots, new=None, num_new=2, lengths=lengths, layer=0)
    index = torch.tensor([[[1], [4]]])
    filled = Observation(slots=slots, new=index, num_new=1, lengths=lengths, layer=0)
    assert torch.equal(behind.new_keys, slots.keys[:, :, 3:]) and torch.equal(behind.new_values, slots.values[:, :, 3:])
    assert filled.new_positions.tolist() == [[[1], [4]]]
    assert torch.equal(filled.new_keys[0, :, 0], torch.stack([slots.keys[0, 0, 1], slots.keys[0, 1, 4]]))
    behind.put("knorm", torch.tensor([[[1.0, 2], [3, 4]]]))
    filled.put("knorm", torch.tensor([[[5.0], [6]]]))
    assert slots.side("knorm").tolist() == [[[0, 5, 0, 1, 2], [0, 0, 0, 3, 6]]]


# names


def test_policies_are_made_by_name_with_options_and_passed_through():
    policy = make_policy("snapkv", window=8)
    assert type(policy) is POLICIES["snapkv"] and policy.window == 8
    assert make_policy(policy) is policy
    with pytest.raises(ValueError, match=r"\['window'\] go with a policy's name"):
        make_policy(policy, window=3)


@every_name
def test_policies_are_frozen_settings(name):
    policy = make_policy(name)
    assert policy == make_policy(name) and hash(policy) == hash(make_policy(name))
    with pytest.raises(AttributeError):
        policy.anything = 1


def test_an_unknown_policy_is_refused_with_the_near_names_and_all():
    with pytest.raises(
        ValueError, match="unknown policy 'tovva'; did you mean tova\\? Choose one of: random, "
    ) as refused:
        make_policy("tovva")
    assert all(name in str(refused.value) for name in POLICIES)


def test_nearest_names_come_first_and_all_follow():
    assert nearest("tovva", ["tova", "h2o"]) == "did you mean tova? Choose one of: tova, h2o"
    assert (
        nearest("snapk", ["snapkv", "snap", "h2o"]) == "did you mean snapkv or snap? Choose one of: snapkv, snap, h2o"
    )
    assert nearest("zzz", iter(["tova", "h2o"])) == "Choose one of: tova, h2o"
    assert nearest("", ["tova"]) == "Choose one of: tova"


def test_a_policy_sees_the_scale_of_a_model_that_sets_its_own(tiny):
    model = tiny("gemma3", query_pre_attn_scalar=64)
    policy, log = recorded(make_policy("tova"))
    kvkeep.prefill(model, tokens(30), KVCache(model, policy=policy, budget=24))
    assert {seen.scale for (seen,) in log.values()} == {64**-0.5}
