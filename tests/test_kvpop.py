"""KVpop as a policy: when a token is scored and leaves, what the cache holds for it, and how its weights travel.

B sequences, H KV heads, N slots, n tokens.
"""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from named import policy_named
from torch import Tensor

import kvkeep
from kvkeep import KVCache
from kvkeep.evaluate.dense_twin import witnessed
from kvkeep.fingerprint import fingerprint
from kvkeep.frequencies import rotation_frequencies
from kvkeep.policies import KVpop, KVpopMLP
from kvkeep.pool import Window, hold

BOTH = ("kvpop", "kvpop_mlp")


def tokens(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def read(model, cache: KVCache, input_ids: Tensor) -> Tensor:
    """Logits behind tokens that follow what the cache has seen."""
    at = cache.get_seq_length() + torch.arange(input_ids.shape[1])
    with torch.no_grad(), kvkeep.attach(model):
        return model(input_ids, position_ids=at[None], **{kvkeep.cache_argument(model): cache}).logits[:, -1]


def positions(cache: KVCache) -> list[Tensor]:
    return [layer.slots.positions.sort(-1).values for layer in cache.managed]


# what is kept


@pytest.mark.parametrize("name", BOTH)
def test_a_head_holds_sinks_the_window_and_the_best_of_all_others(tiny, name):
    model = tiny("llama", num_hidden_layers=1)
    policy = policy_named(name, model)
    text, everything = tokens(120), KVCache(model, policy=policy, budget=1000)
    read(model, everything, text)
    priority = everything.managed[0].slots.side("kvpop")[0]
    cache = KVCache(model, policy=policy, budget=40, recent=0)
    read(model, cache, text[:, :30])
    for at in range(30, 120):
        read(model, cache, text[:, at : at + 1])
        if at % 30 == 0 or at == 119:
            # what is held once this token came is what the next one would see, but for itself
            seen = hold(priority[:, : at + 2], Window(4, 8), 40 - 12).visible(torch.tensor([at + 1]))[:, 0, : at + 1]
            held = positions(cache)[0][0]
            for head in range(2):
                assert held[head][held[head] >= 0].tolist() == seen[head].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    "options", [{"budget": 40, "recent": 0}, {"budget": 30, "recent": 16}, {"budget": 12, "recent": 3}]
)
@pytest.mark.parametrize("name", BOTH)
def test_the_mask_of_a_text_is_what_reading_it_token_by_token_finds(tiny, name, options):
    model = tiny("llama", num_hidden_layers=1)
    policy, text = policy_named(name, model), tokens(90)
    whole, cache = KVCache(model, policy=policy, budget=1000), KVCache(model, policy=policy, **options)
    read(model, whole, text)
    [layer] = whole.managed
    seen = layer._observe(None, torch.arange(90)[None], 90, None)
    mask = policy.visible(seen, torch.full((90,), options["budget"]), cache.budget)[0]
    read(model, cache, text[:, :5])
    for at in range(5, 90):
        held = positions(cache)[0][0]
        for head in range(2):
            assert mask[head, at].nonzero()[:, 0].tolist() == [*held[head][held[head] >= 0].tolist(), at]
        read(model, cache, text[:, at : at + 1])
    with pytest.raises(ValueError, match="give tokens"):
        policy.visible(seen, torch.arange(90), cache.budget)


@pytest.mark.parametrize("name", BOTH)
def test_a_token_gets_its_one_score_as_it_leaves_the_window(tiny, name):
    model = tiny("llama")
    cache = KVCache(model, policy=policy_named(name, model), budget=1000)
    read(model, cache, tokens(20))
    before = cache.managed[1].slots.side("kvpop").clone()
    read(model, cache, tokens(1, seed=1))
    after = cache.managed[1].slots.side("kvpop")
    changed = (after[..., :20] != before)[0, 0].nonzero()[:, 0].tolist()
    # of 21 tokens the last 8 are in the window: the one at 12 has just left it
    assert changed == ([12] if name == "kvpop" else [])
    policy = cache.policy
    assert policy.shape.delay == (8 if name == "kvpop" else 0)


@pytest.mark.parametrize("name", BOTH)
def test_tokens_in_the_window_stay_whatever_the_budget_protects(tiny, name):
    model = tiny("llama")
    cache = KVCache(model, policy=policy_named(name, model), budget=30, recent=0, sinks=2)
    kvkeep.generate(model, tokens(60), cache=cache, max_new_tokens=20, do_sample=False)
    seen = cache.get_seq_length()
    for held in positions(cache):
        assert (held[..., -8:] == torch.arange(seen - 8, seen)).all() and (held[..., -30:-28] == torch.arange(2)).all()


def test_a_budget_below_the_window_keeps_the_most_recent_tokens(tiny):
    model = tiny("llama")
    fingerprinted = fingerprint(model.config)
    cache = KVCache(model, policy=KVpop.untrained(fingerprinted, window=64), budget=40)
    kvkeep.generate(model, tokens(100), cache=cache, max_new_tokens=10, do_sample=False)
    recent = [*range(4), *range(109 - 36, 109)]
    assert all(held[0, 0][held[0, 0] >= 0].tolist() == recent for held in positions(cache))


# its memory


