"""Traces on disk: what was written comes back, and what is missing, broken or foreign is refused by name.

F futures, L layers, H KV heads, n prompt tokens, D head size.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvkeep.fingerprint import fingerprint
from kvkeep.trace import (
    FORMAT,
    Trace,
    TraceIndex,
    Traces,
    add_prompts,
    read_index,
    trace_path,
    write_index,
    write_trace,
)

L, H, D = 3, 2, 4


def example(key: str, *, n: int = 9, source: str = "chat", split: str = "train") -> Trace:
    """A trace of random numbers, with futures of three tokens and of one."""
    generator = torch.Generator().manual_seed(n)
    draw = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    return Trace(
        key=key,
        source=source,
        split=split,
        token_ids=torch.arange(n, dtype=torch.int32),
        future_ids=torch.tensor([[5, 6, 7], [8, -1, -1]], dtype=torch.int32),
        keys=draw(L, H, n, D).bfloat16(),
        values=draw(L, H, n, D).bfloat16(),
        importance_max=draw(2, L, H, n),
        importance_mean=draw(2, L, H, n),
        worths={"tova": draw(L, H, n)},
        later=draw(L, H, 2, n) if key == "b" else None,
        importance_square=draw(2, L, H, n) if key == "b" else None,
    )


INDEX = TraceIndex(fingerprint={"type": "tiny"}, model="tiny", layers=[0, 1, 2], heads=[0, 1], group=2, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    traces = [
        example("a", n=9, source="niah_single_1/inside"),
        example("b", n=12, source="niah_multikey_1/after", split="test"),
        example("c", n=5),
    ]
    for trace in traces:
        write_trace(tmp_path, trace)
    write_index(tmp_path, add_prompts(INDEX, "abc"))
    return tmp_path


def test_traces_come_back_as_they_were_written(folder):
    read = Traces(folder)
    assert [trace.key for trace in read] == ["a", "b", "c"] and len(read) == 3
    written, found = example("b", n=12, source="niah_multikey_1/after", split="test"), read[1]
    for name in ("token_ids", "future_ids", "keys", "values", "importance_max", "importance_mean"):
        assert torch.equal(getattr(found, name), getattr(written, name)), name
    assert torch.equal(found.worths["tova"], written.worths["tova"])
    assert torch.equal(found.later, written.later) and read[0].later is None
    assert torch.equal(found.importance_square, written.importance_square) and read[0].importance_square is None
    assert (found.source, found.split, found.num_tokens) == ("niah_multikey_1/after", "test", 12)
    assert found.future_lengths == [3, 1]
    assert read.fingerprint == {"type": "tiny"}


def test_reading_maps_the_file_and_copies_nothing(folder):
    trace = Traces(folder)[0]
    path = trace_path(folder, "a")
    assert str(path) in Path("/proc/self/maps").read_text()
    # a view into the whole file
    assert trace.keys.untyped_storage().nbytes() >= path.stat().st_size - 4096


def test_several_futures_are_joined_by_mean_or_maximum(folder):
    trace = Traces(folder)[0]
    first, second = trace.importance_mean
    assert torch.equal(trace.importance("mean"), (first + second) / 2)
    assert torch.equal(trace.importance("mean", "max"), torch.maximum(first, second))
    assert torch.equal(trace.importance(), trace.importance_max.mean(0))
    with pytest.raises(ValueError, match="group is max, mean, square and futures max or mean; got 'sum' and 'mean'"):
        trace.importance("sum")


def test_squares_are_another_importance_and_older_traces_have_none(folder):
    old, new = Traces(folder)[0], Traces(folder)[1]
    assert torch.equal(new.importance("square", "max"), new.importance_square.amax(0))
    with pytest.raises(ValueError, match="trace a has no squares, being older; record it again"):
        old.importance("square")


def test_splits_and_sources_are_chosen_and_a_choice_of_nothing_says_what_there_is(folder):
    assert [trace.key for trace in Traces(folder, split="train")] == ["a", "c"]
    assert [trace.key for trace in Traces(folder, source="niah")] == ["a", "b"]
    assert [trace.key for trace in Traces(folder, source=("chat", "niah_single"))] == ["a", "c"]
    with pytest.raises(ValueError, match=r"split test, source chat; there are: chat \(train\), niah_multikey"):
        Traces(folder, split="test", source="chat")


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="make some with kvkeep trace"):
        Traces(tmp_path)
    with pytest.raises(FileNotFoundError, match="no traces in"):
        Traces(tmp_path / "nowhere")
    write_index(tmp_path, INDEX)
    with pytest.raises(ValueError, match="none yet"):
        Traces(tmp_path)


def test_a_missing_file_is_named_unless_a_part_will_do(folder):
    trace_path(folder, "b").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors is missing: 2 of 3 prompts are recorded"):
        Traces(folder)
    assert [trace.key for trace in Traces(folder, partial=True)] == ["a", "c"]


def test_a_file_that_goes_missing_later_is_named(folder):
    traces = Traces(folder)
    trace_path(folder, "c").unlink()
    with pytest.raises(FileNotFoundError, match=r"c\.safetensors is missing"):
        traces[2]


@pytest.mark.parametrize("cut", [1, 400, -1])
def test_a_truncated_file_is_named(folder, cut):
    path = trace_path(folder, "b")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"b\.safetensors is truncated"):
        Traces(folder)


def test_another_safetensors_file_is_no_trace(folder):
    from kvkeep import saving

    saving.write(trace_path(folder, "b"), "cache", 1, {}, {"keys": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"b\.safetensors is no trace, but cache"):
        Traces(folder)


def test_a_newer_format_is_refused(folder, monkeypatch):
    monkeypatch.setattr("kvkeep.trace.FORMAT", FORMAT + 1)
    write_trace(folder, example("b"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"b\.safetensors has format version 2 .* upgrade kvkeep"):
        Traces(folder)
    index = folder / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": FORMAT + 1}))
    with pytest.raises(ValueError, match=r"index\.json has format version 2"):
        Traces(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": "1"}'])
def test_an_index_that_cannot_be_read_is_named(folder, text):
    (folder / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is no index of traces"):
        Traces(folder)


def test_traces_of_another_model_are_refused_with_both_sides(folder, tiny):
    config = tiny("llama").config
    write_index(folder, replace(add_prompts(INDEX, "abc"), fingerprint=fingerprint(config)))
    Traces(folder).refuse_other_model(config)
    with pytest.raises(ValueError, match="was made with a model whose type is llama; this model's is qwen3"):
        Traces(folder).refuse_other_model(tiny("qwen3").config)


def test_adding_prompts_keeps_those_that_are_there(folder):
    write_index(folder, add_prompts(read_index(folder), ["c", "d"]))
    assert read_index(folder).prompts == ["a", "b", "c", "d"]
