"""Diagnoses against dense attention and plain loops, by hand, and by laws that hold for every policy."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from letters import letter_tokenizer
from typer.testing import CliRunner

import kvkeep
from kvkeep import KVCache
from kvkeep.cli import app
from kvkeep.evaluate import diagnose as module
from kvkeep.evaluate.diagnose import SINK, TIERS, Events, best_tiers, diagnose, tiers_of
from kvkeep.evaluate.rows import bootstrap, read_samples
from kvkeep.recorder import Branch, Item

TOKENIZER = letter_tokenizer()
FULL, QUANTIZED, GONE, RECENT = range(len(TIERS))
SMALL = {"model_name": "tiny", "policies": ["streaming", "tova"], "budgets": ["40%"], "events": Events(horizon=16)}


def item(name: str = "a", *, prompt: int = 60, text: int = 72) -> Item:
    tokens = torch.randint(4, 100, (1, prompt + text), generator=torch.Generator().manual_seed(len(name)))
    return Item(
        source="text/one", split="test", name=name, token_ids=tokens[:, :prompt], branches=[Branch(tokens[:, prompt:])]
    )


def look(tiny, out, *items, **changes):
    return diagnose(tiny("llama"), TOKENIZER, items or [item()], out=out, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def looked(tiny, tmp_path_factory):
    """A diagnosis with views, its folder and rows."""
    out = tmp_path_factory.mktemp("diagnosis")
    return out, look(tiny, out, views=1)


def value(rows, policy: str, metric: str = "future_missed_mass") -> float:
    [row] = [row for row in rows if (row.policy, row.metric) == (policy, metric)]
    return row.value


# against dense attention


def dense_mass(model, tokens: torch.Tensor) -> torch.Tensor:
    """Attention maps [L, H, S, S], mean over the query heads of each KV head."""
    eager = type(model)(model.config).eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(eager(tokens, output_attentions=True, use_cache=False).attentions)
    eager.set_attn_implementation("sdpa")
    return maps[:, 0].unflatten(1, (model.config.num_key_value_heads, -1)).mean(2)


def test_what_streaming_misses_is_the_dense_attention_to_what_it_dropped(tiny, looked):
    out, rows = looked
    one, omega, horizon = item(), 8, 16
    maps = dense_mass(tiny("llama"), torch.cat([one.token_ids, one.branches[0].given], 1))
    shares = []
    for step in range(omega, 72 - horizon + 1, omega):
        n = 59 + step
        first = n - (-(-2 * n // 5) - 4)
        future = maps[:, :, n : n + horizon, :n].sum(2)
        shares.append(future[..., 4:first].sum((1, 2)) / future[..., 4:].sum((1, 2)))
    assert value(rows, "streaming") == pytest.approx(float(torch.stack(shares).mean()), abs=1e-5)
    [record] = [one for one in read_samples(out / "samples.jsonl") if one["policy"] == "streaming"]
    assert record["curve"]["missed"] == pytest.approx([float(share.mean()) for share in shares], abs=1e-4)
    assert record["curve"]["step"] == list(range(omega, 72 - horizon + 1, omega))


# laws


def test_the_full_cache_misses_nothing_and_hindsight_least(looked):
    _, rows = looked
    assert value(rows, "full") == 0
    assert 0 < value(rows, "oracle") <= value(rows, "oracle of windows")
    assert value(rows, "oracle") <= min(value(rows, "streaming"), value(rows, "tova"))


def test_what_is_dropped_never_comes_back_and_hindsight_would_fetch_it(looked):
    _, rows = looked
    assert value(rows, "tova", "lir") == value(rows, "streaming", "lir") == 0
    assert value(rows, "oracle", "lir") > 0
    assert not [row for row in rows if row.policy == "tova" and row.metric == "time_to_revival"]


def test_a_budget_that_holds_everything_misses_nothing(tiny, tmp_path):
    rows = look(tiny, tmp_path, item(text=32), budgets=[400])
    assert value(rows, "tova") == value(rows, "oracle") == 0


def test_rows_are_over_texts_and_layers(tiny, tmp_path):
    rows = look(tiny, tmp_path, item("a", text=32), item("bb", text=32), policies=["streaming"])
    layers = {record["policy"]: [] for record in read_samples(tmp_path / "samples.jsonl")}
    for record in read_samples(tmp_path / "samples.jsonl"):
        layers[record["policy"]] += record["layers"]["missed"]
    [row] = [row for row in rows if (row.policy, row.metric) == ("streaming", "future_missed_mass")]
    assert (row.n, row.extra["texts"], row.extra["horizon"]) == (6, 2, 16)
    assert row.value == pytest.approx(sum(layers["streaming"]) / 6)
    assert (row.low, row.high) == pytest.approx(bootstrap(layers["streaming"])[:2])
    assert sum(row.extra["tiers"].values()) == pytest.approx(1)


# where tokens are


def test_tiers_are_where_the_layers_say(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy="streaming", budget=30)
    kvkeep.prefill(model, item().token_ids, cache)
    tiers = tiers_of(cache)
    assert tiers.shape == (3, 2, 60)
    expected = [SINK] * 4 + [GONE] * 30 + [FULL] * 10 + [RECENT] * 16
    assert tiers[1, 1].tolist() == expected


def test_what_is_held_as_codes_is_another_tier(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy="streaming", budget=30)
    kvkeep.prefill(model, item().token_ids, cache)
    layer = cache.managed[0]
    full, coded = layer.holdings()["full"], torch.tensor([[[10, 11, -1]]]).expand(1, 2, 3)
    layer.holdings = lambda: {"full": full, "quantized": coded}
    assert (tiers_of(cache)[0] == QUANTIZED).nonzero()[:, 1].tolist() == [10, 11, 10, 11]


def test_the_best_tiers_hold_as_much_where_it_counts():
    like = torch.tensor([[[SINK, FULL, GONE, FULL, GONE, GONE, RECENT]]], dtype=torch.int8)
    mass = torch.tensor([[[9.0, 1, 1, 0, 3, 4, 9]]])
    assert best_tiers(like, mass, 1).tolist() == [[[SINK, GONE, GONE, GONE, FULL, FULL, RECENT]]]
    # two windows of two, and one token over: the second is the better
    assert best_tiers(like, mass, 2).tolist() == [[[SINK, GONE, GONE, FULL, FULL, GONE, RECENT]]]


def unpacked(text: str, kind: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), kind).tolist()


def test_a_view_tells_where_every_token_was_at_every_event(tiny, tmp_path, monkeypatch):
    told = {}
    kept = module._Account.add
    monkeypatch.setattr(
        module._Account,
        "add",
        lambda self, step, tiers, mass: told.setdefault(id(self), []).append(tiers) or kept(self, step, tiers, mass),
    )
    monkeypatch.setattr(
        module, "_write_view", lambda folder, arm, view: (folder.mkdir(exist_ok=True), views.append((arm, view)))
    )
    views = []
    look(tiny, tmp_path, policies=["tova"], views=1)
    histories = {json.dumps([one.tolist() for one in history]) for history in told.values()}
    assert [arm.policy for arm, _ in views] == ["tova", "oracle", "oracle of windows"]
    for _, view in views:
        moves = list(
            zip(
                *(unpacked(view[name], kind) for name, kind in (("token", "<i4"), ("event", "<i4"), ("tier", "u1"))),
                strict=True,
            )
        )
        heads = [moves[a:b] for a, b in zip(view["starts"], view["starts"][1:], strict=False)]
        history = []
        for event, step in enumerate(view["steps"]):
            n = view["prompt_tokens"] - 1 + step
            tiers = np.zeros((len(heads), n), dtype=int)
            for head, of_head in enumerate(heads):
                for token, at, tier in of_head:
                    if at <= event:
                        tiers[head, token] = tier
            tiers[:, n - 16 :], tiers[:, :4] = RECENT, SINK
            history.append(tiers.reshape(3, 2, n).tolist())
        assert json.dumps(history) in histories
    worth = np.frombuffer(base64.b64decode(views[0][1]["worth"]), "<f4").reshape(6, -1)
    assert np.isfinite(worth[:, :59]).all() and ((worth[:, 4:59] >= 0) & (worth[:, 4:59] <= 1)).all()


# codes


def test_what_codes_hold_is_missed_in_full_precision_alone(tiny, tmp_path):
    rows = look(tiny, tmp_path, item(prompt=100), policies=["qevict", "h2o"], budgets=["30%"], views=1)
    missed, in_full = value(rows, "qevict"), value(rows, "qevict", "future_missed_mass_full")
    assert missed < value(rows, "h2o") and missed < in_full
    [row] = [row for row in rows if (row.policy, row.metric) == ("qevict", "churn")]
    assert row.extra["tiers"]["quantized"] == pytest.approx((in_full - missed), rel=0.3)
    assert 0.5 < value(rows, "qevict", "q_score_cosine") <= 1
    assert 0 < value(rows, "qevict", "q_score_recovered") <= 1
    assert not [row for row in rows if row.policy == "h2o" and row.metric.startswith("q_score")]


def test_codes_of_many_bits_see_what_the_full_cache_pays(tiny, tmp_path):
    policies = ["qevict(bits=2)", "qevict(bits=8)"]
    rows = look(tiny, tmp_path, item(prompt=100), policies=policies, budgets=["90%"])
    coarse, fine = (value(rows, name, "q_score_cosine") for name in ("qevict", "qevict(bits=8)"))
    assert coarse < fine and fine > 0.99


# going on, and what is refused


def test_a_diagnosis_goes_on_after_the_texts_that_are_done(tiny, tmp_path, monkeypatch):
    texts = [item("a", text=24), item("bb", text=24)]
    whole = look(tiny, tmp_path / "whole", *texts, policies=["streaming"])
    look(tiny, tmp_path / "parts", texts[0], policies=["streaming"])
    asked, kept = [], module._Session._read
    monkeypatch.setattr(
        module._Session, "_read", lambda self, one, **how: asked.append(one.name) or kept(self, one, **how)
    )
    rows = look(tiny, tmp_path / "parts", *texts, policies=["streaming"])
    assert asked == ["bb"]
    assert [replace(row, time="") for row in rows] == [replace(row, time="") for row in whole]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"policies": ["nothing"]}, "unknown policy"),
        ({"events": Events(horizon=70)}, "72 tokens behind its prompt, and 78 are needed"),
        ({"events": Events(omega=4, horizon=16)}, "omega 8 there, 4 now"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny, looked, changes, match):
    with pytest.raises(ValueError, match=match):
        look(tiny, looked[0], **changes)


def test_events_and_texts_are_needed(tiny, tmp_path):
    with pytest.raises(ValueError, match="omega must be at least 1"):
        Events(omega=0)
    with pytest.raises(ValueError, match="no texts"):
        diagnose(tiny("llama"), TOKENIZER, [], out=tmp_path, **SMALL)


def test_the_command_writes_rows_and_the_page(tmp_path):
    from folders import save_tiny

    folder = save_tiny(tmp_path / "model")
    lines = [{"text": "".join(chr(97 + (i * j) % 26) for i in range(200))} for j in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["diagnose", "--model", folder, "--data", str(tmp_path / "texts.jsonl"), "-n", "1", "-p", "tova"]
    options = ["-b", "32", "--length", "60", "--tokens", "48", "--least-tokens", "48", "--horizon", "16", "--json"]
    done = CliRunner().invoke(app, [*arguments, *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["policy"] for row in rows} == {"full", "oracle", "oracle of windows", "tova"}
    assert (tmp_path / "out" / "diagnose.html").stat().st_size > 10_000
