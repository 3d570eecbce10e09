"""Traps of other libraries, as far as no other file holds them, and docs/traps.md, which lists them all."""

import ast
import copy
import gc
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from named import policy_named
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import kvkeep
from kvkeep import POLICIES, CacheGroup, KVCache

ROOT = Path(__file__).parents[1]
NAMES = tuple(POLICIES)
CAUSAL = tuple(name for name, policy in POLICIES.items() if "future" not in policy.needs)


def tokens(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def fill(model, cache, input_ids: Tensor) -> Tensor:
    future = tokens(12, seed=99) if "future" in cache.policy.needs else None
    return kvkeep.prefill(model, input_ids, cache, future=future).logits[:, -1]


def call(model, input_ids: Tensor, cache) -> Tensor:
    with torch.no_grad():
        return model(input_ids, **{kvkeep.cache_argument(model): cache}).logits


# policy


def test_a_trained_model_breaks_without_its_first_tokens_and_protected_sinks_prevent_that(embedded):
    model, tokenizer = embedded
    text = (ROOT / "kvkeep/evaluate/haystack/pride_and_prejudice.txt").read_text()[5_000:7_000]
    prompt, rest = tokenizer(text, return_tensors="pt").input_ids[:, :240].split([192, 48], dim=1)
    budgets = ({"budget": None}, {"budget": 40}, {"budget": 40, "sinks": 0})
    group = CacheGroup([KVCache(model, policy="streaming", **budget) for budget in budgets])
    with kvkeep.attach(model):
        call(model, prompt, group)
        logits = call(model, rest.expand(3, -1), group).float()
    losses = [cross_entropy(row[:-1], rest[0, 1:]) for row in logits]
    full, protected, unprotected = (loss.exp() for loss in losses)
    assert protected < 1.2 * full
    assert unprotected > 1.8 * full


@pytest.mark.parametrize("name", CAUSAL)
def test_new_tokens_can_outlive_the_window_that_protects_them(tiny, name):
    model, length = tiny("llama"), 50
    cache = KVCache(model, policy=policy_named(name, model), budget=40)
    kvkeep.generate(model, tokens(length), cache=cache, max_new_tokens=40, do_sample=True)
    protected = cache.get_seq_length() - cache.budget.recent
    held = [layer.slots.positions for layer in cache.managed]
    assert sum(int(((at >= length) & (at < protected)).sum()) for at in held) > 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_evicted_before_the_chunk_that_needs_it_was_attended(tiny, name):
    model, prompt = tiny("llama"), tokens(120)
    stock = model(prompt).logits[:, -1]
    assert (fill(model, KVCache(model, policy=policy_named(name, model), budget=40), prompt) - stock).abs().max() < 1e-4


# positions and masks


@pytest.mark.parametrize("name", NAMES)
def test_kept_keys_and_values_are_the_full_caches_to_the_bit(tiny, name):
    model, prompt = tiny("llama"), tokens(120)
    full, some = KVCache(model, budget=None), KVCache(model, policy=policy_named(name, model), budget=40)
    for cache in (full, some):
        fill(model, cache, prompt)
    for everything, kept in zip(full.managed, some.managed, strict=True):
        at = kept.slots.positions.long().clamp(min=0)[..., None].expand_as(kept.slots.keys)
        used = kept.slots.occupied
        assert torch.equal(everything.slots.keys.gather(2, at)[used], kept.slots.keys[used])
        assert torch.equal(everything.slots.values.gather(2, at)[used], kept.slots.values[used])


def test_layers_of_different_lengths_are_refused_where_they_would_share_one_mask(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy="knorm", budget=40, schedule="pyramid")
    call(model, tokens(90), cache)
    with pytest.raises(RuntimeError, match="cannot share one mask"):
        call(model, tokens(20), cache)


@pytest.mark.parametrize("batch", (1, 2))
def test_padding_on_a_model_that_is_not_attached_is_refused(tiny, batch):
    model = tiny("llama")
    mask = torch.ones(batch, 90, dtype=torch.long)
    mask[0, :30] = 0
    cache = {kvkeep.cache_argument(model): KVCache(model, policy="knorm", budget=40)}
    with pytest.raises(ValueError, match="padding"):
        model.generate(tokens(90).expand(batch, -1), attention_mask=mask, max_new_tokens=2, **cache)


def test_a_cache_that_no_model_can_tell_of_padding_is_refused_where_it_is_not_attached(tiny):
    model = tiny("llama")
    from_config, from_another = KVCache(model.config, policy="knorm", budget=40), KVCache(model, budget=40)
    with pytest.raises(RuntimeError, match="padding"):
        call(model, tokens(60), from_config)
    with pytest.raises(RuntimeError, match="padding"):
        call(copy.deepcopy(model), tokens(60), from_another)
    attached = KVCache(model.config, policy="knorm", budget=40)
    with kvkeep.attach(model):
        call(model, tokens(60), attached)
    assert attached.report().kept == 40


def test_a_model_forgets_the_caches_that_are_gone_and_its_copies_know_none(tiny):
    model = tiny("llama")
    # caches that earlier tests have left behind
    gc.collect()
    before = len(model._forward_pre_hooks)
    cache = KVCache(model, policy="knorm", budget=40)
    fork = copy.deepcopy(cache)
    assert len(model._forward_pre_hooks) == before + 2
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    call(model, tokens(60), fork)
    with pytest.raises(RuntimeError, match="padding"):
        call(twin, tokens(60), cache)
    del cache, fork
    gc.collect()
    assert len(model._forward_pre_hooks) == before


# state and lifetime


@pytest.mark.parametrize("sign", ("what goes", "what stays"))
def test_crop_takes_both_signs(tiny, sign):
    model, cache = tiny("llama"), KVCache(tiny("llama"), policy="knorm", budget=200)
    fill(model, cache, tokens(80))
    cache.crop(-30 if sign == "what goes" else 50)
    assert cache.get_seq_length() == 50
    shorter = KVCache(model, policy="knorm", budget=200)
    fill(model, shorter, tokens(80)[:, :50])
    assert (fill(model, cache, tokens(20, 1)) - fill(model, shorter, tokens(20, 1))).abs().max() < 1e-5


@pytest.mark.slow
def test_fifty_long_prompts_leave_no_memory_behind():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, __file__]
    measured = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=280)
    early, late = map(int, measured.stdout.split())
    assert late < 1.01 * early


