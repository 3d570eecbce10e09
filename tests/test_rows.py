"""Rows, intervals and the log of samples: what they say is right, and what is saved survives."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.evaluate import rows as rows_module
from kvkeep.evaluate.rows import (
    VERSION,
    Row,
    SampleLog,
    bootstrap,
    bootstrap_ratio,
    interval,
    manifest,
    read_rows,
    read_samples,
    summarise,
    wilson,
    write_rows,
)


def sample(key: str, score: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"key": key, "score": score, "policy": "full", "budget": "full", **more}


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


# the row


@given(
    value=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(),
    kept=st.none() | st.floats(0, 1e9),
    extra=st.dictionaries(st.text(), st.integers() | st.text()),
)
def test_a_row_comes_back_from_its_line_as_it_was(value: float, text: str, kept: float, extra: Any) -> None:
    row = Row(value=value, low=value, high=value, interval="bootstrap", n=3, task=text, kept=kept, extra=extra)
    line = row.to_json()
    assert "\n" not in line
    assert Row.from_dict(json.loads(line)) == row


def test_a_row_of_an_older_format_loads_with_defaults() -> None:
    assert Row.from_dict({"metric": "accuracy", "value": 1, "version": 0}) == Row(value=1.0)
    assert Row.from_dict({"metric": "accuracy", "value": 1}).version == VERSION


def test_a_row_of_a_newer_format_is_refused_with_both_versions() -> None:
    with pytest.raises(ValueError, match=rf"version {VERSION + 1}.*up to {VERSION}.*upgrade"):
        Row.from_dict({"metric": "accuracy", "value": 1, "version": VERSION + 1, "unheard": 1})


def test_a_row_with_a_field_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unheard"):
        Row.from_dict({"metric": "accuracy", "value": 1, "version": VERSION, "unheard": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", True])
def test_a_value_that_is_no_finite_number_is_no_row(value: Any) -> None:
    with pytest.raises(ValueError, match="value"):
        Row.from_dict({"metric": "accuracy", "value": value})


@pytest.mark.parametrize("wrong", [{"task": 1}, {"n": "3"}, {"extra": []}, {"length": 1.5}, {"kept": "1"}])
def test_a_field_of_the_wrong_kind_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        Row.from_dict({"metric": "accuracy", "value": 1, **wrong})


@pytest.mark.parametrize(
    "bounds",
    [
        {"low": 0.1, "interval": "wilson"},
        {"low": 0.1, "high": 0.2},
        {"interval": "wilson"},
        {"low": 0.3, "high": 0.2, "interval": "wilson"},
        {"low": 0.1, "high": 0.2, "interval": "guess"},
    ],
)
def test_an_interval_is_whole_ordered_and_has_a_known_method(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"interval|low"):
        Row(**bounds)


# intervals


@given(n=st.integers(1, 5000), data=st.data())
def test_wilson_bounds_solve_the_score_equation(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    z = NormalDist().inv_cdf(0.975)
    low, high, _ = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    for bound in (low, high):
        # where the observed share lies exactly z standard errors away, the error taken at the bound itself
        distance = (successes / n - bound) ** 2
        assert distance == pytest.approx(z * z * bound * (1 - bound) / n, abs=1e-12)


@given(n=st.integers(1, 500), data=st.data())
def test_wilson_treats_failures_as_it_treats_successes(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high, _ = wilson(successes, n)
    assert wilson(n - successes, n)[:2] == pytest.approx((1 - high, 1 - low))


def test_wilson_refuses_impossible_counts() -> None:
    for successes, n in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="successes"):
            wilson(successes, n)


def test_bootstrap_agrees_with_the_normal_interval_on_many_values() -> None:
    values = np.random.default_rng(1).uniform(size=2000).tolist()
    half = 1.96 * stdev(values) / math.sqrt(len(values))
    low, high, _ = bootstrap(values)
    assert (low, high) == pytest.approx((fmean(values) - half, fmean(values) + half), abs=half / 10)


def test_a_ratio_of_sums_is_drawn_in_pairs() -> None:
    same = bootstrap_ratio([1, 0, 1, 1], [1, 0, 1, 1])
    assert (same.low, same.high) == (1, 1)
    half = bootstrap_ratio([1, 0] * 50, [1, 1] * 50)
    assert half.low == pytest.approx(0.4, abs=0.03) and half.high == pytest.approx(0.6, abs=0.03)
    found = bootstrap_ratio([0.5, 0.25, 1.0, 0.0], [2, 1, 1, 0])
    assert 0.25 <= found.low <= 1.75 / 4 <= found.high <= 1
    assert bootstrap_ratio([1, 2, 3], [2, 2, 2])[:2] == pytest.approx(bootstrap([0.5, 1, 1.5])[:2])
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_ratio([1, 0], [0, 0])


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        low, high, _ = bootstrap(generator.uniform(size=40).tolist(), resamples=400)
        hits += low <= 0.5 <= high
    assert 0.90 <= hits / 300 <= 0.98


def test_bootstrap_repeats_itself_and_follows_its_seed() -> None:
    values = np.random.default_rng(4).uniform(size=50).tolist()
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values, seed=1) != bootstrap(values, seed=2)


def test_bootstrap_does_not_depend_on_how_its_draws_are_cut_into_blocks() -> None:
    values = np.random.default_rng(3).uniform(size=1500).tolist()
    draws = np.random.default_rng(0).integers(1500, size=(2000, 1500))
    expected = np.quantile(np.asarray(values)[draws].mean(1), (0.025, 0.975))
    assert bootstrap(values)[:2] == pytest.approx(tuple(expected), abs=1e-12)


@pytest.mark.parametrize("values", [[], [0.5, math.nan]])
def test_bootstrap_refuses_what_has_no_mean(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite value"):
        bootstrap(values)


def test_the_interval_follows_the_kind_of_scores() -> None:
    assert interval([0, 1, 1.0]) == wilson(2, 3)
    assert interval([0.5, 1, 0.25]) == bootstrap([0.5, 1, 0.25])
    assert interval([0.5]) is None


# files of rows


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    written = [Row(value=index / 3, task="\u2028 ünïcode \ud800") for index in range(3)]
    write_rows(tmp_path / "new" / "rows.jsonl", written)
    assert read_rows(tmp_path / "new" / "rows.jsonl") == written


def test_a_failed_write_leaves_the_old_rows_and_no_litter(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Row(value=1)])

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_rows(path, [Row(value=2)])
    assert read_rows(path) == [Row(value=1)]
    assert list(tmp_path.iterdir()) == [path]


def test_who_reads_while_rows_are_replaced_still_reads_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Row(value=1)])
    with path.open() as reader:
        write_rows(path, [Row(value=2)])
        assert reader.read() == Row(value=1).to_json() + "\n"
    assert read_rows(path) == [Row(value=2)]


def test_a_cut_last_row_is_left_out_with_one_warning_and_the_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Row(value=1), Row(value=2)])
    path.write_bytes(path.read_bytes()[:-20])
    before = path.read_bytes()
    with pytest.warns(UserWarning, match="line 2") as caught:
        assert read_rows(path) == [Row(value=1)]
    assert len(caught) == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [b'{"metric": \n', b"[1]\n", b'{"metric": "accuracy"}\n', b"\xff\xfe\n"])
def test_a_bad_row_that_is_not_cut_is_refused_with_its_number_and_the_way_out(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    good = (Row(value=1).to_json() + "\n").encode()
    path.write_bytes(good + bad + good)
    with pytest.raises(ValueError, match=r"line 2 is not a row.*sed -i 2d"):
        read_rows(path)


def test_a_last_row_of_a_newer_format_is_not_taken_for_a_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"metric": "accuracy", "value": 1, "version": VERSION + 1}))
    with pytest.raises(ValueError, match="upgrade"):
        read_rows(path)


# the log of samples


def test_a_log_cut_at_any_byte_keeps_every_whole_sample_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    records = [sample(f"key {index}", output="“yes”\n") for index in range(3)]
    with SampleLog(path) as log:
        for record in records:
            log.append(record)
    whole = path.read_bytes()
    ends = np.cumsum([len(line) for line in lines_of(path)])
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with SampleLog(path) as log:
                # a line that lacks only its end is whole
                survivors = int((ends - 1 <= cut).sum())
                assert log.records == records[:survivors]
                for record in records[survivors:]:
                    assert not log.done(record["key"])
                    log.append(record)
        assert len(caught) == (cut not in {0, *ends, *(ends - 1)})
        assert path.read_bytes() == whole


def test_zeros_that_a_power_cut_left_at_the_end_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log:
        log.append(sample("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(100))
    with pytest.warns(UserWarning, match="line 2"), SampleLog(path) as log:
        assert log.done("a")
    assert path.read_bytes() == whole


def test_a_file_of_another_kind_is_refused_and_unharmed(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("The first and only line of my thesis")
    with pytest.raises(ValueError, match="line 1 is not a sample"):
        SampleLog(path)
    assert path.read_text() == "The first and only line of my thesis"


def test_a_bad_line_before_the_last_is_refused_and_the_file_unharmed(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    good = json.dumps(sample("a")).encode() + b"\n"
    content = b'{"key": "cut\n' + good + b'{"key": "b"'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"line 1 is not a sample.*sed -i 1d"):
        SampleLog(path)
    assert path.read_bytes() == content


WRITER = """
import sys
from kvkeep.evaluate.rows import SampleLog
with SampleLog(sys.argv[1]) as log:
    for index in range(10**6):
        if not log.done(f"key {index}"):
            log.append({"key": f"key {index}", "score": 1.0, "output": "x" * 2000})
