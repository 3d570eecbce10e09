"""One batch for all policies answers as each policy does alone."""

import pytest
import torch
from named import policy_named
from torch import Tensor

import kvkeep
from kvkeep import POLICIES, CacheGroup, KVCache
from kvkeep.evaluate.answers import answer_together
from kvkeep.evaluate.watching import watched
from kvkeep.policies import make_policy

ARMS = [(policy, budget) for policy in POLICIES for budget in (40, 0.25)]


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(seed))


PROMPT, FOLLOW_UP, FUTURE = tokens(150), tokens(20, 1), tokens(12, 2)


def members(model) -> list[KVCache]:
    return [KVCache(model)] + [
        KVCache(model, policy=policy_named(policy, model), budget=budget) for policy, budget in ARMS
    ]


def fill(model, cache: KVCache) -> Tensor:
    """Logits behind the prompt, which the cache has read by itself."""
    future = FUTURE if "future" in cache.policy.needs else None
    return kvkeep.prefill(model, PROMPT, cache, future=future).logits[:, -1]


def alone(model, cache: KVCache, follow_up: Tensor, steps: int) -> list[int]:
    fill(model, cache)
    read = torch.cat([PROMPT, follow_up], 1)
    return kvkeep.generate(model, read, cache=cache, max_new_tokens=steps, do_sample=False)[0, read.shape[1] :].tolist()


def together(model, caches: list[KVCache], follow_up: Tensor = FOLLOW_UP, steps: int = 8, **options):
    return answer_together(model, caches, PROMPT, follow_up, future=FUTURE, max_new_tokens=steps, **options)


def held(cache: KVCache) -> list[Tensor]:
    return [layer.slots.positions.sort(-1).values for layer in cache.managed]


def holds_the_same(one: KVCache, other: KVCache) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(held(one), held(other), strict=True))


@pytest.mark.parametrize(("family", "follow"), [("llama", 20), ("llama", 1), ("qwen3", 20), ("gemma3", 20)])
def test_a_group_answers_as_each_member_does_alone(tiny, family, follow):
    model, follow_up = tiny(family), FOLLOW_UP[:, :follow]
    caches, others = members(model), members(model)
    for answer, cache, other in zip(together(model, caches, follow_up), caches, others, strict=True):
        assert answer.tokens == alone(model, other, follow_up, 8), other
        assert holds_the_same(cache, other), other


@pytest.mark.parametrize("chunk", (1, 32))
def test_a_prompt_in_chunks_leaves_what_each_member_keeps_of_it_alone(tiny, chunk):
    model = tiny("llama")
    caches, others = (
        [KVCache(model)]
        + [
            KVCache(model, policy=policy, budget=budget)
            for policy, budget in (("tova", 40), ("h2o", "30%"), ("lorekv", 60), ("qevict", 60), ("oracle", 40))
        ]
        for _ in range(2)
    )
    answers = together(model, caches, steps=4, chunk=chunk)
    for answer, cache, other in zip(answers, caches, others, strict=True):
        future = FUTURE if "future" in other.policy.needs else None
        kvkeep.prefill(model, PROMPT, other, chunk=chunk, future=future)
        read = torch.cat([PROMPT, FOLLOW_UP], 1)
        alone = kvkeep.generate(model, read, cache=other, max_new_tokens=4, do_sample=False)[0, read.shape[1] :]
        assert answer.tokens == alone.tolist(), other
        assert holds_the_same(cache, other), other


@pytest.mark.parametrize("name", ("h2o", "lagkv", "lorekv", "qevict"))
def test_a_prompt_is_shown_once_to_a_policy_with_several_budgets(tiny, name):
    model, shown = tiny("llama"), []
    policy = watched(make_policy(name), seen=shown.append)
    caches = [KVCache(model, policy=policy, budget=budget) for budget in (40, 60, "50%", 200)]
    with kvkeep.attach(model), torch.no_grad():
        model(PROMPT, **{kvkeep.cache_argument(model): CacheGroup(caches)})
    # lorekv looks at the futures too
    prompts = [seen for seen in shown if seen.futures is None and not seen.ahead]
    # 200 slots lose nothing, so nobody awaits a future there
    assert len(prompts) == len(caches[0].managed) * (2 if name == "lorekv" else 1)
    for cache in caches:
        other = KVCache(model, policy=name, budget=cache.budget)
        fill(model, other)
        assert holds_the_same(cache, other), cache


