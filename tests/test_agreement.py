"""Agreement with the full cache: counted by hand, the same alone as in a batch, and under a mask as token by token."""

import json
import math
from dataclasses import replace

import pytest
import torch
from folders import save_tiny
from letters import letter_tokenizer
from typer.testing import CliRunner

import kvkeep
from kvkeep import POLICIES, KVCache
from kvkeep.cli import app
from kvkeep.evaluate import agreement as module
from kvkeep.evaluate.agreement import BLOCK, METRICS, agreement, compare
from kvkeep.evaluate.rows import read_rows, read_samples
from kvkeep.policies.learned import LearnedPolicy
from kvkeep.recorder import Branch, Item

TOKENIZER = letter_tokenizer()
SMALL = {"model_name": "tiny", "policies": ["streaming", "tova"], "budgets": [32]}


def drawn(length: int, seed: int) -> torch.Tensor:
    return torch.randint(4, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def item(name: str = "a", *, prompt: int = 50, text: int = 70, source: str = "text/one", num_new: int = 0) -> Item:
    tokens = drawn(prompt + text, len(name))
    branch = Branch(tokens[:, prompt:], num_new)
    return Item(source=source, split="test", name=name, token_ids=tokens[:, :prompt], branches=[branch])


def read(tiny, out, *items, family="llama", **changes):
    return agreement(tiny(family), TOKENIZER, items or [item()], out=out, **{**SMALL, **changes})


def by_arm(rows, metric="kl_to_full"):
    return {(row.policy, row.budget): row for row in rows if row.metric == metric}


# one prediction


def test_a_prediction_compared_by_hand():
    full = torch.tensor([[0.5, 0.25, 0.25]]).log()
    others = torch.stack([full, torch.tensor([[0.25, 0.5, 0.25]]).log()])
    strayed = compare(full, others, tokens=torch.tensor([1]))
    assert strayed.top1[:, 0].tolist() == [1, 0]
    assert strayed.kl[:, 0].tolist() == pytest.approx([0, 0.25 * math.log(2)])
    assert strayed.loss[:, 0].tolist() == pytest.approx([math.log(4), math.log(2)])
    assert strayed.excess[:, 0].tolist() == pytest.approx([0, -math.log(2)])


def test_divergence_is_torchs_own():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logs = logits.log_softmax(-1)
    expected = [torch.nn.functional.kl_div(other, logs[0], reduction="sum", log_target=True) for other in logs[1:]]
    kl = compare(logits[:1], logits[1:, None], torch.tensor([3])).kl[:, 0]
    assert kl.tolist() == pytest.approx([float(one) for one in expected], abs=1e-6)


# whole texts


def test_a_budget_that_holds_everything_agrees_everywhere(tiny, tmp_path):
    rows = read(tiny, tmp_path, budgets=[500])
    for row in rows:
        at = {"top1_agreement": 1, "kl_to_full": 0, "perplexity_ratio": 1}.get(row.metric)
        assert at is None or row.value == pytest.approx(at, abs=1e-5)


def alone(model, one: Item, **settings) -> torch.Tensor:
    """What a cache by itself predicts before each token behind the prompt."""
    cache = KVCache(model, **settings)
    kvkeep.prefill(model, one.token_ids[:, :-1], cache)
    fed = torch.cat([one.token_ids[:, -1:], one.branches[0].given[:, :-1]], 1)
    return torch.cat([kvkeep.prefill(model, token, cache).logits[0] for token in fed.split(1, dim=1)])


def test_each_arm_of_a_batch_predicts_what_it_would_alone(tiny, tmp_path):
    one, model = item(), tiny("llama")
    read(tiny, tmp_path, one, policies=["tova"], budgets=[24, "40%"])
    full = alone(model, one).log_softmax(-1)
    for record in read_samples(tmp_path / "samples.jsonl")[:-1]:
        theirs = alone(model, one, policy=record["policy"], budget=record["budget"]).log_softmax(-1)
        kl, same = (full.exp() * (full - theirs)).sum(-1), (full.argmax(-1) == theirs.argmax(-1)).float()
        assert record["blocks"]["kl"] == pytest.approx([float(b.sum()) for b in kl.split(BLOCK)], rel=1e-3, abs=1e-5)
        assert record["blocks"]["top1"] == [float(block.sum()) for block in same.split(BLOCK)]
        assert record["score"] == pytest.approx(float(same.mean()))
    assert record["kept"] == math.ceil(0.4 * 119)


@pytest.mark.parametrize("masked", [False, True])
def test_texts_of_equal_lengths_are_read_together_and_measured_as_alone(tiny, tmp_path, masked, monkeypatch):
    texts = [item("a"), item("bb"), item("long", text=90), item("eeeee")]
    policies = ["streaming"] if masked else ["streaming", "h2o", "lorekv", "qevict", "oracle"]
    shapes = []
    begun = module.begin
    monkeypatch.setattr(module, "begin", lambda *given: shapes.append(tuple(given[2].shape)) or begun(*given))
    read(tiny, tmp_path / "together", *texts, policies=policies, budgets=[40], masked=masked)
    read(tiny, tmp_path / "alone", *texts, policies=policies, budgets=[40], masked=masked, batch=1)
    assert shapes == ([] if masked else [(3, 50), (1, 50), *[(1, 50)] * 4])
    together, alone = (
        {record["key"]: record for record in read_samples(tmp_path / name / "samples.jsonl")}
        for name in ("together", "alone")
    )
    assert together.keys() == alone.keys() and len(together) == 4 * (1 + len(policies))
    for key, record in together.items():
        for name, sums in record.pop("blocks").items():
            assert sums == pytest.approx(alone[key]["blocks"][name], rel=1e-3, abs=1e-4), (key, name)
        assert record == {name: value for name, value in alone[key].items() if name != "blocks"}


def test_every_policy_can_be_read_together_with_the_others(tiny, tmp_path):
    # weights that ship fit one model only
    names = [name for name, kind in POLICIES.items() if not issubclass(kind, LearnedPolicy)]
    rows = read(tiny, tmp_path, item(text=20), policies=names, budgets=[32])
    assert [row.policy for row in rows if row.metric == "top1_agreement"] == ["full", *names]
    assert all(row.value > 0.01 for row in rows if row.metric == "kl_to_full" and row.policy != "full")


def test_rows_weigh_texts_alike_and_positions_by_their_tokens(tiny, tmp_path):
    long, short = item("long", text=140, source="text/one"), item("b", text=70, source="chat/two")
    rows = read(tiny, tmp_path, long, short, policies=["streaming"], by_source=True)
    assert [row.task for row in rows[:: 2 * len(METRICS)]] == ["all", "text/one", "chat/two"]
    whole, one, two = (
        by_arm([r for r in rows if r.task == task])["streaming", "32"] for task in ("all", "text/one", "chat/two")
    )
    assert whole.value == pytest.approx((one.value + two.value) / 2)
    assert whole.low == pytest.approx(min(one.value, two.value)) and whole.n == 2
    places = one.extra["by_position"]
    assert [(place["first"], place["until"]) for place in places] == [(0, 64), (64, 128), (128, 256)]
    assert one.value == pytest.approx(sum(p["value"] * n for p, n in zip(places, (64, 64, 12), strict=True)) / 140)
    assert [place["n"] for place in whole.extra["by_position"]] == [2, 2, 1]
    ratio = by_arm(rows, "perplexity_ratio")["streaming", "32"].value
    perplexities = by_arm(rows, "perplexity")
    assert ratio == pytest.approx(perplexities["streaming", "32"].value / perplexities["full", "full"].value, rel=1e-3)


def test_the_row_of_the_full_cache_says_what_rounding_does(tiny, tmp_path):
    [row] = [row for row in read(tiny, tmp_path) if row.metric == "kl_to_full" and row.policy == "full"]
    assert 0 <= row.value < 1e-6 and row.kept == 119


def test_the_models_own_answer_is_read_where_it_is_asked_for(tiny, tmp_path, monkeypatch):
    model, one = tiny("llama"), item(text=0, num_new=20)
    fed = []
    monkeypatch.setattr(
        module, "compare", lambda full, logits, tokens: fed.extend(tokens) or compare(full, logits, tokens)
    )
    read(tiny, tmp_path, one)
    answer = model.generate(one.token_ids, attention_mask=torch.ones(1, 50), max_new_tokens=20, do_sample=False)
    assert fed == answer[0, 50:].tolist()
    assert by_arm(read_rows(tmp_path / "rows.jsonl"), "perplexity")["full", "full"].value < 128


# under a mask, and in chunks


@pytest.mark.parametrize(("family", "budget"), [("llama", 24), ("llama", "30%"), ("llama", 500), ("qwen3", 40)])
def test_reading_at_once_under_a_mask_equals_token_by_token(tiny, tmp_path, family, budget, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 37)
    by_token, at_once = (
        by_arm(
            read(tiny, tmp_path / str(masked), family=family, policies=["streaming"], budgets=[budget], masked=masked)
        )["streaming", str(budget)]
        for masked in (False, True)
    )
    assert at_once.value == pytest.approx(by_token.value, rel=1e-4, abs=1e-6)
    assert at_once.value > 0.01 or budget == 500
    assert (by_token.extra["reading"], at_once.extra["reading"]) == ("token by token", "at once, under a mask")
    assert at_once.kept is None and by_token.kept is not None


def test_chunks_are_another_measurement_and_say_so(tiny, tmp_path):
    one, eight = (by_arm(read(tiny, tmp_path / str(c), chunk=c))["tova", "32"] for c in (1, 8))
    assert one.value != eight.value
    assert eight.extra["reading"] == "8 tokens at once"


# going on


def test_a_run_goes_on_after_the_texts_that_are_done(tiny, tmp_path, monkeypatch):
    texts = [item("a", text=20), item("bb", text=20)]
    whole = read(tiny, tmp_path / "whole", *texts, batch=1)
    read(tiny, tmp_path / "parts", texts[0])
    asked = []
    kept = module._Session.read
    monkeypatch.setattr(
        module._Session,
        "read",
        lambda self, some, *how: asked.extend(one.name for one in some) or kept(self, some, *how),
    )
    rows = read(tiny, tmp_path / "parts", *texts)
    assert asked == ["bb"]
    assert [replace(row, time="") for row in rows] == [replace(row, time="") for row in whole]


def test_another_policy_joins_the_texts_that_are_done(tiny, tmp_path):
    before = read(tiny, tmp_path, policies=["streaming"])
    both = read(tiny, tmp_path, policies=["streaming", "tova"])
    assert by_arm(both)["streaming", "32"].value == by_arm(before)["streaming", "32"].value
    assert ("tova", "32") in by_arm(both)


# what is refused


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"masked": True}, "Tova cannot tell beforehand"),
        ({"masked": True, "chunk": 2}, "chunk"),
        ({"masked": True, "policies": ["streaming"], "budgets": ["1MiB"]}, "bytes"),
        ({"policies": ["nothing"]}, "unknown policy"),
        ({"budgets": []}, "no budget given"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(tiny, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        read(tiny, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_no_texts_and_other_settings_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="no texts"):
        agreement(tiny("llama"), TOKENIZER, [], out=tmp_path, **SMALL)
    read(tiny, tmp_path)
    with pytest.raises(ValueError, match="chunk 1 there, 4 now"):
        read(tiny, tmp_path, chunk=4)


def test_windows_have_no_masked_form(tiny, tmp_path):
    with pytest.raises(ValueError, match="sliding-window"):
        read(tiny, tmp_path, family="gemma3", policies=["streaming"], masked=True)


# the command


def test_the_command_reads_held_out_texts(tmp_path):
    folder = save_tiny(tmp_path / "model")
    lines = [{"text": "".join(chr(97 + (i * j) % 26) for i in range(300))} for j in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["agreement", "--model", folder, "--data", str(tmp_path / "texts.jsonl"), "-n", "2", "-p", "streaming"]
    options = ["-b", "32", "--length", "100", "--tokens", "30", "--least-tokens", "30", "--least-length", "60"]
    done = CliRunner().invoke(app, [*arguments, *options, "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {(row["policy"], row["n"], row["split"]) for row in rows} == {("full", 2, "test"), ("streaming", 2, "test")}
    assert rows[0]["extra"]["tokens"] == 60 and 60 <= rows[0]["extra"]["prompt_tokens"] <= 100
