"""LORE-KV looks ahead when it must, at the model's own futures, shares the prompt's slots, and leaves nothing behind.

B sequences, H KV heads, G query heads per KV head, M futures, T steps, D head size.
"""

import copy
import warnings
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvkeep
from kvkeep import KVCache
from kvkeep.attention import attend_shared
from kvkeep.branches import Branches
from kvkeep.evaluate.answers import answer_together
from kvkeep.lookahead import draw
from kvkeep.policies import LoreKV, Observation, Projection, make_policy
from kvkeep.policies.base import hashed_uniform
from kvkeep.policies.deletion import Asked, attention_mass, deletion_cost
from kvkeep.slots import EMPTY, Slots

BUDGET = 40


def tokens(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def cache_for(model, budget=BUDGET, **options) -> KVCache:
    return KVCache(model, policy=LoreKV(**{"surplus": 1, **options}), budget=budget)


def held(cache: KVCache) -> list[Tensor]:
    return [layer.slots.positions.sort(-1).values for layer in cache.managed]


def same(one: KVCache, other: KVCache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(held(one), held(other), strict=True))


class Forwards:
    """Rows of every forward of a model, in order, while it is watched."""

    def __init__(self, model):
        self.rows: list[int] = []
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model, args, kwargs) -> None:
        self.rows.append(len(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))

    def __enter__(self) -> "Forwards":
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything under it makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given, made = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (args, result))
        # views are not made
        there = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor.numel() for tensor in made if tensor.untyped_storage().data_ptr() not in there]
        self.elements = max(self.elements, *new, 0)
        return result


def watched(policy: LoreKV) -> tuple[LoreKV, dict[int, list[Observation]]]:
    """The same policy, and what it saw in each layer when it was shown the future."""
    log: dict[int, list[Observation]] = {}

    @dataclass(frozen=True, kw_only=True)
    class Watched(LoreKV):
        def track(self, seen: Observation) -> None:
            if seen.futures is not None:
                slots = Slots(seen.slots.keys.clone(), seen.slots.values.clone(), seen.slots.positions.clone())
                log.setdefault(seen.layer, []).append(replace(seen, slots=slots))
            LoreKV.track(self, seen)

    return Watched(**{field.name: getattr(policy, field.name) for field in fields(policy)}), log


# when it looks ahead


def test_a_prompt_within_its_budget_is_read_once_and_nothing_else_is_done(tiny):
    model = tiny("llama")
    with Forwards(model) as forwards:
        kvkeep.prefill(model, tokens(BUDGET), cache_for(model))
    assert forwards.rows == [1]


def test_a_prompt_over_budget_is_followed_by_one_forward_of_all_futures_a_step(tiny):
    model = tiny("llama")
    with Forwards(model) as forwards:
        kvkeep.prefill(model, tokens(90, batch=2), cache_for(model, futures=3, steps=5))
    assert forwards.rows == [2] + [6] * 5


@pytest.mark.parametrize(("chunk", "before"), [(32, 3), (89, 2), (1, 90)])
def test_a_prompt_in_chunks_looks_ahead_once_at_its_end(tiny, chunk, before):
    model = tiny("llama")
    with Forwards(model) as forwards:
        kvkeep.prefill(model, tokens(90), cache_for(model, steps=2), chunk=chunk)
    assert forwards.rows == [1] * before + [4] * 2


def test_every_later_turn_over_budget_looks_ahead_anew_and_decoding_does_not(tiny):
    model, cache = tiny("llama"), cache_for(tiny("llama"), steps=2)
    with Forwards(model) as forwards:
        kvkeep.prefill(model, tokens(30), cache)
        kvkeep.prefill(model, tokens(30, 1), cache)
        kvkeep.prefill(model, tokens(1, 2), cache)
        kvkeep.prefill(model, tokens(7, 3), cache)
    assert forwards.rows == [1, 1, 4, 4, 1, 1, 4, 4]


def test_no_look_ahead_where_little_must_go_nor_for_such_rows_of_a_batch(tiny):
    model, batch, mask = tiny("llama"), tokens(90, batch=2), torch.ones(2, 90, dtype=torch.long)
    mask[0, :25] = 0
    together, alone = cache_for(model, steps=2, surplus=26), cache_for(model, steps=2, surplus=26)
    with Forwards(model) as forwards:
        kvkeep.prefill(model, batch[:1, 25:], alone)
        assert forwards.rows == [1]
        kvkeep.prefill(model, batch, together, attention_mask=mask)
    assert forwards.rows == [1, 2, 8, 8]
    for one, both in zip(held(alone), held(together), strict=True):
        assert torch.equal(one[0], both[0])