def test_the_memory_lies_in_the_cache_and_counts(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy=policy_named("kvpop", model), budget=40)
    read(model, cache, tokens(60, batch=3))
    sizes = cache.managed[0].nbytes()
    # two heads, features 8 by 4 values and their weight, and a level
    assert sizes["kvpop_held"] == 3 * 2 * 8 * 5 * 4 and sizes["kvpop_level"] == 3 * 2 * 4
    plain = KVCache(model, policy=policy_named("kvpop_mlp", model), budget=40)
    read(model, plain, tokens(60))
    assert not any(name.startswith("kvpop_") for name in plain.managed[0].nbytes())


@pytest.mark.parametrize("length", [12, 30])
def test_tokens_that_are_taken_back_are_forgotten(tiny, length):
    model = tiny("llama")
    policy = policy_named("kvpop", model)
    cache, plain = (KVCache(model, policy=policy, budget=200) for _ in range(2))
    for one in (cache, plain):
        read(model, one, tokens(40))
    read(model, cache, tokens(length, seed=1))
    cache.crop(-length)
    for one in (cache, plain):
        read(model, one, tokens(30, seed=2))
    for ours, theirs in zip(cache.managed, plain.managed, strict=True):
        for name, stream in ours.slots.streams.items():
            torch.testing.assert_close(stream, theirs.slots.streams[name], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.slots.side("kvpop"), theirs.slots.side("kvpop"), atol=1e-5, rtol=1e-4)


def test_tokens_cannot_be_taken_back_once_any_was_evicted(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy=policy_named("kvpop", model), budget=0.5)
    read(model, cache, tokens(62))
    read(model, cache, tokens(1, seed=1))
    with pytest.raises(ValueError, match="evicted tokens do not come back"):
        cache.crop(-1)
    assert [int(held.amax()) for held in positions(cache)] == [62, 62, 62]
    layer = cache.managed[0]
    with pytest.raises(ValueError, match="it cannot be made without them"):
        cache.policy.forget(layer._observe(None, layer.slots.positions[:, 0, -1:], 1, None))


def test_a_look_ahead_leaves_no_trace(tiny):
    model, future = tiny("llama"), tokens(12, seed=9)
    policy, _ = witnessed(policy_named("kvpop", model))
    cache = KVCache(model, policy=policy, budget=200)
    read(model, cache, tokens(40))
    before = copy.deepcopy(cache.managed[0].slots.streams)
    cache.plan.ahead = cache.plan.holding = True
    read(model, cache, future)
    assert all(torch.equal(before[name], stream) for name, stream in cache.managed[0].slots.streams.items())


# which model, and what ships


def test_weights_for_another_model_are_refused(tiny):
    policy = policy_named("kvpop", tiny("llama"))
    with pytest.raises(ValueError, match=r"policy kvpop \(.*\) was made with a model whose number of layers is 3"):
        KVCache(build_tiny("llama", num_hidden_layers=2), policy=policy, budget=40)


def test_a_model_without_shipped_weights_says_so(tiny):
    with pytest.raises(ValueError, match=r"the policy kvpop \(smollm2\) was made with a model whose"):
        KVCache(tiny("llama"), policy="kvpop", budget=40)


@pytest.mark.parametrize("kind", [KVpop, KVpopMLP])
def test_saved_weights_come_back(tiny, tmp_path, kind):
    policy = kind.untrained(fingerprint(tiny("llama").config))
    policy.save_pretrained(tmp_path)
    assert kind.from_pretrained(tmp_path) == policy
    other = KVpopMLP if kind is KVpop else KVpop
    with pytest.raises(ValueError, match=f"a policy for '{kind.method}', not for '{other.method}'"):
        other.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [KVpop, KVpopMLP])
def test_the_shipped_weights_are_small_and_say_how_they_came_about(kind):
    policy = kind()
    folder = Path(kvkeep.__file__).parent / "weights" / kind.method / "smollm2"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    assert policy.file.layers == list(range(30)) and policy.file.training and policy.shape.window == 64
    assert not re.search(r"(?<![\w.])/(?:work|root|home|tmp)/", str(policy.file.training))
    assert math.prod(policy.file.tensors["age"].shape) == 90


# keys as they were before the rotation


def test_a_policy_that_turns_keys_back_decodes_as_it_reads_at_once(tiny):
    model = tiny("llama")
    shape = fingerprint(model.config)
    file = KVpop.untrained(shape, turned=16).file
    file.tensors["frequencies"].copy_(rotation_frequencies(shape))
    policy = KVpop(weights="turned", trained=KVpop.network_of(file))
    whole, steps = (KVCache(model, policy=policy, budget=1000) for _ in range(2))
    read(model, whole, tokens(50))
    for token in tokens(50)[0]:
        read(model, steps, token.view(1, 1))
    for one, other in zip(whole.managed, steps.managed, strict=True):
        left = [layer.slots.side("kvpop")[..., :42] for layer in (one, other)]
        torch.testing.assert_close(*left, atol=1e-4, rtol=1e-3)
    plain = KVCache(model, policy=policy_named("kvpop", model), budget=1000)
    read(model, plain, tokens(50))
    assert not torch.allclose(plain.managed[0].slots.side("kvpop"), whole.managed[0].slots.side("kvpop"), atol=1e-2)