def test_without_a_follow_up_the_first_token_is_that_of_the_prompt(tiny):
    model, cache = tiny("llama"), KVCache(tiny("llama"), policy="knorm", budget=40)
    first = int(fill(model, KVCache(model)).argmax())
    assert together(model, [KVCache(model), cache], FOLLOW_UP[:, :0], steps=1)[1].tokens == [first]


def test_an_answer_stops_before_its_end_and_the_others_go_on_unchanged(tiny):
    model = tiny("llama")
    whole = [answer.tokens for answer in together(model, members(model), steps=12)]
    # a token that some members write and others do not
    end = next(token for token in whole[1] if any(token not in answer for answer in whole))
    stopped = [answer.tokens for answer in together(model, members(model), steps=12, ends={end})]
    assert stopped == [answer[: answer.index(end)] if end in answer else answer for answer in whole]


@pytest.mark.parametrize("family", ("llama", "gemma3"))
def test_members_may_have_read_the_prompt_each_by_itself(tiny, family):
    model = tiny(family)
    fresh, read = ([KVCache(model, policy=policy, budget=40) for policy in ("snapkv", "oracle")] for _ in range(2))
    for cache in read:
        fill(model, cache)
    group = CacheGroup(read)
    with kvkeep.attach(model), torch.no_grad():
        argument = {kvkeep.cache_argument(model): group}
        logits = model(FOLLOW_UP.expand(2, -1), **argument).logits[:, -1]
    expected = [answer.tokens[0] for answer in together(model, fresh)]
    assert logits.argmax(-1).tolist() == expected


def test_what_each_cache_held_is_measured_behind_the_prompt(tiny):
    model = tiny("llama")
    caches = [KVCache(model), KVCache(model, policy="tova", budget=40)]
    full, evicted = together(model, caches)
    # 150 tokens, 3 layers, keys and values of 2 heads of 16 numbers of 4 bytes
    assert full.full_bytes == evicted.full_bytes == 150 * 3 * 2 * 2 * 16 * 4
    assert (full.kept, evicted.kept) == (150, 40)
    alone = KVCache(model, policy="tova", budget=40)
    fill(model, alone)
    assert evicted.cache_bytes == alone.report().bytes < full.full_bytes / 3


def test_tokens_held_as_codes_are_kept(tiny):
    model = tiny("llama")
    (answer,) = together(model, [KVCache(model, policy="tiered(h2o)", budget=40)])
    alone = KVCache(model, policy="tiered(h2o)", budget=40)
    fill(model, alone)
    report = alone.report()
    assert report.coded > 0 and answer.kept == report.held > report.kept


def test_an_oracle_without_a_future_is_refused(tiny):
    with pytest.raises(ValueError, match="needs the future"):
        answer_together(
            tiny("llama"), [KVCache(tiny("llama"), policy="oracle", budget=40)], PROMPT, FOLLOW_UP, max_new_tokens=1
        )


@pytest.mark.parametrize("family", ("llama", "gemma3"))
def test_selected_members_decode_as_they_would_have_in_the_whole_group(tiny, family):
    model, step = tiny(family), tokens(1, 5)
    argument = kvkeep.cache_argument(model)

    def logits(rows: list[int]) -> Tensor:
        group = CacheGroup([KVCache(model, policy=policy, budget=40) for policy in ("tova", "knorm", "h2o")])
        with kvkeep.attach(model), torch.no_grad():
            model(PROMPT, **{argument: group})
            model(FOLLOW_UP.expand(3, -1), **{argument: group})
            return model(step.expand(len(rows), -1), **{argument: group.select(rows)}).logits[:, -1]

    assert torch.allclose(logits([2, 0]), logits([0, 1, 2])[[2, 0]], atol=1e-5)


def test_groups_that_cannot_be_are_refused(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="at least one member"):
        CacheGroup([])
    read = KVCache(model)
    fill(model, read)
    with pytest.raises(ValueError, match=r"seen \[0, 150\] tokens"):
        CacheGroup([KVCache(model), read])


def test_one_row_cannot_stand_for_members_that_hold_different_tokens(tiny):
    model = tiny("llama")
    caches = [KVCache(model, policy=policy, budget=40) for policy in ("tova", "knorm")]
    together(model, caches)
    with kvkeep.attach(model), pytest.raises(ValueError, match="give rows to each"):
        model(FOLLOW_UP, **{kvkeep.cache_argument(model): CacheGroup(caches)})