def test_the_attached_model_alone_does_it_too(tiny):
    model, plain, prefilled = tiny("llama"), cache_for(tiny("llama")), cache_for(tiny("llama"))
    with torch.no_grad(), kvkeep.attach(model):
        model(tokens(90), **{kvkeep.cache_argument(model): plain})
    kvkeep.prefill(model, tokens(90), prefilled)
    assert same(plain, prefilled)
    assert not model._forward_hooks


def test_a_part_of_the_model_cannot_look_ahead_and_that_is_said(tiny):
    model, cache = tiny("llama"), cache_for(tiny("llama"))
    with torch.no_grad(), kvkeep.attach(model):
        model.model(tokens(90), **{kvkeep.cache_argument(model): cache})
        with pytest.raises(RuntimeError, match=r"the whole model must run: call kvkeep\.generate"):
            model.model(tokens(1), **{kvkeep.cache_argument(model): cache})


def test_a_model_without_logits_is_refused(tiny):
    model, cache = tiny("llama").model, cache_for(tiny("llama"))
    with torch.no_grad(), kvkeep.attach(model), pytest.raises(RuntimeError, match="needs the logits of LlamaModel"):
        model(tokens(90), **{kvkeep.cache_argument(model): cache})


def test_without_futures_the_window_alone_decides(tiny):
    model = tiny("llama")
    alone, weightless = cache_for(model, futures=0), cache_for(model, weight=0.0)
    with Forwards(model) as forwards:
        kvkeep.prefill(model, tokens(90), alone)
    assert forwards.rows == [1]
    kvkeep.prefill(model, tokens(90), weightless)
    assert same(alone, weightless)
    whole = cache_for(model)
    kvkeep.prefill(model, tokens(90), whole)
    assert not same(alone, whole)


# what it sees


@pytest.mark.parametrize("family", ("llama", "qwen3", "gemma3"))
@pytest.mark.parametrize("side", ("none", "left", "right"))
def test_a_future_reads_what_the_full_cache_would_have_read(tiny, family, side):
    """The likeliest future is known: greedy decoding under the full cache; its queries must be the same."""
    if family == "gemma3" and side == "right":
        pytest.skip("sliding windows hold the padding on the right")
    model, prompts = tiny(family), [tokens(90), tokens(61, 1)]
    batch, mask = torch.zeros(2, 90, dtype=torch.long), torch.zeros(2, 90, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        where = slice(90 - prompt.shape[1], None) if side != "right" else slice(prompt.shape[1])
        batch[row, where], mask[row, where] = prompt[0], 1
    policy, log = watched(LoreKV(kept=True, steps=4, surplus=1))
    if side == "none":
        kvkeep.prefill(model, prompts[0], KVCache(model, policy=policy, budget=BUDGET))
    else:
        kvkeep.prefill(model, batch, KVCache(model, policy=policy, budget=BUDGET), attention_mask=mask)
    for row, prompt in enumerate(prompts[:1] if side == "none" else prompts):
        answer = model.generate(prompt, max_new_tokens=5, do_sample=False)[:, prompt.shape[1] :]
        for layer, expected in queries_of(model, prompt, answer[:, :4]).items():
            got = log[layer][0].futures
            assert torch.allclose(got.queries[row], expected[0], atol=1e-4)
            assert got.weights[row].tolist() == [0.25] * 4


def queries_of(model, prompt: Tensor, answer: Tensor) -> dict[int, Tensor]:
    """Queries of the answer's tokens behind the whole prompt, in every managed layer."""
    seen: dict[int, Tensor] = {}

    @dataclass(frozen=True, kw_only=True)
    class Spy(LoreKV):
        def track(self, look: Observation) -> None:
            seen[look.layer] = look.queries

    cache = KVCache(model, policy=Spy(futures=0), budget=10_000)
    kvkeep.prefill(model, prompt, cache)
    kvkeep.prefill(model, answer, cache)
    return seen


def test_futures_hold_their_own_tokens_alone_and_never_copy_the_prompt(tiny, monkeypatch):
    model, made, largest = tiny("llama"), [], Largest()

    class Kept(Branches):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    def attend(*args):
        with largest:
            return attend_shared(*args)

    monkeypatch.setattr(kvkeep.lookahead, "Branches", Kept)
    monkeypatch.setattr(kvkeep.branches, "attend_shared", attend)
    kvkeep.prefill(model, tokens(90), cache_for(model, futures=3, steps=5))
    for layer in made[0].layers:
        own = [array.untyped_storage().nbytes() for array in vars(layer).values() if isinstance(array, Tensor)]
        # keys, values and queries of 3 futures of 5 tokens: 2, 2 and 4 heads of 16 numbers of 4 bytes
        assert sorted(own) == [3 * 5 * heads * 16 * 4 for heads in (2, 2, 4)]
    # logits of 3 futures and 2 query heads a KV head; keys are 2 * 90 * 16
    assert largest.elements == 2 * 3 * 2 * 90


def test_sampled_tokens_follow_the_models_distribution():
    logits = torch.tensor([[2.0, -torch.inf, 0.0, 1.0, -1.0]])
    uniform = hashed_uniform(torch.arange(40_000).view(1, 1, -1), 0).flatten()
    step = draw(logits.expand(40_000, -1), uniform)
    shares = torch.bincount(step.tokens, minlength=5) / 40_000
    assert torch.allclose(shares, logits.softmax(-1)[0], atol=0.01)
    # what likely draws exceed the mean by, unlikely ones fall short of
    assert abs(float(step.likelihood.mean())) < 0.02
    assert torch.allclose(step.entropy, torch.distributions.Categorical(logits=logits).entropy().expand(40_000))


def test_what_cannot_come_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]]).expand(4, -1)
    step = draw(logits, torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-24]))
    assert step.tokens.tolist() == [1, 1, 3, 3]
    assert step.entropy.tolist() == pytest.approx([0.6931472] * 4)