"""


def test_kill_9_loses_and_repeats_no_finished_sample(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for round_ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            target = 30 * (round_ + 1)
            deadline = time.monotonic() + 60
            while not path.exists() or path.read_bytes().count(b"\n") < target:
                assert time.monotonic() < deadline and writer.poll() is None
                time.sleep(0.005)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        seen = path.read_bytes().count(b"\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with SampleLog(path) as log:
                assert len(log) >= seen >= target
                assert [record["key"] for record in log.records] == [f"key {i}" for i in range(len(log))]


SMALL_DISK = """
import resource, sys
from kvkeep.evaluate.rows import SampleLog
log = SampleLog(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for index in range(100):
    log.append({"key": f"key {index}", "score": 1.0, "output": "x" * 100})
"""


def test_when_the_system_takes_only_half_a_line_no_half_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    done = subprocess.run([sys.executable, "-c", SMALL_DISK, str(path)], capture_output=True, text=True)
    assert "OSError" in done.stderr and "run the same command again" in done.stderr
    content = path.read_bytes()
    assert 0 < len(content) < 1000 and content.endswith(b"\n")
    assert f"The {content.count(10)} samples before it are safe" in done.stderr
    assert [record["key"] for record in read_samples(path)] == [f"key {i}" for i in range(content.count(10))]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_what_is_saved_and_how_to_go_on(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log:
        log.append(sample("a"))
        before = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match=r"disk is full. The 1 samples before it are safe") as caught:
                log.append(sample("b"))
        assert caught.value.errno == number
        assert path.read_bytes() == before
        assert not log.done("b")
        log.append(sample("b"))
    assert [record["key"] for record in read_samples(path)] == ["a", "b"]


def test_a_sample_is_on_disk_before_append_returns(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with SampleLog(tmp_path / "samples.jsonl") as log:
        for count in (1, 2):
            log.append(sample(f"key {count}"))
            assert synced[-1] == (tmp_path / "samples.jsonl").stat().st_size and len(synced) == count


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such lock")
def test_a_second_writer_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log:
        log.append(sample("a"))
        with pytest.raises(ValueError, match="another process"):
            SampleLog(path)
        log.append(sample("b"))
        assert len(read_samples(path)) == 2
    with SampleLog(path) as log:
        assert len(log) == 2


def test_a_log_that_could_not_be_opened_is_not_left_locked(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("no sample\n")
    with pytest.raises(ValueError, match="line 1") as caught:
        SampleLog(path)
    path.write_text("")
    SampleLog(path).close()
    del caught


def test_one_key_is_one_sample(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log:
        log.append(sample("a"))
        with pytest.raises(ValueError, match="'a' is saved already"):
            log.append(sample("a"))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match="'a' appears twice"):
        SampleLog(path)


@pytest.mark.parametrize("bad", [{"score": 1.0}, {"key": "", "score": 1.0}, {"key": "a"}, sample("a", math.nan)])
def test_a_sample_without_name_or_score_is_refused_before_the_file_is_touched(
    tmp_path: Path, bad: dict[str, Any]
) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path) as log, pytest.raises(ValueError, match=r"key|score"):
        log.append(bad)
    assert path.read_bytes() == b""


# samples to rows


def grid() -> list[dict[str, Any]]:
    """Two tasks x (full, tova at two budgets) x 4 samples; the full cache is right on all but the last."""
    return [
        {
            "key": f"{task}/{policy}/{budget}/{index}",
            "model": "m",
            "task": task,
            "length": 2048,
            "question": "inside",
            "policy": policy,
            "budget": budget,
            "split": "test",
            "index": index,
            "seed": index,
            "score": float(index < (3 if policy == "full" else 1)),
            "prompt_tokens": 2000 + index,
            "kept": 100.0 + index,
            "cache_bytes": 1000 + index,
            "full_bytes": 4000,
            "extra": {"tokens_per_s": 10.0 + index, "note": "text"},
        }
        for task in ("needle", "words")
        for policy, budget in (("tova", "10%"), ("full", "full"), ("tova", "25%"))
        for index in range(4)
    ]


def test_each_group_of_samples_becomes_the_row_of_its_means() -> None:
    rows = summarise(grid(), stamp={"model": "other", "commit": "abc", "device": "cpu"})
    assert len(rows) == 6
    low, high, _ = wilson(1, 4)
    assert rows[1] == Row(
        value=0.25,
        low=low,
        high=high,
        interval="wilson",
        n=4,
        model="m",
        policy="tova",
        budget="10%",
        task="needle",
        length=2048,
        question="inside",
        split="test",
        kept=101.5,
        cache_bytes=1001.5,
        full_bytes=4000,
        extra={"prompt_tokens": 2001.5, "tokens_per_s": 11.5},
        commit="abc",
        device="cpu",
    )


def test_the_full_cache_comes_first_in_each_block() -> None:
    assert [(row.task, row.policy) for row in summarise(grid())] == [
        (task, policy) for task in ("needle", "words") for policy in ("full", "tova", "tova")
    ]


@pytest.mark.parametrize("by", [(), ("task",), ("model", "length")])
def test_the_full_cache_is_never_averaged_into_a_policy(by: tuple[str, ...]) -> None:
    rows = summarise(grid(), by=by)
    assert sum(row.n for row in rows) == len(grid())
    assert {row.value for row in rows if row.policy == "full"} == {0.75}
    assert {row.value for row in rows if row.policy != "full"} == {0.25}


def test_fractional_scores_get_a_bootstrap_interval() -> None:
    records = [sample(str(index), score) for index, score in enumerate([0.5, 1.0, 0.25])]
    (row,) = summarise(records)
    assert (row.low, row.high, row.interval) == bootstrap([0.5, 1.0, 0.25])


def test_grouping_by_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"colour.*allowed.*task"):
        summarise(grid(), by=("colour",))


def test_no_samples_give_no_rows() -> None:
    assert summarise([]) == []


# the manifest


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", *identity, *arguments], cwd=folder, text=True).strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository whose root holds kvkeep/evaluate/rows.py, as a checkout of this package does."""
    source = tmp_path / "kvkeep" / "evaluate" / "rows.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "start")
    return source


def test_the_manifest_names_the_commit_and_whether_the_package_differs(checkout: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(rows_module, "__file__", str(checkout))
    found = manifest()
    assert (found["commit"], found["dirty"]) == (git(checkout.parent, "rev-parse", "HEAD"), False)
    (checkout.parents[2] / "rows.jsonl").write_text("results do not make the package dirty")
    assert not manifest()["dirty"]
    checkout.write_text("changed")
    assert manifest()["dirty"]


def test_a_package_installed_inside_anothers_repository_does_not_report_their_commit(
    checkout: Path, monkeypatch: Any
) -> None:
    inside = checkout.parents[2] / "env" / "kvkeep" / "evaluate" / "rows.py"
    inside.parent.mkdir(parents=True)
    monkeypatch.setattr(rows_module, "__file__", str(inside))
    assert manifest()["commit"] == manifest()["versions"]["kvkeep"]


def test_the_manifest_works_without_git(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert manifest()["commit"] == manifest()["versions"]["kvkeep"]


def test_the_manifest_fills_a_row_and_tells_the_command_without_machine_paths(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/kvkeep", "eval", "--tasks", "two words"])
    row = Row(**manifest(model="smollm2", dtype="torch.bfloat16"), value=1)
    assert (row.model, row.dtype, row.device) == ("smollm2", "bfloat16", "cpu")
    assert row.command == "kvkeep eval --tasks 'two words'"
    assert row.threads and row.cpu and row.time.endswith("+00:00")
    assert {"kvkeep", "torch", "transformers", "python"} <= row.versions.keys()
    monkeypatch.setattr(sys, "argv", ["/somewhere/kvkeep/__main__.py", "eval"])
    assert manifest()["command"] == "python -m kvkeep eval"
    monkeypatch.setattr(sys, "argv", ["benchmarks/chunks.py", "--out", "rows"])
    assert manifest()["command"] == "python benchmarks/chunks.py --out rows"
    monkeypatch.setattr(sys, "argv", ["/somewhere/chunks.py"])
    assert manifest()["command"] == "python chunks.py"
