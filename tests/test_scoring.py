"""The compiled scores of a step are those of the scorers in torch, and so is what the memory then holds."""

import pytest
import torch
from test_scorers import A, D, V, scorers

from kvkeep.policies.scorers import ARCHITECTURES, Memory
from kvkeep.policies.scoring import Token, judge_one, serves

B = 2


def drawn(generator: torch.Generator, positions: list[int], dtype: torch.dtype) -> Token:
    """One token of each sequence."""
    at = torch.tensor(positions)[:, None, None].expand(B, A, 1)
    keys, values = (torch.randn(B, A, 1, size, generator=generator).to(dtype) for size in (D, V))
    return Token(keys, values, at)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("turned", [0, 4, D])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_judged_as_in_torch(architecture, turned, dtype):
    made = scorers(architecture, turned=turned, num_agents=3 * A)
    made.freeze()
    if turned:
        made.frequencies.copy_(torch.linspace(1, 0.01, turned // 2))
    if not serves(made, torch.zeros(1)):
        pytest.skip("no compiler here")
    generator, rows = torch.Generator().manual_seed(0), slice(A, 2 * A)
    memory = slow = made.blank((B, A))
    for step in range(12):
        # the second sequence has padding at first
        new = drawn(generator, [step, step - 3 if step >= 3 else -1], dtype)
        asked = drawn(generator, [step - 4, step - 7], dtype)
        before = None if memory is None else Memory(*(array.clone() for array in memory))
        scores, after = judge_one(made, asked, new, memory, rows)
        tokens = (made.tokens(*asked), made.tokens(*new))
        expected, slow = made.judge(*tokens, slow, new.positions[:, :1] >= 0, rows)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
        for mine, theirs, old, was in zip(after or (), slow or (), memory or (), before or (), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            # what was handed over stays as it was
            assert torch.equal(old, was)
        memory = after


def test_scorers_that_still_learn_are_left_to_torch():
    assert not serves(scorers("both"), torch.zeros(1))