def test_the_callers_random_numbers_are_untouched_and_the_same_seed_looks_at_the_same(tiny):
    model, prompt = tiny("llama"), tokens(90)
    torch.manual_seed(1)
    expected = torch.rand(3)
    caches = [cache_for(model, seed=seed) for seed in (0, 0, 1)]
    for cache in caches:
        torch.manual_seed(1)
        kvkeep.prefill(model, prompt, cache)
        assert torch.equal(torch.rand(3), expected)
    assert same(caches[0], caches[1]) and not same(caches[0], caches[2])


def test_a_future_ends_where_the_models_text_would(tiny):
    model = copy.deepcopy(tiny("llama"))
    policy, log = watched(LoreKV(futures=8, steps=8, reliability="uniform", surplus=1))
    kvkeep.prefill(model, tokens(90), KVCache(model, policy=policy, budget=BUDGET))
    endless = log.pop(0)[0].futures.weights.view(8, 8)
    assert torch.allclose(endless, torch.full((8, 8), 1 / 64))
    # tokens of which some futures have one
    model.generation_config.eos_token_id = list(range(2, 20))
    kvkeep.prefill(model, tokens(90), KVCache(model, policy=policy, budget=BUDGET))
    weights = log[0][0].futures.weights.view(8, 8)
    steps = (weights > 0).sum(1)
    assert set(steps.tolist()) - {0, 8} and (steps > 0).sum() > 1
    for row, count in zip(weights, steps.tolist(), strict=True):
        # an equal part of the future's share up to its end, nothing behind it
        share = 1 / int((steps > 0).sum())
        assert torch.allclose(row, torch.tensor([share / max(1, count)] * count + [0.0] * (8 - count)))


def test_alike_futures_do_not_disagree_and_unlike_ones_do(tiny):
    told: list[Tensor] = []

    @dataclass(frozen=True, kw_only=True)
    class Told(LoreKV):
        def trust(self, likelihood: Tensor, entropy: Tensor, disagreement: Tensor) -> Tensor:
            told.append(disagreement)
            return LoreKV.trust(self, likelihood, entropy, disagreement)

    sure = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        sure.lm_head.weight.mul_(1e4)
    for model in (sure, tiny("llama")):
        kvkeep.prefill(model, tokens(90), KVCache(model, policy=Told(reliability="D"), budget=BUDGET))
    assert told[0].abs().max() < 1e-5 and told[1].min() > 0.01


