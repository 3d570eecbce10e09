"""What a recorder says of a prompt is what the stock model's dense attention maps say.

L layers, H KV heads, G query heads per KV head, n prompt tokens, F futures.
"""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvkeep
from kvkeep import POLICIES, KVCache, cache_argument
from kvkeep.policies.learned import LearnedPolicy
from kvkeep.policies.tiered import TieredPolicy
from kvkeep.recorder import Branch, Item, Recorder
from kvkeep.selection import protected, survivors
from kvkeep.trace import Trace

N = 60


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def prompt(*branches: Branch, count: int = N) -> Item:
    return Item(source="text", split="train", name="0", token_ids=tokens(count), branches=branches)


GIVEN = Branch(tokens(9, seed=1))
GREEDY = Branch(tokens(0), 6)
BOTH = Branch(tokens(4, seed=2), 5)


def dense_importance(model, token_ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the first n tokens for all queries behind them, from the whole maps: largest head, mean, largest squared."""
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        maps = eager(input_ids=token_ids, output_attentions=True).attentions
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    weights = torch.stack([one[0].unflatten(0, (-1, group)) for one in maps])[..., n:, :n]
    return weights.amax(2).sum(-2), weights.mean(2).sum(-2), weights.amax(2).square().sum(-2)


def whole(trace: Trace, number: int) -> Tensor:
    """Prompt and one future."""
    return torch.cat([trace.token_ids, trace.future_ids[number, : trace.future_lengths[number]]])[None].long()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_importance_is_that_of_the_dense_maps(tiny, family):
    model = tiny(family)
    trace = Recorder(model).record(prompt(GIVEN, GREEDY, BOTH))
    for number in range(3):
        largest, mean, square = dense_importance(model, whole(trace, number), N)
        torch.testing.assert_close(trace.importance_max[number], largest, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(trace.importance_mean[number], mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(trace.importance_square[number], square, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_later_attention_is_that_of_the_prompts_own_dense_map(tiny, family):
    model = tiny(family)
    recorder = Recorder(model, policies=["tova"], delay=5)
    trace, plain = recorder.record(prompt(GREEDY)), Recorder(model, policies=["tova"]).record(prompt(GREEDY))
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        maps = eager(input_ids=tokens(N), output_attentions=True).attentions
    weights = torch.stack([maps[index][0].unflatten(0, (-1, 2)) for index in recorder.layers])
    for t in (0, 17, N - 6):
        torch.testing.assert_close(trace.later[..., t], weights[..., t + 5 :, t].mean(-1), atol=1e-5, rtol=1e-4)
    assert plain.later is None and torch.equal(trace.worths["tova"], plain.worths["tova"])
    assert torch.equal(trace.keys, plain.keys) and torch.equal(trace.importance_max, plain.importance_max)
    some = Recorder(model, layers=recorder.layers[1:2], heads=recorder.heads[-1:], delay=5).record(prompt(GREEDY))
    assert torch.equal(some.later, trace.later[1:2, -1:])


def test_a_delay_of_nothing_is_refused(tiny):
    with pytest.raises(ValueError, match="delay must be at least 1, got 0"):
        Recorder(tiny("llama"), delay=0)


def test_layers_with_a_window_are_left_out_and_forget_nothing_between_futures(tiny):
    model = tiny("gemma3")
    full = [place for place, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    recorder = Recorder(model)
    trace = recorder.record(prompt(GREEDY, GIVEN, BOTH))
    assert recorder.layers == full and trace.keys.shape[0] == len(full)
    for number in range(3):
        largest, *_ = dense_importance(model, whole(trace, number), N)
        torch.testing.assert_close(trace.importance_max[number], largest[full], atol=1e-5, rtol=1e-4)


def test_keys_and_values_are_the_stock_caches(tiny):
    model = tiny("llama")
    trace = Recorder(model).record(prompt(GREEDY))
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(N), **{cache_argument(model): stock})
    assert torch.equal(trace.keys, torch.cat([layer.keys for layer in stock.layers]).bfloat16())
    assert torch.equal(trace.values, torch.cat([layer.values for layer in stock.layers]).bfloat16())


def test_a_greedy_future_is_what_the_model_generates(tiny):
    model = tiny("llama")
    trace = Recorder(model).record(prompt(GREEDY, BOTH))
    for number, branch in enumerate((GREEDY, BOTH)):
        start = torch.cat([tokens(N), branch.given], dim=1)
        answer = model.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=branch.num_new, do_sample=False
        )
        assert torch.equal(whole(trace, number), answer)
    assert torch.equal(trace.token_ids, tokens(N)[0].int())


def test_the_prompt_is_read_once_for_all_futures(tiny, monkeypatch):
    model, lengths = tiny("llama"), []
    forward = model.forward

    def counted(*args, input_ids, **kwargs):
        lengths.append(input_ids.shape[1])
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr("kvkeep.model.cache_argument", lambda _: cache_argument(tiny("qwen3")))
    Recorder(model, policies=["tova", "h2o"]).record(prompt(GIVEN, GREEDY, BOTH))
    assert lengths == [N, 9, *[1] * 6, 4, *[1] * 5]


def test_a_future_is_the_same_alone_and_among_others(tiny):
    recorder = Recorder(tiny("llama"))
    together = recorder.record(prompt(GIVEN, BOTH, GREEDY))
    for number, branch in enumerate((GIVEN, BOTH, GREEDY)):
        alone = recorder.record(prompt(branch))
        assert torch.equal(whole(alone, 0), whole(together, number))
        assert torch.equal(alone.importance_max[0], together.importance_max[number])


def test_chosen_layers_and_heads_are_slices_of_everything(tiny):
    model = tiny("llama")
    every = Recorder(model, policies=["tova"]).record(prompt(BOTH))
    some = Recorder(model, layers=[2, 0], heads=[1], policies=["tova"]).record(prompt(BOTH))
    assert torch.equal(some.keys, every.keys[[0, 2]][:, [1]])
    assert torch.equal(some.values, every.values[[0, 2]][:, [1]])
    assert torch.equal(some.importance_max, every.importance_max[:, [0, 2]][:, :, [1]])
    assert torch.equal(some.importance_mean, every.importance_mean[:, [0, 2]][:, :, [1]])
    assert torch.equal(some.worths["tova"], every.worths["tova"][[0, 2]][:, [1]])


# by keys, values, queries and positions alone; learned ones would need weights for this model
READING = [
    name
    for name, policy in POLICIES.items()
    if policy.needs <= {"queries", "rotary"}
    and name != "pyramidkv"
    # learned ones would need weights for this model, and what tiers hold is not in slots alone
    and not issubclass(policy, LearnedPolicy | TieredPolicy)
]


@pytest.mark.parametrize("name", READING)
def test_a_recorded_worth_keeps_what_a_cache_with_that_policy_keeps(tiny, name):
    model, budget = tiny("llama"), 30
    trace = Recorder(model, policies=[name]).record(prompt(GREEDY))
    cache = KVCache(model, policy=name, budget=budget)
    kvkeep.prefill(model, tokens(N), cache)
    positions = torch.arange(N, dtype=torch.int32).expand(1, 2, N)
    guarded = protected(positions, torch.tensor([N]), sinks=4, recent=16)
    for layer, worth in zip(cache.managed, trace.worths[name], strict=True):
        kept = survivors(worth[None], positions, guarded, budget)
        held = layer.slots.positions[layer.slots.occupied].view(1, 2, -1)
        assert torch.equal(kept, held.sort(-1).values.long())


def test_a_policy_with_options_is_recorded_under_its_one_spelling(tiny):
    names = ["snapkv", "snapkv(kernel=3,window=16)", "snapkv(window=32)"]
    trace = Recorder(tiny("llama"), policies=names).record(prompt(GREEDY))
    assert list(trace.worths) == ["snapkv", "snapkv(window=16, kernel=3)"]
    assert not torch.equal(*trace.worths.values())


def test_sampled_futures_differ_and_come_again_in_any_order(tiny):
    recorder = Recorder(tiny("llama"), temperature=1.0)
    branches = [Branch(tokens(0), 8)] * 3
    first, other = prompt(*branches), prompt(*branches, count=N - 1)
    once = recorder.record(first)
    recorder.record(other)
    again = recorder.record(first)
    assert torch.equal(once.future_ids, again.future_ids)
    assert torch.equal(once.importance_max, again.importance_max)
    assert len({tuple(future) for future in once.future_ids.tolist()}) == 3
    reseeded = Recorder(tiny("llama"), temperature=1.0, seed=1).record(first)
    assert not torch.equal(once.future_ids, reseeded.future_ids)


def test_sampling_follows_the_temperature(tiny):
    cold = Recorder(tiny("llama"), temperature=1e-4).record(prompt(GREEDY))
    assert torch.equal(cold.future_ids, Recorder(tiny("llama")).record(prompt(GREEDY)).future_ids)


def test_an_end_ends_a_future_and_is_no_part_of_one_that_has_others(tiny):
    model = tiny("llama")
    answer = Recorder(model).record(prompt(GREEDY)).future_ids[0].tolist()
    end = next(token for token in answer if token != answer[0])
    trace = Recorder(model, ends={end}).record(prompt(GREEDY))
    assert trace.future_lengths == [answer.index(end)]
    assert trace.future_ids[0].tolist() == [*answer[: answer.index(end)], *[-1] * (6 - answer.index(end))]
    # a model that has nothing to say still says that
    silent = Recorder(model, ends={answer[0]}).record(prompt(GREEDY))
    assert silent.future_ids[0, 0] == answer[0]


def test_the_key_names_source_split_and_number_and_changes_with_any_token():
    item = prompt(GIVEN, BOTH)
    assert item.key.startswith("text-train-0-") and item.key == prompt(GIVEN, BOTH).key
    others = [
        prompt(GIVEN),
        prompt(BOTH, GIVEN),
        prompt(GIVEN, BOTH, count=N - 1),
        prompt(GIVEN, BOTH._replace(num_new=4)),
    ]
    assert len({item.key, *(other.key for other in others)}) == 5


def test_a_16_bit_model_is_recorded_as_it_computes():
    embedded = kvkeep.load("smollm2", dtype="bfloat16")
    ids = embedded.tokenizer("The river runs past the mill and the " * 5, return_tensors="pt").input_ids
    item = Item(source="text", split="train", name="0", token_ids=ids, branches=[Branch(ids[:, :0], 4)])
    trace = Recorder(embedded.model, layers=[0, 29]).record(item)
    assert trace.importance_max.dtype == torch.float32 and trace.keys.shape == (2, 3, ids.shape[1], 64)
    # each of four queries spends at most one on the prompt, the largest of three heads at most three
    assert bool((trace.importance_mean.sum(-1) <= 4).all()) and bool((trace.importance_max.sum(-1) <= 12).all())
    assert bool((trace.importance_max >= trace.importance_mean - 1e-6).all())


def test_what_cannot_be_recorded_is_refused(tiny):
    with pytest.raises(ValueError, match="no layer 3 to record; there are 0, 1, 2"):
        Recorder(tiny("llama"), layers=[0, 3])
    with pytest.raises(ValueError, match="no layer 0 to record; there are 1, 3"):
        Recorder(tiny("gemma3"), layers=[0])
    with pytest.raises(ValueError, match="no KV head 2 to record; there are 0, 1"):
        Recorder(tiny("llama"), heads=[2])
    with pytest.raises(ValueError, match="no KV head was chosen"):
        Recorder(tiny("llama"), heads=[])
    with pytest.raises(ValueError, match="'oracle' knows or samples a future"):
        Recorder(tiny("llama"), policies=["tova", "oracle"])
    with pytest.raises(ValueError, match="'lorekv' knows or samples a future"):
        Recorder(tiny("llama"), policies=["lorekv"])
    with pytest.raises(ValueError, match="unknown policy 'tovva'"):
        Recorder(tiny("llama"), policies=["tovva"])
    for branches in ([], [GIVEN, Branch(tokens(0))]):
        with pytest.raises(ValueError, match="has no future"):
            prompt(*branches)
