"""The training loop and KVP's learner: what is learned, to the same numbers whatever happens on the way."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted import FINGERPRINT, INDEX, NAMES, D, planted, save_planted, save_traces
from torch import Tensor
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.learners import KVPLearner, Ranked, train_kvp
from kvkeep.policies import KVP
from kvkeep.policies.kvp import GLANCE
from kvkeep.train import Recipe, train
from kvkeep.training_data import open_data

ROOT = Path(__file__).parents[1]
SHORT = {"steps": 12, "every": 4, "warmup": 2, "lr": 5e-3}


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    return save_planted(tmp_path_factory.mktemp("traces"))


def run(traces: Path, out: Path, settings: Ranked | None = None, **changes):
    """A short training; the rewards of all validations, and where it stood."""
    looks = []
    options = {name: changes.pop(name) for name in ("architecture", "hidden", "glance", "on_step") if name in changes}
    progress = train_kvp(
        open_data([traces]),
        out,
        settings=settings,
        recipe=Recipe(**{**SHORT, **changes}),
        on_validation=looks.append,
        **{"hidden": 16, **options},
    )
    return looks, progress


def weights(out: Path) -> dict[str, Tensor]:
    return dict(KVP.from_pretrained(out).file.tensors)


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return all(torch.equal(a[name], b[name]) for name in a)


# learning


@pytest.mark.parametrize(
    ("settings", "changes", "least"),
    [
        ({}, {}, -1.2),
        ({"against": 16}, {}, -1.25),
        ({"objective": "sampled"}, {"glance": 0}, -1.3),
        ({}, {"architecture": "paper", "hidden": 32}, -1.5),
    ],
    ids=["exact", "exact with subsets", "sampled", "paper"],
)
def test_a_planted_rule_is_learned(traces, tmp_path, settings, changes, least):
    looks, progress = run(traces, tmp_path, Ranked(**settings), **{"steps": 150, "every": 50, "warmup": 10, **changes})
    assert looks[0].reward < -1.8
    assert progress.best > least
    assert progress.best == max(look.reward for look in looks)


@pytest.mark.parametrize("architecture", ["compact", "paper"])
def test_what_the_newest_queries_read_is_seen_by_agents_that_glance_and_by_no_others(tmp_path, architecture):
    prompts = [planted(f"t{i}", 50 + i, by_reading=True) for i in range(8)]
    prompts += [planted(f"v{i}", split="validation", by_reading=True) for i in range(2)]
    traces = save_traces(tmp_path / "traces", prompts)
    recipe = {"steps": 200, "every": 100, "warmup": 10, "lr": 2e-2, "architecture": architecture}
    reached = {glance: run(traces, tmp_path / str(glance), glance=glance, **recipe)[1].best for glance in (GLANCE, 0)}
    assert reached[GLANCE] > -1.3 and reached[0] < -2
    assert KVP.from_pretrained(tmp_path / str(GLANCE)).needs == {"queries"}
    assert not KVP.from_pretrained(tmp_path / "0").needs


def test_traces_that_do_not_tell_what_agents_are_to_see_are_refused(tmp_path):
    traces = save_traces(tmp_path / "traces", [replace(planted(f"t{i}"), worths={}) for i in range(3)])
    with pytest.raises(
        ValueError, match=r"record it with kvkeep trace --policy 'snapkv\(kernel=1\)', or .* --glance 0"
    ):
        run(traces, tmp_path / "out")
    assert run(traces, tmp_path / "out", glance=0)[0]


def test_the_policy_ranks_as_the_agents_that_were_validated(traces, tmp_path):
    _, progress = run(traces, tmp_path)
    policy = KVP.from_pretrained(tmp_path)
    trace = planted("v0", split="validation")
    learner = KVPLearner(INDEX, [trace], Ranked(), hidden=16)
    example = learner.example(trace)
    positions, length = example.positions[None], torch.tensor([trace.num_tokens])
    scores = [
        policy.trained.score(layer, *(array[None, 2 * layer : 2 * layer + 2] for array in example[:2]),
                             positions[:, 2 * layer : 2 * layer + 2], length,
                             example.received[None, 2 * layer : 2 * layer + 2])[0]
        for layer in (0, 1)
    ]  # fmt: skip
    reloaded = KVPLearner(INDEX, [trace], Ranked(), hidden=16)
    reloaded.network.load_state_dict({name: tensor.float() for name, tensor in policy.file.tensors.items()})
    assert torch.equal(torch.cat(scores), reloaded.network(*example[:-1]))
    assert policy.file.training["reached"] == {
        "step": progress.best_step,
        "reward": progress.best,
        "history": [h for h in progress.history if h["step"] <= progress.best_step],
    }


def test_agents_trained_together_are_what_each_is_alone(traces, tmp_path):
    data, recipe, settings = open_data([traces]), Recipe(**SHORT, clip=0.05), Ranked(against=0)
    together = KVPLearner(data.index, data.prompts, settings, hidden=8)
    start = {name: tensor.clone() for name, tensor in together.network.state_dict().items()}
    train(together, data.prompts, data.validation, recipe, tmp_path / "together")

    def one_head(trace):
        cut = {name: getattr(trace, name)[..., 1:, 1:2, :, :] for name in ("keys", "values")}
        worth = {
            name: getattr(trace, name)[:, 1:, 1:] for name in ("importance_max", "importance_mean", "importance_square")
        }
        read = {name: array[1:, 1:] for name, array in trace.worths.items()}
        return replace(trace, **cut, **worth, worths=read)

    prompts, validation = ([one_head(trace) for trace in part] for part in (data.prompts, data.validation))
    alone = KVPLearner(replace(data.index, layers=[1], heads=[1]), prompts, settings, hidden=8)
    # the rotation is the model's, not an agent's
    shared = "frequencies"
    alone.network.load_state_dict({name: tensor if name == shared else tensor[3:] for name, tensor in start.items()})
    train(alone, prompts, validation, recipe, tmp_path / "alone")
    for name in start.keys() - {shared}:
        trained = [learner.network.state_dict()[name] for learner in (alone, together)]
        assert torch.allclose(trained[0][0], trained[1][3], atol=1e-5), name


def test_the_protected_tokens_are_left_out_of_the_ranking(traces, tmp_path):
    trace = planted("t0", 50)
    example = KVPLearner(INDEX, [trace], Ranked(sinks=3, recent=7)).example(trace)
    assert example.positions[0].tolist() == list(range(3, 43))
    assert torch.equal(example.keys[2], trace.keys[1, 0, 3:43])
    assert torch.equal(example.importance[1], trace.importance()[0, 1, 3:43])
    assert int(example.length) == 50


def test_agents_may_learn_what_squared_attention_calls_important(traces):
    trace = planted("t0", 50)
    trace = replace(trace, importance_square=trace.importance_max.square())
    alone = KVPLearner(INDEX, [trace], Ranked(group="square")).example(trace)
    assert torch.equal(alone.importance[1], trace.importance_square[0, 0, 1, 4:-16])
    beside, plain = (KVPLearner(INDEX, [trace], Ranked(squares=weight)).example(trace) for weight in (0.5, 0.0))
    assert torch.equal(beside.importance, plain.importance + 0.5 * alone.importance)
    with pytest.raises(ValueError, match="has no squares, being older; record it again, or learn without them"):
        KVPLearner(INDEX, [replace(trace, importance_square=None)], Ranked(squares=0.5))


def test_the_learning_rate_rises_and_falls():
    recipe = Recipe(steps=100, warmup=10, lr=1.0, lr_end=0.1)
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.01) and rates[10] == pytest.approx(1) and rates[100] == pytest.approx(0.1)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


# the same numbers


def test_a_seed_gives_one_result_and_another_seed_another(traces, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(traces, tmp_path / name, Ranked(against=16), seed=seed)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")


class Killed(BaseException):
    """Nothing catches it, as nothing catches kill -9."""


@pytest.mark.parametrize("objective", ("exact", "sampled"))
@pytest.mark.parametrize("killed_at", (2, 4, 7))
def test_a_killed_training_goes_on_to_the_same_result(traces, tmp_path, killed_at, objective):
    settings = Ranked(objective=objective, against=16)

    def kill(done, total):
        if done == killed_at:
            raise Killed

    _, whole = run(traces, tmp_path / "whole", settings)
    with pytest.raises(Killed):
        run(traces, tmp_path / "killed", settings, on_step=kill)
    looks, resumed = run(traces, tmp_path / "killed", settings)
    assert resumed == whole
    assert (looks[0].step == 0) == (killed_at <= 4)
    assert same(tmp_path / "whole", tmp_path / "killed")


def test_every_prompt_is_seen_once_in_every_epoch(traces, tmp_path):
    data, seen = open_data([traces]), []

    class Watched(KVPLearner):
        def loss(self, network, trace, generator):
            seen.append(trace.key)
            return super().loss(network, trace, generator)

    learner = Watched(data.index, data.prompts, Ranked(), hidden=4)
    train(learner, data.prompts, data.validation, Recipe(steps=6, batch=4, every=6), tmp_path)
    epochs = [seen[:12], seen[12:]]
    assert all(sorted(epoch) == sorted(trace.key for trace in data.prompts) for epoch in epochs)
    assert epochs[0] != epochs[1]


SHARED = {"recipe": Recipe(steps=5, batch=3, every=5, warmup=2), "settings": Ranked(against=16), "hidden": 8}
WORK = """
import sys
import torch
torch.set_num_threads(1)
from kvkeep.learners import train_kvp
from kvkeep.team import assemble
from kvkeep.training_data import open_data
from test_train import SHARED, Watching