def test_disagreement_is_one_minus_the_cosine_with_the_others(tiny):
    model, told = tiny("llama"), []

    @dataclass(frozen=True, kw_only=True)
    class Told(LoreKV):
        def trust(self, likelihood: Tensor, entropy: Tensor, disagreement: Tensor) -> Tensor:
            told.append(disagreement[0])
            return torch.ones_like(likelihood)

        def track(self, seen: Observation) -> None:
            if seen.futures is not None:
                queries.append(seen.futures.queries[0].unflatten(1, (3, 4)))
            LoreKV.track(self, seen)

    queries: list[Tensor] = []
    kvkeep.prefill(model, tokens(90), KVCache(model, policy=Told(futures=3, steps=4), budget=BUDGET))
    every = torch.stack(queries)
    for future in range(3):
        others = [torch.cosine_similarity(every[:, :, future], every[:, :, m], dim=-1) for m in range(3) if m != future]
        assert float(told[0][future]) == pytest.approx(1 - float(torch.stack(others).mean()), abs=1e-5)


def test_trust_is_the_papers_softmax():
    likelihood, entropy = torch.tensor([[0.1, -0.2, 0.3]]), torch.tensor([[1.0, 2.0, 0.5]])
    disagreement = torch.tensor([[0.2, 0.5, 0.2]])
    # mean 0.3, deviation 0.1 * sqrt(2)
    standard = torch.tensor([[-1.0, 2.0, -1.0]]) / 2**0.5
    for name, expected in {
        "E": likelihood - 1.3 * entropy,
        "D": likelihood - entropy - 0.3 * standard,
        "uniform": torch.zeros(1, 3),
    }.items():
        got = LoreKV(reliability=name).trust(likelihood, entropy, disagreement)
        assert torch.allclose(got, expected.softmax(-1))
    two = LoreKV(reliability="D").trust(likelihood[:, :2], entropy[:, :2], disagreement[:, :2])
    assert torch.allclose(two, (likelihood - entropy)[:, :2].softmax(-1))


# what it keeps


@pytest.mark.parametrize("objective", ["projected", "unprojected", "joint", "mass", "response"])
def test_worth_is_that_of_the_window_and_the_weighted_worth_of_the_futures(tiny, objective):
    model = tiny("llama")
    policy, log = watched(LoreKV(surplus=1, objective=objective, weight=0.5, guard=0.0, futures=2, steps=3))
    worths = scored(policy)
    kvkeep.prefill(model, tokens(90), KVCache(model, policy=policy, budget=BUDGET))
    for index, layer in enumerate(model.model.layers):
        [seen] = log[index]
        end = torch.full((1, 6), 89)
        window = Asked(seen.queries, seen.query_positions, torch.full((1, 32), 1 / 32))
        futures = Asked(seen.futures.queries, end, seen.futures.weights)
        assert seen.query_positions.tolist() == [list(range(58, 90))]
        assert float(seen.futures.weights.sum()) == pytest.approx(1)
        projection = Projection(layer.self_attn.o_proj.weight, 2, 2)
        parts = [worth_by(objective, seen, asked, projection) for asked in (window, futures)]
        expected = 0.5 * parts[1] + (0 if objective == "response" else parts[0])
        assert torch.allclose(worths[index], expected, rtol=1e-3, atol=1e-6 * float(expected.amax()))


def scored(policy: LoreKV) -> dict[int, Tensor]:
    """What the policy will say of the prompt in each layer."""
    worths: dict[int, Tensor] = {}

    def score(self: LoreKV, seen: Observation) -> Tensor:
        return worths.setdefault(seen.layer, LoreKV.score(self, seen).clone())

    type(policy).score = score  # type: ignore[method-assign]
    return worths


def worth_by(objective: str, seen: Observation, asked: Asked, projection: Projection) -> Tensor:
    if objective == "mass":
        return attention_mass(seen.slots, asked, seen.scale, chunk=4)
    joint = objective == "joint"
    gram = projection.gram(joint=joint, dtype=torch.float64 if joint else torch.float32)
    return deletion_cost(
        seen.slots,
        asked,
        seen.scale,
        chunk=4,
        gram=None if objective == "unprojected" else gram,
        guard=0.0,
        reserve=seen.slots.positions < 0,
        epsilon=1e-6,
    ).float()


