"""The compiled scores of a step are those of the scorers in torch, and so is what the memory then holds."""

import pytest
import torch
from test_scorers import A, D, V, scorers
from transformers import LlamaConfig

from kvkeep.budget import Budget
from kvkeep.fingerprint import fingerprint
from kvkeep.layer import KVLayer, Plan
from kvkeep.policies import KVpop, KVpopMLP
from kvkeep.policies.scorers import ARCHITECTURES, Memory, Scorers
from kvkeep.policies.scoring import Token, find_slots, judge_one, serves
from kvkeep.pool import static_priority
from kvkeep.slots import Slots

B, N = 2, 9


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Slots:
    """Slots with room behind them, so that agents are further apart than their slots need."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(B, A, N + 3, size, generator=generator).to(dtype) for size in (D, V))
    positions = torch.stack([torch.randperm(N + 3, generator=generator) for _ in range(B * A)]).view(B, A, -1)
    slots = Slots(keys, values, positions.int())
    slots.truncate(N)
    return slots


def skip_without_compiler(made: Scorers) -> None:
    if not serves(made, drawn(0)):
        pytest.skip("no compiler here")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("turned", [0, 4, D])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_judged_as_in_torch(architecture, turned, dtype):
    made = scorers(architecture, turned=turned, num_agents=3 * A)
    made.freeze()
    if turned:
        made.frequencies.copy_(torch.linspace(1, 0.01, turned // 2))
    skip_without_compiler(made)
    rows = slice(A, 2 * A)
    memory = slow = made.blank((B, A))
    for step in range(12):
        slots = drawn(step, dtype)
        index = torch.randint(0, N, (2, B, A, 1))
        # the second sequence has padding at first; agents may differ in what they judge
        new_at = torch.tensor([step, step - 3 if step >= 3 else -1])[:, None, None].expand(B, A, 1)
        asked_at = new_at - 4 - torch.arange(A)[:, None] % 2
        before = None if memory is None else Memory(*(array.clone() for array in memory))
        asked, new = Token(index[0], asked_at), Token(index[1], new_at)
        priority, after = judge_one(made, slots.keys, slots.values, asked, new, memory, rows)
        tokens = [made.tokens(*slots.tokens(token.slots), token.positions) for token in (asked, new)]
        scores, slow = made.judge(*tokens, slow, new_at[:, :1] >= 0, rows)
        torch.testing.assert_close(
            priority, static_priority(scores, asked_at, made.log_decay[rows]).float(), rtol=1e-4, atol=1e-5
        )
        for mine, theirs, old, was in zip(after or (), slow or (), memory or (), before or (), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            # what was handed over stays as it was
            assert torch.equal(old, was)
        memory = after


def test_tokens_are_found_by_their_positions():
    made = scorers("mlp")
    made.freeze()
    skip_without_compiler(made)
    positions, others = drawn(3).positions, torch.full((B, A, 1), 7)
    for wanted in range(-3, N + 3):
        found = find_slots(positions, torch.full((B, A, 1), wanted), others)
        there = positions == wanted
        expected = torch.where(there.any(-1, keepdim=True), there.int().argmax(-1, keepdim=True), others)
        assert torch.equal(found, expected)


def test_scorers_that_still_learn_are_left_to_torch():
    assert not serves(scorers("both"), drawn(0))


@pytest.mark.parametrize("kind", [KVpop, KVpopMLP])
def test_the_same_tokens_stay_with_a_compiler_and_without(kind, monkeypatch):
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)
    plan = Plan(config, kind.untrained(fingerprint(config)), Budget(tokens=24, sinks=2, recent=4), 2, None)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(2, heads, 100, 16, generator=generator) for heads in (4, 2, 2)]

    def kept() -> torch.Tensor:
        layer = KVLayer(plan, 1, 0)
        for new in zip(*(array.split([40, *[1] * 60], dim=2) for array in tokens), strict=True):
            layer.attend(*new, None, 0.25)
        assert layer.slots is not None
        return layer.slots.positions.sort(dim=-1).values

    compiled = kept()
    monkeypatch.setattr("kvkeep.policies.kvpop.serves", lambda *_: False)
    assert torch.equal(kept(), compiled)
