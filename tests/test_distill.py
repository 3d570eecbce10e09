"""Distillation: the student reads as decoding under its policy does, and learns to say what the dense model says.

T tokens.
"""

import copy
from dataclasses import replace

import pytest
import torch
from folders import save_tiny
from torch import Tensor
from typer.testing import CliRunner

import kvkeep
from kvkeep import KVCache
from kvkeep.cli import app
from kvkeep.distill import Distillation, DistillLearner, Text, distil
from kvkeep.fingerprint import fingerprint
from kvkeep.policies import KVpop
from kvkeep.pool_learner import Cutoff
from kvkeep.train import Recipe, train

T = 80
CUTOFF = Cutoff(window=6, sinks=2, shares=(0.5, 0.25), num_pairs=32)
SMALL = {"hidden": 8, "memory": 4}


def text(seed: int, length: int = T) -> Text:
    generator = torch.Generator().manual_seed(seed)
    return Text(key=f"text {seed}", token_ids=torch.randint(2, 128, (1, length), generator=generator))


def learner(model, **changes) -> DistillLearner:
    return DistillLearner(copy.deepcopy(model), replace(Distillation(cutoff=CUTOFF), **changes), **SMALL)


def decoded(model, policy: KVpop, token_ids: Tensor, budget: int) -> Tensor:
    """Logits of a cache that evicts after each token."""
    cache, logits = KVCache(model, policy=policy, budget=budget, sinks=2, recent=0), []
    with torch.no_grad(), kvkeep.attach(model):
        for at, token in enumerate(token_ids[0]):
            argument = {kvkeep.cache_argument(model): cache, "position_ids": torch.tensor([[at]])}
            logits.append(model(token.view(1, 1), **argument).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_student_reads_what_decoding_token_by_token_reads(tiny, family, monkeypatch):
    monkeypatch.setattr("kvkeep.distill._TILE", 30)
    model = tiny(family)
    policy = KVpop.untrained(fingerprint(model.config), window=6)
    taught = DistillLearner(
        model, Distillation(cutoff=CUTOFF), scorers=copy.deepcopy(policy.trained.on(torch.device("cpu")))
    )
    with torch.no_grad():
        got, of_scorers = taught.network(text(0).token_ids, 0.25, CUTOFF, torch.Generator().manual_seed(0))
        dense = model(text(0).token_ids).logits
    expected = decoded(model, policy, text(0).token_ids, T // 4)
    assert (got - expected).abs().max() < 1e-4 and (got - dense).abs().max() > 0.1
    assert of_scorers.isfinite()


def test_a_student_that_keeps_everything_is_the_teacher(tiny):
    model = tiny("llama")
    taught = learner(model, cutoff=replace(CUTOFF, shares=(0.99,)))
    assert float(taught.reward(taught.network, text(0, 12)).detach()) == pytest.approx(0, abs=1e-6)
    short = learner(model)
    assert float(short.reward(short.network, text(0))) < -1e-3


def test_scorers_learn_from_their_loss_and_the_model_from_its_divergence_alone(tiny):
    taught = learner(tiny("llama"))
    divergence, of_scorers = taught._read(taught.network, text(0), 0.25, torch.Generator().manual_seed(0))
    parts = {"scorers": list(taught.network.scorers.parameters()), "model": list(taught.network.model.parameters())}
    for loss, learns in ((divergence, "model"), (of_scorers, "scorers")):
        for name, weights in parts.items():
            grads = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            moved = any(grad is not None and bool(grad.abs().max() > 0) for grad in grads)
            assert moved == (name == learns)
    assert not any(weight.requires_grad for weight in taught.teacher.parameters())


def test_training_lowers_the_divergence_and_leaves_model_and_policy(tiny, tmp_path):
    looks = []
    recipe = Recipe(steps=30, lr=1e-2, lr_end=1e-3, warmup=3, every=10, ema=0.5, clip=1.0)
    taught = learner(tiny("llama"), model_lr=1e-3)
    # random words hold nothing that would carry over to others
    texts = [text(0), text(1)]
    train(taught, texts, texts, recipe, tmp_path, on_validation=looks.append)
    assert max(look.reward for look in looks) > 0.7 * looks[0].reward
    policy = KVpop.from_pretrained(tmp_path)
    assert policy.shape.window == 6 and policy.file.training["reached"]["reward"] == max(look.reward for look in looks)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    cache = KVCache(model, policy=policy, budget=30)
    kvkeep.generate(model, texts[0].token_ids, cache=cache, max_new_tokens=3, do_sample=False)
    assert cache.report().kept == 30


def test_a_stopped_distillation_goes_on_to_the_same_numbers(tiny, tmp_path):
    recipe = Recipe(steps=6, lr=1e-2, warmup=1, every=3, ema=0.5, clip=1.0)
    prompts, held_out = [text(0), text(1)], [text(2)]

    class Stopped(Exception):
        pass

    def stop(done, total):
        if done == 4:
            raise Stopped

    whole = learner(tiny("llama"))
    train(whole, prompts, held_out, recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(learner(tiny("llama")), prompts, held_out, recipe, tmp_path / "parts", on_step=stop)
    again = learner(tiny("llama"))
    train(again, prompts, held_out, recipe, tmp_path / "parts")
    for one, other in zip(whole.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"top": 0}, {"model_lr": -1.0}])
def test_settings_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="top must be at least 1"):
        Distillation(**options)


def test_texts_that_leave_nothing_to_drop_are_refused(tiny, tmp_path):
    taught = learner(tiny("llama"))
    with pytest.raises(ValueError, match=r"text text 0 has 12 tokens, of which shares \(0.5, 0.25\) leave no pool"):
        distil(taught, [text(0, 12)], [text(1)], tmp_path, recipe=Recipe(steps=1))


def test_the_command_trains_model_and_scorers(tmp_path):
    model, words = save_tiny(tmp_path / "model"), tmp_path / "words.txt"
    words.write_text("The keeper counts ships and writes their names into a book. " * 400)
    sizes = ["--window", 6, "--sinks", 2, "--shares", "0.5", "--hidden", 8, "--memory", 4, "--length", 100]
    recipe = ["--steps", 2, "--every", 2, "--warmup", 1, "--prompts", 3, "--out", tmp_path / "out", "--json"]
    arguments = ["train", "kvpop", "--train", "all", "-m", model, "--data", f"text:{words}", *sizes, *recipe]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert KVpop.from_pretrained(tmp_path / "out").file.training["objective"]["model_lr"] == 8e-5
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    for wrong in (["--train", "all"], ["--train", "some"], []):
        refused = CliRunner().invoke(app, ["train", "kvpop", "--out", str(tmp_path / "none"), *wrong])
        assert isinstance(refused.exception, ValueError)