@pytest.mark.parametrize(("objective", "asked"), [("projected", 32 + 2 * 3), ("response", 2 * 3)])
def test_the_response_side_alone_asks_no_query_of_the_prompt(tiny, monkeypatch, objective, asked):
    found = []

    def counted(slots: Slots, queries: Asked, *args, **options) -> Tensor:
        found.append(queries.queries.shape[2])
        return deletion_cost(slots, queries, *args, **options)

    monkeypatch.setattr("kvkeep.policies.lorekv.deletion_cost", counted)
    model = tiny("llama")
    policy = LoreKV(surplus=1, objective=objective, futures=2, steps=3)
    kvkeep.prefill(model, tokens(90), KVCache(model, policy=policy, budget=BUDGET))
    assert found == [asked] * len(model.model.layers)


@pytest.mark.parametrize("objective", ["projected", "response"])
def test_a_sequence_within_its_budget_is_judged_in_a_batch_as_it_is_alone(tiny, objective):
    model, short, long = tiny("llama"), tokens(30), tokens(90, 1)
    batch, mask = torch.zeros(2, 90, dtype=torch.long), torch.ones(2, 90, dtype=torch.long)
    batch[0, 60:], batch[1], mask[0, :60] = short[0], long[0], 0
    together, alone = (cache_for(model, objective=objective) for _ in range(2))
    kvkeep.prefill(model, batch, together, attention_mask=mask)
    kvkeep.prefill(model, short, alone)
    for one, both in zip(alone.managed, together.managed, strict=True):
        worth = [layer.slots.side("lorekv") for layer in (one, both)]
        there = both.slots.positions[0] != EMPTY
        assert torch.allclose(worth[0][0], worth[1][0][there].view(2, 30), rtol=1e-3, atol=1e-6)


def test_one_policy_at_several_budgets_judges_the_prompt_once(tiny, monkeypatch):
    model, judged, judge = tiny("llama"), [], LoreKV._judge
    monkeypatch.setattr(LoreKV, "_judge", lambda self, seen: (judged.append(seen.layer), judge(self, seen))[1])
    arms = [cache_for(model, budget) for budget in (30, 40, 50)]
    answer_together(model, arms, tokens(120), tokens(0), max_new_tokens=1)
    assert judged == [0, 1, 2]
    for arm, budget in zip(arms, (30, 40, 50), strict=True):
        alone = cache_for(model, budget)
        kvkeep.prefill(model, tokens(120), alone)
        assert same(arm, alone)


@pytest.mark.parametrize("family", ("llama", "gemma3"))
def test_arms_of_a_ladder_share_one_look_ahead_and_answer_as_they_do_alone(tiny, family):
    model, prompt, follow_up = tiny(family), tokens(120), tokens(9, 1)
    names = ("lorekv", "lorekv(futures=1)", "lorekv(steps=3)", "lorekv(futures=0)", "lorekv(objective=mass)", "snapkv")
    arms = [KVCache(model, policy=name, budget=BUDGET) for name in names]
    with Forwards(model) as forwards:
        answers = answer_together(model, arms, prompt, follow_up, max_new_tokens=3)
    # the prompt with the largest look, the question, which is too short for one, the answer
    assert forwards.rows == [1] + [4] * 8 + [6] + [6] * 2
    for name, answer, arm in zip(names, answers, arms, strict=True):
        alone = KVCache(model, policy=name, budget=BUDGET)
        kvkeep.prefill(model, prompt, alone)
        read = torch.cat([prompt, follow_up], 1)
        expected = kvkeep.generate(model, read, cache=alone, max_new_tokens=3, do_sample=False)
        assert answer.tokens == expected[0, read.shape[1] :].tolist() and same(arm, alone)


# look-ahead that is kept


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_kept_answer_begins_as_the_full_caches_and_evicts_when_it_has_been_seen(tiny, dtype):
    model, prompt = copy.deepcopy(tiny("llama")).to(dtype), tokens(90)
    full = model.generate(prompt, max_new_tokens=24, do_sample=False)
    cache, held_by_step = cache_for(model, kept=True, steps=6), []
    with Forwards(model) as forwards:
        hook = model.register_forward_hook(lambda *_: held_by_step.append(cache.report().kept))
        got = kvkeep.generate(model, prompt, cache=cache, max_new_tokens=24, do_sample=False)
        hook.remove()
    assert forwards.rows == [1] * 24
    # behind the prompt and each token of the look-ahead but the last the cache is whole
    assert held_by_step == [90, 91, 92, 93, 94, 95] + [BUDGET] * 18
    assert torch.equal(got[:, : 90 + 7], full[:, : 90 + 7])


