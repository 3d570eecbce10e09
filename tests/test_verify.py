"""The measurements of exactness find what they are for."""

import torch
from test_conformance import tokens

from kvkeep import POLICIES
from kvkeep.evaluate import verify
from kvkeep.evaluate.verify import dense_differences, same_tokens
from kvkeep.layer import KVLayer
from kvkeep.policies.learned import LearnedPolicy


def test_every_prompt_gives_the_stock_tokens(tiny):
    row = same_tokens(tiny("llama"), [tokens(60), tokens(70, seed=1)], model_name="tiny", new_tokens=8)
    assert row.value == 1 and row.n == 2 and row.low < 1


def test_a_model_that_answers_otherwise_is_found(tiny, monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(verify, "generate", lambda _, prompt, **__: torch.zeros_like(prompt))
    assert same_tokens(model, [tokens(60)], model_name="tiny", new_tokens=8).value == 0


def test_every_policy_is_near_the_dense_model(tiny):
    rows = dense_differences(tiny("llama"), [tokens(100)], model_name="tiny", budget="40")
    # weights that were trained for another model cannot run on this one
    learned = {name for name, policy in POLICIES.items() if issubclass(policy, LearnedPolicy)}
    assert {row.policy for row in rows} == POLICIES.keys() - learned
    assert all(row.value < 1e-4 and row.kept <= 40 for row in rows)


def test_a_cache_that_reads_wrong_slots_is_found(tiny, monkeypatch):
    right = KVLayer.read

    def wrong(layer, queries, seen, scale):
        return right(layer, queries.roll(1, -1) if seen.num_new == 1 else queries, seen, scale)

    monkeypatch.setattr(KVLayer, "read", wrong)
    [row] = dense_differences(tiny("llama"), [tokens(100)], model_name="tiny", policies=["knorm"], budget="40")
    assert row.value > 1e-2
