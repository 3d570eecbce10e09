"""Replay over traces keeps what a cache keeps, and counts by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep import KVCache
from kvkeep.cli import app
from kvkeep.evaluate.replay import Replay, answerable
from kvkeep.evaluate.rows import Row, bootstrap, read_rows
from kvkeep.fingerprint import fingerprint
from kvkeep.policies.kvp import GLANCE, glimpses_of
from kvkeep.recorder import Branch, Item, Recorder
from kvkeep.trace import Trace, TraceIndex, Traces, add_prompts, write_index, write_trace

L, H, D = 2, 2, 4
INDEX = TraceIndex(
    fingerprint={"type": "tiny", "number of layers": 5, "number of KV heads": 2},
    model="tiny",
    layers=[1, 4],
    heads=[0, 1],
    group=2,
    dtype="float32",
)


def made(key: str, importance: torch.Tensor, *, source: str = "chat", worths: dict | None = None) -> Trace:
    """A trace with this importance `[L, H, n]`, by largest and mean head alike."""
    n = importance.shape[-1]
    drawn = torch.randn(2, L, H, n, D, generator=torch.Generator().manual_seed(n)).bfloat16()
    return Trace(
        key=key,
        source=source,
        split="test",
        token_ids=torch.arange(n, dtype=torch.int32),
        future_ids=torch.tensor([[1]], dtype=torch.int32),
        keys=drawn[0],
        values=drawn[1],
        importance_max=importance[None],
        importance_mean=importance[None].clone(),
        worths=worths or {},
    )


def saved(folder: Path, *traces: Trace, index: TraceIndex = INDEX) -> Traces:
    for trace in traces:
        write_trace(folder, trace)
    write_index(folder, add_prompts(index, [trace.key for trace in traces]))
    return Traces(folder)


def uniform(n: int) -> torch.Tensor:
    return torch.ones(L, H, n)


def test_of_uniform_importance_every_policy_keeps_its_share_of_the_tokens(tmp_path):
    traces = saved(tmp_path, made("a", uniform(80)))
    rows = Replay(policies=["random", "keydiff", "oracle"], budgets=[20, 40, "75%"]).run(traces)
    assert {(row.policy, row.budget): row.value for row in rows} == {
        (policy, budget): pytest.approx(share)
        for policy in ("random", "keydiff", "oracle")
        for budget, share in (("20", 0.25), ("40", 0.5), ("75%", 0.75))
    }
    assert [row.kept for row in rows[:3]] == [20, 40, 60]


def test_kept_importance_by_hand(tmp_path):
    # three sinks and two recent tokens stay; of the others each head keeps one more by what was recorded
    importance = torch.zeros(L, H, 10)
    importance[..., 0], importance[..., 5], importance[..., 7] = 4, 3, 1
    worth = torch.zeros(L, H, 10)
    worth[0, :, 5], worth[1, :, 7] = 1, 1
    traces = saved(tmp_path, made("a", importance, worths={"mine": worth}))
    [row] = Replay(policies=["tova"], budgets=[6], sinks=3, recent=2).run(
        saved(tmp_path, made("a", importance, worths={"tova": worth}))
    )
    assert row.value == pytest.approx((7 / 8 + 5 / 8) / 2)
    assert row.extra["heads"] == {"1": [pytest.approx(7 / 8)] * 2, "4": [pytest.approx(5 / 8)] * 2}
    [best] = Replay(policies=["oracle"], budgets=[7], sinks=3, recent=2).run(traces)
    assert best.value == 1


def test_a_row_is_the_mean_over_prompts_with_a_bootstrap_over_them(tmp_path):
    shares = [0.4, 0.5, 0.8]
    traces = saved(tmp_path, *(made(str(number), uniform(round(20 / share))) for number, share in enumerate(shares)))
    [row] = Replay(policies=["random"], budgets=[20]).run(traces, stamp={"commit": "abc"})
    assert row.value == pytest.approx(sum(shares) / 3) and row.n == 3 and row.interval == "bootstrap"
    assert (row.low, row.high) == pytest.approx(bootstrap(shares)[:2])
    assert (row.metric, row.model, row.split, row.task, row.commit) == ("kept_future", "tiny", "test", "all", "abc")
    assert row.length == round((50 + 40 + 25) / 3) and row.kept == 20


def test_rows_of_each_source_follow_when_asked_for(tmp_path):
    traces = saved(tmp_path, made("a", uniform(40)), made("b", uniform(80), source="text"))
    replayed = Replay(policies=["random"], budgets=[20])
    assert {row.task: row.value for row in replayed.run(traces, by_source=True)} == {
        "all": pytest.approx(0.375),
        "chat": pytest.approx(0.5),
        "text": pytest.approx(0.25),
    }
    assert [row.task for row in replayed.run(traces)] == ["all"]


def test_group_and_futures_choose_the_importance(tmp_path):
    trace = made("a", uniform(40))
    two = torch.stack([trace.importance_max[0], 3 * trace.importance_max[0]])
    two[1, ..., 30:] = 0
    chosen = replace(
        trace, future_ids=trace.future_ids.expand(2, 1).contiguous(), importance_max=two, importance_mean=two.clone()
    )
    traces = saved(tmp_path, chosen)
    values = {
        futures: Replay(policies=["streaming"], budgets=[24], futures=futures).run(traces)[0].value
        for futures in ("mean", "max")
    }
    # four sinks, and the last twenty of which half are in the second future
    assert values == {"mean": pytest.approx((14 * 4 + 10) / (30 * 4 + 10)), "max": pytest.approx((14 * 3 + 10) / 100)}
    with pytest.raises(ValueError, match="max or mean"):
        Replay(policies=["streaming"], budgets=[24], group="sum").run(traces)


@pytest.fixture(scope="module")
def real(embedded, tmp_path_factory) -> Traces:
    """Two prompts on the embedded model, with what policies that read queries said."""
    ids = embedded.tokenizer(
        f"{'A mill stands by the river, and its wheel turns. ' * 12}", return_tensors="pt"
    ).input_ids
    recorder = Recorder(embedded.model, policies=[*glimpses_of(GLANCE).values(), "snapkv", "pyramidkv"])
    items = [
        Item(source="text", split="test", name=str(n), token_ids=ids[:, :n], branches=[Branch(ids[:, :7])])
        for n in (100, 120)
    ]
    index = TraceIndex(
        fingerprint=fingerprint(embedded.model.config),
        model="smollm2",
        layers=recorder.layers,
        heads=recorder.heads,
        group=recorder.group,
        dtype="bfloat16",
    )
    return saved(tmp_path_factory.mktemp("real"), *map(recorder.record, items), index=index)


@pytest.mark.parametrize("name", ["random", "keydiff", "lagkv", "kvp", "kvpop", "kvpop_mlp", "tova", "pyramidkv"])
def test_a_replay_keeps_what_a_cache_keeps(real, embedded, name):
    [row] = Replay(policies=[name], budgets=[40]).run(real)
    shares = []
    for trace in real:
        cache = KVCache(embedded.model, policy=name, budget=40)
        kvkeep.prefill(embedded.model, trace.token_ids[None].long(), cache)
        importance = trace.importance()
        for layer, one in zip(cache.managed, importance, strict=True):
            held = layer.slots.positions[0].long()
            shares.append((one.gather(1, held.clamp(min=0)) * (held >= 0)).sum(1) / one.sum(1))
    # a token whose worths all but tie may go either way
    assert row.value == pytest.approx(torch.stack(shares).mean().item(), abs=1e-3)


def test_nothing_that_keeps_as_many_tokens_keeps_more_than_the_exact_future(real):
    # a pyramid keeps more in some layers
    names = [name for name in answerable(real) if name != "pyramidkv"]
    rows = Replay(policies=names, budgets=[30, 60]).run(real)
    best = {row.budget: row.value for row in rows if row.policy == "oracle"}
    assert len(rows) == 2 * len(names) and all(row.value <= best[row.budget] for row in rows)
    assert Replay(policies=["random"], budgets=["full"]).run(real)[0].value == pytest.approx(1)


def test_recall_is_the_share_of_the_teachers_tokens_that_are_kept(tmp_path):
    n = 40
    trace = made("a", uniform(n))
    L, H = trace.keys.shape[:2]
    # the teacher wants the even tokens, the policy keeps the last ones: 12 of the 26 between 4 sinks and 10 recent
    later = (torch.arange(n) % 2 == 0).float().expand(L, H, 2, n) / 10 + torch.arange(n) / 1e4
    traces = saved(tmp_path, replace(trace, later=later), index=replace(INDEX, prompts=[], settings={"delay": 10}))
    streaming, oracle = Replay(policies=["streaming", "oracle"], budgets=[26], recent=10, metric="teacher_recall").run(
        traces
    )
    assert (streaming.metric, streaming.kept, oracle.value) == ("teacher_recall", 26, 1)
    # it keeps 18 to 29, six of them even; the teacher keeps the even ones from 6 to 28
    assert streaming.value == pytest.approx(6 / 12)
    options = ["-p", "streaming", "-b", "26", "--recent", "10", "--metric", "teacher_recall", "--json"]
    told = CliRunner().invoke(app, ["replay", str(tmp_path), *options])
    assert json.loads(told.stdout.splitlines()[0])["metric"] == "teacher_recall", told.output
    with pytest.raises(ValueError, match="with a delay of 10 and recent is 16"):
        Replay(policies=["streaming"], budgets=[26], metric="teacher_recall").run(traces)
    with pytest.raises(ValueError, match="kept_future or teacher_recall"):
        Replay(policies=["streaming"], metric="recall")


def test_what_traces_can_answer_for_is_known(real):
    names = answerable(real)
    assert {"random", "streaming", "kvp", "tova", "snapkv", "pyramidkv", "oracle"} <= set(names)
    assert "h2o" not in names and "expected_attention" not in names


def test_policies_that_traces_cannot_answer_for_are_refused(tmp_path, real, embedded):
    traces = saved(tmp_path, made("a", uniform(40)))
    with pytest.raises(
        ValueError, match=r"'h2o' reads queries, .* \(there is nothing\); record it: kvkeep trace --policy"
    ):
        Replay(policies=["h2o"]).run(traces)
    recorded = ", ".join([*glimpses_of(GLANCE).values(), "snapkv", "pyramidkv"])
    with pytest.raises(
        ValueError, match=rf"there is {re.escape(recorded)}|there is pyramidkv, snapkv, snapkv\(kernel=1\), tova"
    ):
        Replay(policies=["h2o"]).run(real)
    with pytest.raises(ValueError, match="'kvp' reads queries"):
        Replay(policies=["kvp"]).run(traces)
    read = {name: traces[0].importance().clone() for name in glimpses_of(GLANCE).values()}
    other = saved(tmp_path / "other", made("a", uniform(40), worths=read))
    with pytest.raises(ValueError, match="was made with a model whose"):
        Replay(policies=["kvp"]).run(other)
    part = {name: getattr(real[0], name)[:, [1]] for name in ("keys", "values")}
    part |= {
        name: getattr(real[0], name)[:, :, [1]] for name in ("importance_max", "importance_mean", "importance_square")
    }
    one_head = replace(real[0], **part, worths={name: worth[:, [1]] for name, worth in real[0].worths.items()})
    index = replace(real.index, heads=[1], prompts=[])
    with pytest.raises(ValueError, match=r"'kvp' was made for all KV heads, and .* holds heads \[1\] alone"):
        Replay(policies=["kvp"]).run(saved(tmp_path / "part", one_head, index=index))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": ["tovva"]}, "unknown policy 'tovva'"),
        ({"policies": []}, "at least one policy"),
        ({"budgets": []}, "one budget"),
        ({"budgets": [19]}, "the smallest possible is 20"),
        ({"budgets": ["1MiB"]}, "'1MiB' is in bytes"),
    ],
)
def test_a_replay_of_nothing_is_refused(tmp_path, settings, message):
    traces = saved(tmp_path, made("a", uniform(40)))
    with pytest.raises(ValueError, match=message):
        Replay(**{"policies": ["random"], **settings}).run(traces)


def test_the_command_prints_and_writes_rows(tmp_path):
    saved(tmp_path, made("a", uniform(40)), made("b", uniform(80), source="text"))
    file = tmp_path / "out" / "rows.jsonl"
    arguments = ["replay", str(tmp_path), "--policy", "random,oracle", "--budget", "20", "--out", str(file)]
    done = CliRunner().invoke(app, [*arguments, "--by-source", "--json"])
    assert done.exit_code == 0, done.output
    rows = [Row.from_dict(json.loads(line)) for line in done.stdout.splitlines()]
    assert rows == read_rows(file) and len(rows) == 6 and rows[0].commit
    table = CliRunner().invoke(app, ["replay", str(tmp_path), "--sources", "text"]).stdout
    # the second prompt alone
    assert "kept_future" in table and "0.800" in table and "oracle" in table


def test_a_recorded_policy_is_found_however_it_is_spelled(tmp_path):
    worth = torch.arange(40.0).expand(L, H, 40).contiguous()
    importance = torch.zeros(L, H, 40)
    importance[..., 20:] = 1
    traces = saved(tmp_path, made("a", importance, worths={"snapkv(window=16, kernel=3)": worth}))
    rows = Replay(policies=["snapkv(kernel=3,window=16)", "snapkv(window=16,kernel=3)"], budgets=[20]).run(traces)
    assert [(row.policy, row.value) for row in rows] == [("snapkv(window=16, kernel=3)", pytest.approx(16 / 20))]