def test_a_kept_look_ahead_evicts_by_the_answers_own_queries(tiny):
    model, prompt, steps = tiny("llama"), tokens(90), 5
    policy, log = watched(LoreKV(kept=True, steps=steps, surplus=1))
    cache = KVCache(model, policy=policy, budget=BUDGET)
    answer = kvkeep.generate(model, prompt, cache=cache, max_new_tokens=steps + 1, do_sample=False)[:, 90:]
    for layer, expected in queries_of(model, prompt, answer[:, :steps]).items():
        [seen] = log[layer]
        assert torch.allclose(seen.futures.queries, expected, atol=1e-4)
        assert seen.query_positions.tolist() == [list(range(58, 90))]
        assert seen.futures.positions.tolist() == [list(range(90, 90 + steps))]


def test_an_answer_shorter_than_the_look_ahead_evicts_at_its_end(tiny):
    model, cache = tiny("llama"), cache_for(tiny("llama"), kept=True)
    kvkeep.generate(model, tokens(90), cache=cache, max_new_tokens=3, do_sample=False)
    assert cache.report().kept == BUDGET and cache.get_seq_length() == 92
    kvkeep.generate(model, tokens(110), cache=cache_for(model, kept=True), max_new_tokens=1)


def test_a_kept_look_ahead_goes_on_over_turns_batches_beams_and_samples(tiny):
    model, lengths = tiny("llama"), (90, 61)
    rows = [tokens(length, length) for length in lengths]
    alone = [kvkeep.generate(model, row, cache=cache_for(model, kept=True), max_new_tokens=12) for row in rows]
    batch, mask = torch.zeros(2, 90, dtype=torch.long), torch.ones(2, 90, dtype=torch.long)
    batch[0], batch[1, 29:], mask[1, :29] = rows[0][0], rows[1][0], 0
    together = cache_for(model, kept=True)
    answers = kvkeep.generate(model, batch, cache=together, attention_mask=mask, max_new_tokens=12)
    assert [row[90:].tolist() for row in answers] == [a[0, n:].tolist() for a, n in zip(alone, lengths, strict=True)]
    more = torch.cat([answers, tokens(20, 5, batch=2)], 1)
    longer = torch.cat([mask, torch.ones(2, 32, dtype=torch.long)], 1)
    kvkeep.generate(model, more, cache=together, attention_mask=longer, max_new_tokens=12)
    assert together.report().kept == BUDGET
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}):
        cache = cache_for(model, kept=True)
        kvkeep.generate(model, rows[0], cache=cache, max_new_tokens=12, **options)
        assert cache.report().kept == BUDGET


# models whose outputs pass through more


def test_a_gate_before_the_projection_is_told_once_and_measured_before_it(tiny):
    model = copy.deepcopy(tiny("llama"))
    for layer in model.model.layers:
        layer.self_attn.add_module("gate_proj", torch.nn.Linear(64, 64))
    with pytest.warns(UserWarning, match="more than an output projection in layers") as told:
        gated = cache_for(model)
    assert len(told) == 1
    plain = cache_for(tiny("llama"), objective="unprojected")
    kvkeep.prefill(model, tokens(90), gated)
    kvkeep.prefill(tiny("llama"), tokens(90), plain)
    assert same(gated, plain)


def test_every_family_has_its_projections(tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3"):
            assert len(cache_for(tiny(family)).plan.projections) == len(cache_for(tiny(family)).managed)


def test_gates_inside_the_query_projection_are_seen():
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"] * 2,
        num_experts=2,
        num_experts_per_tok=1,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.warns(UserWarning, match=r"layers \[0, 1\]"):
        cache = KVCache(model, policy="lorekv", budget=BUDGET)
    kvkeep.prefill(model, tokens(60).clamp(max=63), cache)
    assert cache.report().kept == BUDGET


def test_a_configuration_has_no_projections_and_is_refused(tiny):
    with pytest.raises(ValueError, match="pass the model itself"):
        KVCache(tiny("llama").config, policy="lorekv", budget=BUDGET)


# options


def test_options_that_cannot_be_are_refused():
    for options, message in (
        ({"futures": -1}, "futures must be at least 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"objective": "projekted"}, "projected, unprojected"),
        ({"reliability": "F"}, "E, D, uniform"),
    ):
        with pytest.raises(ValueError, match=message):
            make_policy("lorekv", **options)
