"""Recording goes on after a kill, is shared among processes, and refuses before it writes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import save_tiny
from letters import letter_tokenizer
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.corpus import Reading
from kvkeep.policies.kvp import GLANCE, glimpses_of
from kvkeep.trace import Trace, Traces, read_index, trace_bytes, trace_path
from kvkeep.tracing import Share, Tracing

TESTS = Path(__file__).parent
TENSORS = ("token_ids", "future_ids", "keys", "values", "importance_max", "importance_mean", "importance_square")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Prompts of about a hundred letters."""
    file = tmp_path_factory.mktemp("data") / "asked.jsonl"
    records = [{"prompt": f"What has {number} legs, and why? " * 3, "answer": "A table."} for number in range(40)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture
def tracing(tiny, data) -> Callable[..., Tracing]:
    def make(out: Path, *, prompts: int = 6, futures: str = "data", model: str = "llama", **options: Any) -> Tracing:
        reading = Reading(
            tokenizer=letter_tokenizer(), num_tokens=300, num_prompts=prompts, futures=futures, future_tokens=5
        )
        sources = options.pop("data", [data])
        return Tracing(tiny(model), model_name="tiny", data=sources, out=out, reading=reading, **options)

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model with its tokenizer, as a transformers folder."""
    return save_tiny(tmp_path_factory.mktemp("model"))


def run(*arguments: object) -> Any:
    """`kvkeep trace` with short prompts."""
    return CliRunner().invoke(app, ["trace", *map(str, arguments), "--length", "300", "--future-tokens", "5"])


def same(first: Trace, second: Trace) -> bool:
    names = (first.key, first.source, first.split) == (second.key, second.source, second.split)
    return names and all(torch.equal(getattr(first, name), getattr(second, name)) for name in TENSORS)


def test_every_prompt_becomes_a_trace_and_the_index_says_what_they_share(tracing, tmp_path, tiny):
    started = tracing(tmp_path, policies=["keydiff"], made_by={"commit": "abc"})
    steps: list[tuple] = []
    assert started.run(lambda *step: steps.append(step)) == 6
    assert [done for done, _, _ in steps] == list(range(7)) and {total for _, total, _ in steps} == {6}
    traces = Traces(tmp_path)
    assert [trace.key for trace in traces] == [item.key for item in started.items]
    assert all(
        set(trace.worths) == {*glimpses_of(GLANCE).values(), "keydiff"} and trace.future_lengths == [5]
        for trace in traces
    )
    index = traces.index
    assert (index.model, index.layers, index.heads, index.group) == ("tiny", [0, 1, 2], [0, 1], 2)
    assert index.dtype == "float32" and index.made_by == {"commit": "abc"}
    assert index.settings["policies"] == [*glimpses_of(GLANCE).values(), "keydiff"]
    traces.refuse_other_model(tiny("llama").config)


@pytest.mark.parametrize(
    "options", [{}, {"policies": ["tova", "h2o"]}, {"layers": [1], "heads": [0], "futures": "3"}, {"delay": 9}]
)
def test_the_estimate_is_the_size_of_what_is_written(tracing, tmp_path, options):
    started = tracing(tmp_path, **options)
    needed = started.bytes(started.items)
    started.run()
    files = [trace_path(tmp_path, item.key) for item in started.items]
    tensors = sum(
        tensor.nbytes
        for trace in Traces(tmp_path)
        for tensor in (*(getattr(trace, name) for name in (*TENSORS, "later")), *trace.worths.values())
        if tensor is not None
    )
    written = sum(file.stat().st_size for file in files)
    # tensors to the byte; the header is smaller than what is set aside for it
    more = {
        "policies": len({*glimpses_of(GLANCE).values(), *options.get("policies", [])}),
        "later": 2 if "delay" in options else 0,
    }
    header = trace_bytes(0, layers=0, heads=0, head_size=0, futures=0, longest=0, **more)
    assert needed - tensors == header * len(files)
    assert tensors < written <= needed < written + 1500 * len(files)


def test_what_is_recorded_is_not_recorded_again(tracing, tmp_path):
    tracing(tmp_path, prompts=3).run()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("prompts/*")}
    more = tracing(tmp_path, prompts=5)
    assert len(more.left) == 2 and more.run() == 2
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert len(Traces(tmp_path)) == 5
    # fewer prompts later take none away
    assert tracing(tmp_path, prompts=2).run() == 0 and len(Traces(tmp_path)) == 5


def test_a_broken_file_is_recorded_anew(tracing, tmp_path):
    tracing(tmp_path, prompts=2).run()
    key = Traces(tmp_path)[0].key
    broken, kept = trace_path(tmp_path, key), tmp_path / "kept"
    shutil.copytree(tmp_path / "prompts", kept / "prompts")
    shutil.copy(tmp_path / "index.json", kept)
    broken.write_bytes(broken.read_bytes()[:-10])
    again = tracing(tmp_path, prompts=2)
    assert [item.key for item in again.left] == [key] and again.run() == 1
    assert all(map(same, Traces(tmp_path), Traces(kept)))


def test_several_sources_are_mixed_and_a_prompt_in_two_of_them_is_one(tracing, tmp_path, data):
    other = Path(data).with_name("more.jsonl")
    shutil.copy(data, other)
    mixed = tracing(tmp_path, prompts=4, data=[data, str(other), f"chat:{data}", data])
    assert [item.source for item in mixed.items] == [
        kind for kind in ("prompts/asked", "prompts/more", "chat/asked") for _ in range(4)
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
from kvkeep import load, saving
from kvkeep.corpus import Reading
from kvkeep.tracing import Tracing

replaced = 0
replace = os.replace

def die(*names):
    global replaced
    replaced += 1
    # the index, two prompts, and half of a third
    if replaced == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)

saving.os.replace = die
model, tokenizer = load(sys.argv[1])
reading = Reading(tokenizer=tokenizer, num_tokens=300, num_prompts=6, future_tokens=5)
Tracing(model, model_name="tiny", data=[sys.argv[2]], out=Path(sys.argv[3]), reading=reading).run()
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def test_a_killed_recording_goes_on_and_loses_repeats_and_leaves_nothing(tmp_path, data, folder):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    done = subprocess.run([sys.executable, "-c", KILLED, folder, data, str(killed)], cwd=TESTS, env=environment())
    assert done.returncode == -signal.SIGKILL
    assert len(list(killed.glob("prompts/*.safetensors"))) == 2 and len(list(killed.glob("prompts/.*.tmp"))) == 1
    with pytest.raises(FileNotFoundError, match="2 of 6 prompts are recorded; run the same kvkeep trace again"):
        Traces(killed)
    for out in (killed, whole):
        told = run("-m", folder, "--data", data, "--prompts", 6, "--out", out, "--json")
        assert json.loads(told.stdout)["recorded_now"] == (4 if out == killed else 6)
    assert all(map(same, Traces(killed), Traces(whole)))
    assert sorted(file.name for file in killed.glob("prompts/.*")) == []


def test_processes_share_the_prompts_out_of_the_whole_list(tracing, tmp_path):
    shares = [tracing(tmp_path, prompts=5, share=Share(rank=rank, size=2)) for rank in range(2)]
    # one after the other: what the first has recorded must not move the second's share
    assert [started.run() for started in shares] == [3, 2]
    assert len(Traces(tmp_path)) == 5


def test_torchrun_shares_the_prompts_between_two_processes(tmp_path, data, folder):
    out = tmp_path / "traces"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "-m", "kvkeep", "trace"]
    arguments = ["--model", folder, "--data", data, "--prompts", "5", "--length", "300", "--future-tokens", "5"]
    done = subprocess.run(
        [sys.executable, *launcher, *arguments, "--out", str(out), "--json"],
        cwd=TESTS,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    told = json.loads(line)
    # the other process may have been faster, so that fewer were left to look at
    assert (told["prompts"], told["recorded_now"]) == (5, 3) and 3 <= told["left"] <= 5
    assert len(Traces(out)) == 5


def test_shares_come_from_the_environment():
    assert Share.of_environment({}) == Share(rank=0, size=1)
    assert Share.of_environment({"RANK": "3", "WORLD_SIZE": "8"}) == Share(rank=3, size=8)


def test_a_folder_of_another_model_or_other_settings_is_refused_and_stays_as_it_was(tracing, tmp_path):
    tracing(tmp_path, prompts=1).run()
    before = (tmp_path / "index.json").read_bytes()
    with pytest.raises(ValueError, match="was made with a model whose type is llama; this model's is qwen3"):
        tracing(tmp_path, model="qwen3")
    with pytest.raises(ValueError, match=r"other settings \(futures 'data' there, '2' now; temperature 0.0 there, 1.0"):
        tracing(tmp_path, futures="2")
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\] there, \[0\] now"):
        tracing(tmp_path, layers=[0])
    assert (tmp_path / "index.json").read_bytes() == before


def test_other_weights_of_the_same_shape_are_refused(tracing, tmp_path, tiny, monkeypatch):
    tracing(tmp_path, prompts=1).run()
    monkeypatch.setattr("kvkeep.tracing.weights_digest", lambda *_: "other")
    with pytest.raises(ValueError, match=r"weights '.*' there, 'other' now"):
        tracing(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tracing, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="taken, which is a file"):
        tracing(tmp_path / "taken")


def test_a_disk_without_room_is_refused_before_anything_is_written(tracing, tmp_path, monkeypatch):
    started = tracing(tmp_path / "deep" / "traces")
    usage = shutil.disk_usage(tmp_path)._replace(free=started.bytes(started.items) - 1)
    monkeypatch.setattr("kvkeep.tracing.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"the traces take 0.00 GB and .* has 0.00 GB left"):
        started.run()
    assert not (tmp_path / "deep").exists()


def test_attention_that_is_no_number_is_refused_and_what_came_before_stays(tracing, tmp_path, monkeypatch):
    started = tracing(tmp_path, prompts=3)
    record, calls = started.recorder.record, []

    def overflow(item):
        calls.append(item)
        trace = record(item)
        if len(calls) == 2:
            trace.importance_mean[0, 1, 0, 3] = torch.nan
        return trace

    monkeypatch.setattr(started.recorder, "record", overflow)
    with pytest.raises(ValueError, match=rf"prompt {started.items[1].key} gives attention .* recorded layer 1"):
        started.run()
    assert [trace.key for trace in Traces(tmp_path, partial=True)] == [started.items[0].key]


# the command


def test_the_command_says_how_much_it_will_write_and_writes_it(folder, data, tmp_path):
    arguments = ["-m", folder, "--data", data, "-n", 3, "--layers", "0-1", "--heads", 1, "-p", "tova", "-o", tmp_path]
    told = run(*arguments, "--estimate")
    assert told.exit_code == 0, told.output
    assert "3 prompts take 0.000 GB; 0.000 GB to write" in told.stderr and not any(tmp_path.iterdir())
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("recorded 3 prompts in ")
    index = read_index(tmp_path)
    assert (index.layers, index.heads, index.made_by["model"]) == ([0, 1], [1], folder)
    assert "3 of them recorded already" in run(*arguments, "-n", 4, "--estimate").stderr


def test_the_command_counts_in_json_what_was_passed_over(folder, tmp_path):
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * 30 * number, "answer": "y"}) + "\n" for number in range(30)))
    done = run("-m", folder, "--data", file, "--estimate", "--json")
    told = json.loads(done.stdout)
    assert told["prompts"] > 3 and told["too_long"] > 5 and told["bytes"] == told["bytes_left"] > 1000
    assert "were too long" in run("-m", folder, "--data", file, "--estimate").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0-"], "--layers takes numbers and ranges such as 0-9,29, got 0-"),
        (["--layers", "7"], "the model has no layer 7 to record"),
        (["--policy", "oracle"], "'oracle' knows or samples a future"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--futures", "all"], "futures are data, greedy or how many to sample, got 'all'"),
    ],
)
def test_a_refusal_is_one_line(folder, data, tmp_path, arguments, message):
    given = [] if "--data" in arguments else ["--data", data]
    done = run("-m", folder, "-o", tmp_path, *given, *arguments)
    assert done.exit_code == 2
    [line] = done.stderr.strip().splitlines()
    assert message in line
