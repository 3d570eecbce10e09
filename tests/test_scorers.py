"""The scorers of KVpop: a memory that runs along gives what it gives at once, and is read late.

A agents, B sequences, n tokens, D head size.
"""

import copy

import pytest
import torch
from torch import Tensor

from kvkeep.policies.scorers import ARCHITECTURES, FASTEST, SLOWEST, Memory, Scorers, ScorerShape, make_scorers

A, D, V = 3, 8, 6


def scorers(architecture: str = "memory", **changes) -> Scorers:
    """Untrained ones, as if calibrated on other keys and values and trained a little."""
    made = make_scorers(
        ScorerShape(**{"num_agents": A, "key_size": D, "value_size": V, "architecture": architecture,
                       "hidden": 7, "memory": 5, "window": 4, **changes})
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.centre.normal_(0, 0.5, generator=generator)
        made.spread.uniform_(0.5, 2, generator=generator)
        made.age.normal_(generator=generator)
        for name, weight in made.named_parameters():
            if name in ("norm", "first_bias"):
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return made.requires_grad_(False)


def sequence(n: int, seed: int = 0, batch: int = 2) -> Tensor:
    """Keys and values side by side, `[B, A, n, D + V]`."""
    return torch.randn(batch, A, n, D + V, generator=torch.Generator().manual_seed(seed))


def whole(made: Scorers, x: Tensor) -> Tensor:
    return torch.stack([made(row[..., :D], row[..., D:]) for row in x])


def along(made: Scorers, x: Tensor, sizes: list[int]) -> Tensor:
    """Scores of all tokens but the last `delay`, read in pieces of these sizes."""
    delay, memory, start, found = made.shape.delay, made.blank(x.shape[:2]), 0, []
    for size in sizes:
        new = x[:, :, start : start + size]
        # tokens before the first are made up
        asked = torch.cat([torch.ones_like(x[:, :, :1]).expand(-1, -1, delay, -1), x], 2)[:, :, start : start + size]
        scores, memory = made.judge(asked, new, memory)
        found.append(scores)
        start += size
    assert start == x.shape[2]
    return torch.cat(found, -1)[..., delay:]


def by_formula(made: Scorers, x: Tensor) -> Tensor:
    """Scores of one sequence `[A, n, F]`, one agent and one token after the other, in float64."""
    shape, n = made.shape, x.shape[1]
    scores = torch.zeros(A, n)
    for a in range(A):
        read = ((x[a] - made.centre[a]) / made.spread[a]).double() @ made.first[a].double() + made.first_bias[a, 0]
        hidden, M = shape.hidden * shape.reads_token, shape.memory

        def phi(y):
            return torch.cat([y.softmax(0), (-y).softmax(0)])

        for u in range(n - shape.delay):
            parts = [read[u, :hidden] / (1 + (-read[u, :hidden]).exp())]
            if shape.reads_memory:
                held, weight = torch.zeros(2 * M, M).double(), torch.zeros(2 * M).double()
                for row in read[: u + shape.delay + 1]:
                    k, v = phi(row[hidden + M : hidden + 2 * M]), row[hidden + 2 * M : hidden + 3 * M]
                    i, f = row[-2].exp(), row[-1].sigmoid()
                    held, weight = f * held + i * torch.outer(k, v), f * weight + i * k
                q = phi(read[u, hidden : hidden + M])
                h = q @ held / (q @ weight)
                h = (h - h.mean()) / (h.var(correction=0) + 1e-5).sqrt() * made.norm[a, 0, 0] + made.norm[a, 1, 0]
                parts.append(h / (1 + (-h).exp()))
            scores[a, u] = torch.cat(parts) @ made.last[a, :, 0].double()
    return scores


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_the_formula(architecture, late):
    made, x = scorers(architecture, late=late), sequence(20, batch=1)
    torch.testing.assert_close(whole(made, x)[0], by_formula(made, x[0]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sizes", [[1] * 150, [150], [64, 64, 22], [7, 1, 1, 100, 41], [149, 1]])
@pytest.mark.parametrize("late", [True, False])
def test_a_memory_that_runs_along_in_pieces_finds_what_it_finds_at_once(sizes, late):
    made, x = scorers("both", late=late), sequence(150)
    delay = made.shape.delay
    torch.testing.assert_close(along(made, x, sizes), whole(made, x)[..., : 150 - delay], atol=1e-5, rtol=1e-4)


def test_step_by_step_equals_the_parallel_form_over_4096_tokens():
    made, x = scorers("memory", window=64), sequence(4096, batch=1)
    got, expected = along(made, x, [1] * 4096), whole(made, x)[..., : 4096 - 64]
    assert expected.std() > 0.05
    assert (got - expected).abs().max() <= 1e-4


def test_late_means_that_the_tokens_of_the_window_are_heard_and_none_behind_it():
    x = sequence(40)
    for late, heard in ((True, 14), (False, 10)):
        made = scorers("both", late=late)
        before = whole(made, x)
        for changed in (heard, heard + 1):
            other = x.clone()
            other[:, :, changed] += 3
            moved = (whole(made, other)[..., 10] - before[..., 10]).abs().amin() > 1e-6
            assert moved == (changed == heard)


def test_padding_is_not_heard():
    made, x = scorers("both"), sequence(30)
    room = torch.cat([torch.full_like(x[:, :, :9], 7.0), x, torch.full_like(x[:, :, :5], 7.0)], 2)
    valid = torch.zeros(2, 1, 44, dtype=torch.bool)
    valid[..., 9:39] = True
    shifted = torch.cat([torch.zeros_like(x[:, :, :4]), room], 2)[:, :, :44]
    scores, memory = made.judge(shifted, room, made.blank((2, A)), valid)
    torch.testing.assert_close(scores[..., 13:39], whole(made, x)[..., :26], atol=1e-5, rtol=1e-4)
    alone = made.judge(x, x, made.blank((2, A)))[1]
    for one, other in zip(memory, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    after, _ = made.judge(x[:, :, :1], x[:, :, :1], memory, torch.zeros(2, 1, 1, dtype=torch.bool))
    assert after.isfinite().all()


@pytest.mark.parametrize("gates", [(60.0, 60.0), (-60.0, -60.0), (300.0, -300.0), (-300.0, 300.0)])
@pytest.mark.parametrize("sizes", [[80], [1] * 80])
def test_gates_of_any_size_stay_finite_and_a_level_that_all_share_changes_nothing(gates, sizes):
    made, x = scorers("memory"), sequence(80)
    made.first.data[..., -2:] *= 10
    made.first_bias.data[..., -2:] = torch.tensor(gates)
    scores = along(made, x, sizes)
    assert scores.isfinite().all()
    if gates[0] == 60:
        made.first_bias.data[..., -2] += 5
        torch.testing.assert_close(along(made, x, sizes), scores, atol=1e-4, rtol=1e-3)


def test_some_agents_say_what_they_say_among_all():
    made, x, some = scorers("both"), sequence(25), slice(1, 3)
    every, memory = made.judge(x, x, made.blank((2, A)))
    few, held = made.judge(x[:, some], x[:, some], made.blank((2, 2)), rows=some)
    torch.testing.assert_close(few, every[:, some])
    torch.testing.assert_close(held.held, memory.held[:, some])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_frozen_scorers_say_the_same_and_go_to_a_device_as_a_whole(architecture):
    made, x = scorers(architecture), sequence(9)
    expected = whole(made, x), made.log_decay
    made.freeze()
    assert torch.allclose(whole(made, x), expected[0], atol=1e-6) and torch.equal(made.log_decay, expected[1])
    moved = copy.deepcopy(made).to("meta")
    assert moved(*(part.to("meta") for part in (x[0, ..., :D], x[0, ..., D:]))).device.type == "meta"
    assert moved.log_decay.device.type == "meta"


def test_16_bit_keys_are_read_in_fp32():
    made, x = scorers("both"), sequence(25).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, memory = made.judge(x, x, made.blank((2, A)))
    assert low.dtype == memory.held.dtype == torch.float32
    assert torch.equal(low, made.judge(x.float(), x.float(), made.blank((2, A)))[0])


def test_keys_that_are_turned_back_are_read_alike_wherever_they_stand():
    angle = torch.tensor([1.0, 0.3, 0.01])
    made = scorers("both", turned=6)
    made.frequencies.copy_(angle)
    x = sequence(30)
    keys, values = x[..., :D], x[..., D:]

    def turned(first: int) -> Tensor:
        """The keys as a model caches them from position `first` on: dimension i turned with i + 3, two left alone."""
        at = (first + torch.arange(30))[:, None] * angle
        low, high, rest = keys[..., :3], keys[..., 3:6], keys[..., 6:]
        return torch.cat([low * at.cos() - high * at.sin(), high * at.cos() + low * at.sin(), rest], -1)

    plain = made.tokens(keys, values, torch.zeros(30, dtype=torch.int32))
    assert torch.equal(plain, x)
    for first in (0, 1000):
        back = made.tokens(turned(first), values, first + torch.arange(30))
        torch.testing.assert_close(back, x, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(made(turned(0), values), along_plain(made, x), atol=1e-4, rtol=1e-3)


def along_plain(made: Scorers, x: Tensor) -> Tensor:
    found = along(made, x, [30])
    return torch.cat([found, torch.zeros_like(found[..., :1]).expand(-1, -1, made.shape.delay)], -1)


def test_calibrated_scorers_read_what_is_centred_and_scaled():
    made = make_scorers(ScorerShape(num_agents=A, key_size=D, value_size=V, architecture="mlp", hidden=7))
    x = sequence(500, batch=1)[0] * 30 + 100
    plain = made((x - 100)[..., :D] / 30, (x - 100)[..., D:] / 30)
    made.calibrate([(x[..., :D], x[..., D:])])
    torch.testing.assert_close(made(x[..., :D], x[..., D:]), plain, atol=0.3, rtol=0.1)


def test_the_decay_lies_between_its_bounds_and_has_a_gradient():
    made = make_scorers(ScorerShape(num_agents=4, key_size=2, value_size=2, architecture="mlp"))
    made.age.data = torch.tensor([[-100.0], [0.0], [2.0], [100.0]])
    decay = made.log_decay.exp().detach()
    assert float(decay[0]) == pytest.approx(FASTEST, abs=1e-7) and float(decay[3]) == pytest.approx(SLOWEST, abs=1e-7)
    assert bool((decay.diff(dim=0) > 0).all())
    (gradient,) = torch.autograd.grad(made.log_decay.sum(), made.age)
    step = 1e-2
    with torch.no_grad():
        low, middle = made.log_decay.clone(), made.age.clone()
        made.age.copy_(middle + step)
        slope = (made.log_decay - low) / step
    torch.testing.assert_close(gradient[1:3], slope[1:3], atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turned": 3}, "even number of the 2 of a key"),
        ({"architecture": "large"}, "mlp, memory, both"),
        ({"memory": 0}, "memory of the scorers must be at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ScorerShape(**{"num_agents": 1, "key_size": 2, "value_size": 2, **change})


def test_a_memory_without_reading_is_none():
    made = scorers("mlp")
    assert made.blank((2, A)) is None and made.shape.delay == 0
    x = sequence(9)
    scores, memory = made.judge(x, x, None)
    assert memory is None
    torch.testing.assert_close(scores, whole(made, x))
    assert isinstance(scorers("both").blank((2, A)), Memory)