with Watching() as seen:
    team = assemble()
    train_kvp(open_data([sys.argv[1]]), sys.argv[2], **SHARED, team=team, on_validation=seen.look)
torch.save([team.size, seen.network.state_dict(), seen.rewards], f"{sys.argv[2]}-{team.rank}.pt")
"""


class Watching:
    """Remembers the network that is trained inside the block, and the last rewards."""

    def __enter__(self):
        self._make = KVPLearner.__init__

        def make(learner, *args, **options):
            self._make(learner, *args, **options)
            self.network = learner.network

        KVPLearner.__init__ = make
        return self

    def look(self, seen):
        self.rewards = seen.rewards

    def __exit__(self, *exception):
        KVPLearner.__init__ = self._make


def test_two_processes_hold_equal_weights_and_train_as_one_does(traces, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, traces, tmp_path / "two"],
            env={**os.environ, **paths, **{n: str(v) for n, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}},
        )
        for rank in (0, 1)
    ]
    with Watching() as alone:
        train_kvp(open_data([traces]), tmp_path / "one", **SHARED, on_validation=alone.look)
    assert [process.wait(120) for process in processes] == [0, 0]
    (size, first, rewards), (_, second, _) = (torch.load(tmp_path / f"two-{rank}.pt") for rank in (0, 1))
    assert size == 2
    for name, tensor in alone.network.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], tensor, atol=1e-5), name
    assert torch.allclose(rewards, alone.rewards, atol=1e-4)


# what can go wrong


def test_a_loss_that_is_no_number_stops_naming_layer_and_head_and_keeps_the_last_good_policy(traces, tmp_path):
    data = open_data([traces])
    bad = planted("bad", 50)
    bad.keys[1, 0, 20] = torch.nan
    learner = KVPLearner(data.index, data.prompts, Ranked(), hidden=8)

    class Late(Sequence):
        def __len__(self):
            return 12

        def __getitem__(self, place):
            return bad if place == 5 and 4 in seen else data.prompts[place]

    seen = []
    with pytest.raises(ValueError, match=r"layer 1, head 0 is no finite number at step \d+, on .*bad.* step 4, stays"):
        train(learner, Late(), data.validation, Recipe(**SHORT), tmp_path, on_validation=lambda v: seen.append(v.step))
    assert KVP.from_pretrained(tmp_path).file.training["reached"]["step"] == 4


def test_training_stops_when_validation_no_longer_improves(traces, tmp_path):
    # with so small a rate nothing changes
    _, progress = run(traces, tmp_path, steps=200, lr=1e-12, lr_end=1e-12, every=2, patience=3)
    assert progress.step - progress.best_step == 6 and progress.step < 200


def test_an_unfinished_training_with_other_settings_and_a_finished_one_are_not_overwritten(traces, tmp_path):
    def kill(done, total):
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        run(traces, tmp_path, on_step=kill)
    with pytest.raises(ValueError, match=r"unfinished training whose lr is 0\.005, not 0\.1"):
        run(traces, tmp_path, lr=0.1)
    with pytest.raises(ValueError, match="hidden is 16, not 8"):
        run(traces, tmp_path, hidden=8)
    run(traces, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy.json", "policy.safetensors"]
    with pytest.raises(ValueError, match="holds a finished policy"):
        run(traces, tmp_path)


def test_a_prompt_with_nothing_to_rank_is_refused_by_name(tmp_path):
    folder = save_traces(tmp_path / "traces", [planted("a"), planted("short", 21), planted("b", split="validation")])
    with pytest.raises(ValueError, match="trace short has 21 tokens, of which the first 4 and the last 16"):
        run(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Ranked, {"objective": "exactly"}, "exact, sampled"),
        (Ranked, {"draws": 1}, "at least 2 draws"),
        (Ranked, {"group": "sum"}, "max or mean"),
        (Ranked, {"recent": -1}, "cannot be negative"),
        (Recipe, {"steps": 0}, "steps must be above 0"),
        (Recipe, {"ema": 1.0}, r"\[0, 1\)"),
    ],
)
def test_settings_that_make_no_training_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


# data


def test_the_filter_keeps_sources_that_begin_so_and_the_limit_draws_among_them(tmp_path):
    traces = [planted(f"{kind}{i}", source=f"{kind}/inside") for kind in ("niah_1", "niah_2", "chat") for i in range(4)]
    save_traces(tmp_path, [*traces, planted("v", source="niah_1/inside", split="validation")])
    assert open_data([tmp_path], sources=["niah"]).prompts.sources == {"niah_1/inside": 4, "niah_2/inside": 4}
    few, more = (open_data([tmp_path], num_prompts=number).prompts for number in (3, 7))
    assert (len(few), len(more)) == (3, 7)
    assert [trace.key for trace in few] == [trace.key for trace in more][:3]
    with pytest.raises(ValueError, match=r"there are 0 and 0. Sources: chat/inside, niah_1/inside, niah_2/inside"):
        open_data([tmp_path], sources=["code"])
    with pytest.raises(ValueError, match="wanted are 99 prompts"):
        open_data([tmp_path], num_prompts=99)


def test_without_validation_prompts_a_share_is_held_out_and_test_prompts_are_left_alone(tmp_path):
    traces = [planted(f"t{i}") for i in range(10)]
    save_traces(tmp_path, [*traces, planted("x", split="test")])
    data, again, other = (open_data([tmp_path], share=0.2, seed=seed) for seed in (0, 0, 1))
    assert (len(data.prompts), len(data.validation)) == (8, 2)
    held_out = [{trace.key for trace in part.validation} for part in (data, again, other)]
    assert {trace.key for trace in data.prompts} | held_out[0] == {f"t{i}" for i in range(10)}
    assert held_out[0] == held_out[1] != held_out[2]


def test_folders_of_one_model_are_joined_and_others_refused(traces, tmp_path):
    more = save_planted(tmp_path / "more", num_train=3)
    assert len(open_data([traces, more]).prompts) == 15
    foreign = replace(INDEX, fingerprint={**FINGERPRINT, "head size": 4})
    save_traces(tmp_path / "foreign", [planted("f")], foreign)
    with pytest.raises(ValueError, match="head size is 4; this model's is 8"):
        open_data([traces, tmp_path / "foreign"])
    save_traces(tmp_path / "part", [planted("p")], replace(INDEX, layers=[0, 5]))
    with pytest.raises(ValueError, match="other layers or heads"):
        open_data([traces, tmp_path / "part"])


# the command


def command(*arguments):
    return CliRunner().invoke(app, ["train", "kvp", *map(str, arguments)])


def test_the_command_trains_and_says_where_it_stands(traces, tmp_path):
    done = command(
        "--traces", traces, "--out", tmp_path, "--steps", 4, "--every", 2, "--hidden", 8, "--prompts", 5, "--json"
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [look["step"] for look in told["history"]] == [2, 4]
    assert told["best"] == max(look["reward"] for look in told["history"])
    assert set(told["layers"]) == {"0", "1"}
    lines = [line for line in done.stderr.splitlines() if line.startswith("step")]
    assert len(lines) == 3 and "worst layers" in lines[0] and "(best)" in lines[1]
    file = KVP.from_pretrained(tmp_path).file
    assert file.fingerprint == FINGERPRINT and file.architecture["hidden"] == 8
    assert file.training["data"]["prompts"] == {"planted/inside": 5}
    assert file.training["recipe"]["steps"] == 4 and "commit" in file.training
    assert json.loads((tmp_path / "policy.json").read_text())["digest"] == file.digest


def test_the_command_explains_itself():
    done = command("--help")
    assert done.stdout.count("kvkeep train kvp --traces") == 3
    assert "--json" in done.stdout
    assert len(NAMES) == INDEX.heads[-1] * 2 + 2 and D == 8