def test_the_cache_holds_kv_heads_and_not_query_heads(tiny):
    model = tiny("llama")
    cache = KVCache(model, budget=100, policy="knorm")
    fill(model, cache, tokens(300))
    layer = cache.report().layers[0].bytes_by_array
    # 2 KV heads of size 16 in fp32; 100 slots and the free one of each head
    assert layer["keys"] == layer["values"] == 2 * 101 * 16 * 4


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns without being a view of a longer one."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_builds_a_map_over_the_prompt(tiny, name):
    # one map over queries and keys for a single head would be more than anything else there is
    model, length = tiny("llama"), 4096
    with Largest() as largest:
        fill(model, KVCache(model, policy=policy_named(name, model), budget=256), tokens(length))
    assert largest.elements < length * length // 4


# lossless unless asked


def test_nothing_is_dropped_unless_asked_and_the_repr_says_what_is(tiny):
    model, prompt = tiny("llama"), tokens(200)
    untold, told = KVCache(model), KVCache(model, policy="tova", budget=0.25)
    fill(model, untold, prompt)
    assert untold.report().kept == 200
    assert "budget='full'" in repr(untold)
    assert "Tova" in repr(told) and "budget='25%'" in repr(told)


# versions


def test_the_cache_goes_under_the_name_that_the_model_reads(tiny):
    class Older(PreTrainedModel):
        _supports_sdpa = True

        def forward(self, input_ids, past_key_values=None): ...

    class Newer(Older):
        def forward(self, input_ids, cache=None, past_key_values=None): ...

    model = tiny("llama")
    assert kvkeep.cache_argument(Older(model.config)) == "past_key_values"
    assert kvkeep.cache_argument(Newer(model.config)) == "cache"
    cache = KVCache(model, policy="knorm", budget=40)
    call(model, tokens(90), cache)
    assert cache.get_seq_length() == 90


# the page


def page() -> str:
    return (ROOT / "docs/traps.md").read_text()


def test_every_trap_stands_on_the_page_once():
    assert re.findall(r"^\| (T\d+) \|", page(), re.MULTILINE) == [f"T{number}" for number in range(1, 41)]


def test_every_trap_names_a_test_or_says_why_not():
    for line in re.findall(r"^\| T\d+ .*$", page(), re.MULTILINE):
        assert "::test_" in line or "not yet: " in line, line


def test_every_test_named_on_the_page_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page())
    assert len(named) > 40
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_the_table_on_the_page_is_made_from_the_committed_rows():
    rows = [ROOT / "results/kvpress" / f"{library}.jsonl" for library in ("kvpress", "kvkeep")]
    command = [sys.executable, ROOT / "benchmarks/kvpress_scenarios", "--table", *rows]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert made.strip() in page()


def process_bytes() -> int:
    gc.collect()
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * 4096


def read_fifty_prompts() -> None:
    """Prints the process's memory after 10 long prompts and after 50 more."""
    from conftest import build_tiny

    model = build_tiny("llama")
    for number in range(60):
        cache = KVCache(model, policy="tova", budget=128)
        kvkeep.generate(model, tokens(1000, seed=number), cache=cache, max_new_tokens=4, do_sample=False, chunk=250)
        if number == 9:
            print(process_bytes())
    print(process_bytes())


if __name__ == "__main__":
    read_fifty_prompts()
