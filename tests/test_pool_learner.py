"""KVpop's learner: a planted rule is learned by each kind of scorer, and the loss is what it says.

A agents, m tokens that enter the pool, P pairs.
"""

import math
from dataclasses import replace

import pytest
import torch
from planted import INDEX, NAMES, D, H, L, planted, save_traces
from torch import Tensor
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.losses import Pairs, boundary_loss
from kvkeep.policies import KVpop, KVpopMLP
from kvkeep.pool import newcomers, static_priority
from kvkeep.pool_learner import Cutoff, KVpopLearner, recall, train_kvpop
from kvkeep.target import target
from kvkeep.train import Recipe
from kvkeep.training_data import open_data

W = 4
LATER_INDEX = replace(INDEX, settings={"delay": W})
SMALL = Cutoff(window=W, sinks=2, shares=(0.5, 0.25), num_pairs=64)


def with_later(trace, rule: str = "own"):
    """The trace with later attention that is read off a token itself, or off the tokens up to W behind it."""
    worth = trace.importance()
    if rule == "window":
        # what the next tokens are worth, which a token itself does not tell
        worth = torch.stack([worth.roll(-i, -1) for i in range(1, W + 1)]).log().mean(0).exp()
    worth = worth / worth.sum(-1, keepdim=True)
    return replace(trace, later=torch.stack([worth, worth / 2], 2))


def folder(path, rule: str = "own", num_train: int = 10):
    train = [with_later(planted(f"t{i}", 100 + i, from_end=False), rule) for i in range(num_train)]
    held = [with_later(planted(f"v{i}", 120, split="validation", from_end=False), rule) for i in range(2)]
    return save_traces(path, train + held, LATER_INDEX)


def trained(traces, out, **changes):
    looks = []
    recipe = {"steps": 120, "lr": 2e-2, "warmup": 5, "every": 60, "ema": 0.9, **changes.pop("recipe", {})}
    train_kvpop(
        open_data([traces]),
        out,
        settings=replace(SMALL, **changes.pop("settings", {})),
        recipe=Recipe(**recipe),
        on_validation=looks.append,
        **{"hidden": 16, "memory": 8, **changes},
    )
    return looks


# learning


@pytest.mark.parametrize("architecture", ["mlp", "memory", "both"])
def test_a_rule_about_the_token_itself_is_learned(tmp_path, architecture):
    looks = trained(folder(tmp_path / "traces"), tmp_path / "out", architecture=architecture)
    assert looks[0].reward < 0.7 and max(look.reward for look in looks) > (0.85 if architecture != "memory" else 0.75)
    kind = KVpopMLP if architecture == "mlp" else KVpop
    policy = kind.from_pretrained(tmp_path / "out")
    assert policy.shape.window == W and policy.file.training["objective"]["window"] == W
    assert policy.file.tensors["age"].abs().max() > 0.01


def test_a_rule_about_the_tokens_behind_is_learned_by_late_reading_alone(tmp_path):
    traces = folder(tmp_path / "traces", "window")
    best = {}
    for name, options in {"late": {"late": True}, "immediate": {"late": False}}.items():
        looks = trained(traces, tmp_path / name, architecture="both", recipe={"steps": 200}, **options)
        best[name] = max(look.reward for look in looks)
    assert best["late"] > best["immediate"] + 0.05


def test_a_training_that_is_stopped_goes_on_to_the_same_numbers(tmp_path):
    traces = folder(tmp_path / "traces", num_train=4)
    recipe = {"steps": 8, "every": 4}
    trained(traces, tmp_path / "whole", recipe=recipe)

    class Stopped(Exception):
        pass

    def stop(done, total):
        if done == 6:
            raise Stopped

    with pytest.raises(Stopped):
        trained(traces, tmp_path / "parts", recipe=recipe, on_step=stop)
    trained(traces, tmp_path / "parts", recipe=recipe)
    whole, parts = (KVpop.from_pretrained(tmp_path / name).file.tensors for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


# the teacher


def test_a_lesson_is_the_running_top_k_by_the_target():
    trace = with_later(planted("t0", 60))
    learner = KVpopLearner(LATER_INDEX, [trace], SMALL, hidden=4, memory=2, turn_back=False)
    lesson = learner.lesson(trace)
    worth = target(trace.later)[:, :, 2 : 60 - W].flatten(0, 1)
    assert torch.equal(lesson.worth, worth) and list(lesson.pools) == [30 - 6, 15 - 6]
    for size, pool in lesson.pools.items():
        assert all(map(torch.equal, pool, newcomers(worth, size)))
    assert learner.lesson(trace) is lesson


def test_a_teacher_recalls_itself_and_chance_recalls_its_share():
    worth = torch.randn(50, 400)
    assert torch.equal(recall(worth, worth, 100, 4), torch.ones(50))
    assert float(recall(torch.randn(50, 400), worth, 100, 1).mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.equal(recall(-worth, worth, 100, 1), torch.zeros(50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"delay": 9}}, r"delay of 9, and the window is 4; record traces with kvkeep trace --delay 4"),
        ({"later": None}, "delay of 4"),
        ({"shares": (0.05,)}, r"leave no pool beside 2 sinks and 4 recent"),
    ],
)
def test_traces_that_teach_nothing_are_refused(changes, message):
    trace = replace(with_later(planted("t0", 60)), **({"later": None} if "later" in changes else {}))
    index = replace(LATER_INDEX, settings=changes.get("settings", LATER_INDEX.settings))
    settings = replace(SMALL, **({"shares": changes["shares"]} if "shares" in changes else {}))
    with pytest.raises(ValueError, match=message):
        KVpopLearner(index, [trace], settings, hidden=4, memory=2, turn_back=False).lesson(trace)


