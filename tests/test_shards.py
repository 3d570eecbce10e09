"""Workers that share the KV heads of a model say of theirs what one worker says of all."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvkeep.budget import Budget
from kvkeep.fingerprint import fingerprint
from kvkeep.layer import KVLayer, Plan
from kvkeep.policies import KVP, KVpop, KVpopMLP, Policy, make_policy

HEADS, GROUP, D = 4, 2, 16
CONFIG = LlamaConfig(
    num_hidden_layers=3,
    num_attention_heads=HEADS * GROUP,
    num_key_value_heads=HEADS,
    head_dim=D,
    hidden_size=HEADS * GROUP * D,
)
LEARNED: list[type[Any]] = [KVP, KVpop, KVpopMLP]


def kept(policy: Policy, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    plan = Plan(CONFIG, policy, Budget(tokens=24, sinks=2, recent=4), 3, None)
    layer = KVLayer(plan, 1, 0)
    for new in zip(*(array.split([60, *[1] * 20], dim=2) for array in (queries, keys, values)), strict=True):
        layer.attend(*new, None, D**-0.5)
    assert layer.slots is not None
    return layer.slots.positions.sort(dim=-1).values


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_shard_of_trained_weights_keeps_what_the_whole_keeps_in_its_heads(kind, count):
    policy = kind.untrained(fingerprint(CONFIG))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, HEADS, 80, D, generator=generator)
    queries = torch.randn(1, HEADS * GROUP, 80, D, generator=generator)
    whole = kept(policy, queries, keys, values)
    own = max(1, HEADS // count)
    for index in range(count):
        heads = slice(first := index * HEADS // count, first + own)
        asked = slice(heads.start * GROUP, heads.stop * GROUP)
        part = kept(policy.shard(index, count), queries[:, asked], keys[:, heads], values[:, heads])
        assert torch.equal(part, whole[:, heads])
    # heads do differ
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_a_policy_that_draws_by_head_cannot_be_shared():
    assert make_policy("random").shard(0, 1) == make_policy("random")
    with pytest.raises(ValueError, match="tensor parallel"):
        make_policy("random").shard(0, 2)