@pytest.mark.parametrize("changes", [{"group": "sum"}, {"shares": ()}, {"shares": (1.5,)}, {"window": 0}])
def test_settings_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError):
        Cutoff(**changes)


# the loss


def test_the_loss_of_pairs_by_hand():
    priority, worth = torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[2.0, 5.0, 4.0]])
    kept, newcomer, boundary = torch.tensor([[True, True, False]]), torch.tensor([[1, 2, 0]]), torch.tensor([[0, 0, 2]])
    got = boundary_loss(priority, worth, kept, newcomer, boundary, Pairs(temperature=2.0, least_weight=0.2, margin=4.0))
    # (y, difference of priorities, margin of the target); two are kept and one is not
    pairs = [(1, 1.0, 3.0, 0.75), (1, 3.0, 2.0, 0.75), (-1, -3.0, 2.0, 1.5)]
    weights = [(0.2 + 0.8 / (1 + math.exp(-gap / 4))) * balance for _, _, gap, balance in pairs]
    losses = [math.log(1 + math.exp(-sign * ahead / 2)) for sign, ahead, _, _ in pairs]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert float(got) == pytest.approx(expected, rel=1e-5)


def test_balance_is_clipped_and_pairs_of_one_kind_alone_are_finite():
    priority = torch.randn(2, 9, requires_grad=True)
    kept = torch.ones(2, 9, dtype=torch.bool)
    place = torch.arange(9).expand(2, -1)
    loss = boundary_loss(priority, torch.randn(2, 9), kept, place, place.flip(1), Pairs())
    loss.sum().backward()
    assert loss.isfinite().all() and priority.grad.isfinite().all()


def test_the_gradient_of_the_decay_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    scores, worth = (torch.randn(3, 40, generator=generator).double() for _ in range(2))
    place = torch.arange(40)
    pool = newcomers(worth, 10)
    newcomer = torch.arange(10, 40).expand(3, -1)

    def loss(log_decay: Tensor) -> Tensor:
        priority = static_priority(scores, place, log_decay)
        return boundary_loss(priority, worth, pool.kept[:, 10:], newcomer, pool.boundary[:, 10:], Pairs()).sum()

    log_decay = torch.tensor([[-0.03], [-0.01], [-0.001]]).double().requires_grad_()
    assert torch.autograd.gradcheck(loss, log_decay)
    (gradient,) = torch.autograd.grad(loss(log_decay), log_decay)
    assert gradient.abs().min() > 1e-3


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"least_weight": 2.0}, {"balance": 0.5}, {"margin": -1.0}])
def test_weights_of_pairs_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="temperature and margin are above 0"):
        Pairs(**options)


# the command


def test_the_command_trains_and_says_what_it_reached(tmp_path):
    folder(tmp_path / "traces", num_train=3)
    arguments = ["--traces", tmp_path / "traces", "--window", W, "--sinks", 2, "--shares", "0.5,0.25", "--hidden", 8]
    more = [
        "--memory",
        4,
        "--steps",
        4,
        "--every",
        2,
        "--warmup",
        1,
        "--out",
        tmp_path / "out",
        "--json",
        "--no-turn-back",
    ]
    done = CliRunner().invoke(app, ["train", "kvpop", *map(str, [*arguments, *more])])
    assert done.exit_code == 0, done.output
    policy = KVpop.from_pretrained(tmp_path / "out")
    assert policy.file.training["objective"]["shares"] == [0.5, 0.25]
    assert math.prod(policy.file.tensors["age"].shape) == len(NAMES) == L * H and policy.shape.key_size == D
