"""Traces: what a model cached for a prompt and how much its future read of it, on disk.

F futures, L layers, H KV heads, G query heads per KV head, n prompt tokens, D head size, f tokens of the longest
future.

A folder holds `index.json`, which says what all its traces share, and `prompts/KEY.safetensors`, one file for each
prompt, written whole or not at all. See docs/traces.md.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jaxtyping import BFloat16, Float32, Int32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .fingerprint import fingerprint, refuse_other_model
from .saving import refuse_newer, whole_file

FORMAT = 1
AGGREGATIONS = ("max", "mean")
# how the attention of a KV head's query heads becomes importance
GROUPS = (*AGGREGATIONS, "square")

_INDEX = "index.json"
_WORTH = "worth."
# more than a file's header takes without worths, and than each worth adds to it
_HEADER_BYTES, _ENTRY_BYTES = 1536, 160


@dataclass(frozen=True, kw_only=True)
class TraceIndex:
    """What all traces of a folder share.

    Attributes:
        fingerprint: of the model (`kvkeep.fingerprint`).
        model: what the model was called.
        layers: number in the model of each of the L recorded layers.
        heads: number in the model of each of the H recorded KV heads.
        group: query heads per KV head.
        dtype: numbers the model computed in; keys and values are stored in bf16.
        settings: everything else that importance depends on, such as how futures came about.
        prompts: keys of all prompts, in order; those of a recording under way may have no file yet.
        made_by: versions, commit and command of the recording.
    """

    fingerprint: dict[str, Any]
    model: str
    layers: list[int]
    heads: list[int]
    group: int
    dtype: str
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    made_by: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One prompt: its cache after the prefill with nothing evicted, and what its futures read.

    Attributes:
        key: names the prompt, and its file.
        source: where it comes from, such as "niah_single_1/inside", "chat" or "text".
        split: "train", "validation" or "test".
        token_ids: the prompt's tokens; the token at place i has position i.
        future_ids: tokens of each future, -1 behind the end of a shorter one.
        keys, values: after rotation, as cached.
        importance_max, importance_mean: attention from all tokens of each future, summed; of the query heads of a KV
            head the largest or the mean for each query.
        worths: what policies that read queries say right after the prompt, by name.
        later: mean attention of each query head from those of the prompt's own tokens that are at least the recording's
            delay behind (`TraceIndex.settings`); None where it was not recorded.
        importance_square: as `importance_max`, each query's attention squared; None in older traces.
    """

    key: str
    source: str
    split: str
    token_ids: Int32[Tensor, " n"]
    future_ids: Int32[Tensor, "F f"]
    keys: BFloat16[Tensor, "L H n D"]
    values: BFloat16[Tensor, "L H n Dv"]
    importance_max: Float32[Tensor, "F L H n"]
    importance_mean: Float32[Tensor, "F L H n"]
    worths: Mapping[str, Float32[Tensor, "L H n"]] = field(default_factory=dict)
    later: Float32[Tensor, "L H G n"] | None = None
    importance_square: Float32[Tensor, "F L H n"] | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def future_lengths(self) -> list[int]:
        """Tokens of each future."""
        return (self.future_ids >= 0).sum(1).tolist()

    def importance(self, group: str = "max", futures: str = "mean") -> Float32[Tensor, "L H n"]:
        """Attention that each prompt token gets from the future.

        Args:
            group: "max" or "mean" of the query heads of a KV head, for each query before the sum over queries, or
                "square", the square of that largest.
            futures: "mean" or "max" of the prompt's futures, after that sum.

        Raises:
            ValueError: for another name, and for squares that were not recorded.
        """
        refuse_unknown(group, futures)
        each = getattr(self, f"importance_{group}")
        if each is None:
            raise ValueError(f"trace {self.key} has no squares, being older; record it again, or learn without them")
        return each.mean(0) if futures == "mean" else each.amax(0)


def refuse_unknown(group: str, futures: str) -> None:
    """ValueError for names that `Trace.importance` does not know."""
    if group not in GROUPS or futures not in AGGREGATIONS:
        raise ValueError(
            f"group is {', '.join(GROUPS)} and futures {' or '.join(AGGREGATIONS)}; got {group!r} and {futures!r}"
        )


class Traces:
    """The traces of a folder, memory-mapped: a tensor is read from disk when it is first used.

    >>> traces = Traces("traces", split="train", source="niah")
    >>> len(traces), traces[0].keys.shape, traces[0].importance().shape

    Args:
        folder: as `kvkeep trace` wrote it.
        split: only this split.
        source: only sources that begin so (or with one of several).
        partial: take what is there of a recording that was not finished.

    Raises:
        FileNotFoundError: where there are no traces, or a prompt's file is missing.
        ValueError: for a truncated or foreign file, a format that is too new, and where the filters leave nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        split: str | None = None,
        source: str | tuple[str, ...] = "",
        partial: bool = False,
    ):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        paths = [trace_path(self.folder, key) for key in self.index.prompts]
        there = [path for path in paths if path.is_file()]
        if len(there) < len(paths) and not partial:
            raise FileNotFoundError(_missing(paths, there))
        headers = {path: _header(path) for path in there}
        self._paths = [
            path
            for path, header in headers.items()
            if split in (None, header["split"]) and header["source"].startswith(source)
        ]
        if not self._paths:
            raise ValueError(_nothing(self.folder, headers.values(), split, source))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Of the model that made them."""
        return self.index.fingerprint

    def refuse_other_model(self, config: Any) -> None:
        """ValueError unless they were made with a model of this transformers config."""
        refuse_other_model(self.fingerprint, fingerprint(config.get_text_config(decoder=True)), self.folder)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> Trace:
        return _read(self._paths[place])

    def __iter__(self) -> Iterator[Trace]:
        return (self[place] for place in range(len(self)))


def trace_path(folder: Path, key: str) -> Path:
    """Where the trace of this key lies."""
    return folder / "prompts" / f"{key}.safetensors"


def write_index(folder: Path, index: TraceIndex) -> None:
    """Write or replace `index.json`."""
    with whole_file(folder / _INDEX) as file:
        file.write(json.dumps({"version": FORMAT, **asdict(index)}, indent=1).encode() + b"\n")


def read_index(folder: Path) -> TraceIndex:
    """What `write_index` wrote; fields that a later version added at the same format are ignored.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: for one that cannot be read or is too new.
    """
    path = folder / _INDEX
    if not path.is_file():
        raise FileNotFoundError(f"no traces in {folder} (it has no {_INDEX}); make some with kvkeep trace")
    try:
        raw = json.loads(path.read_bytes())
        version = raw.pop("version")
        if version <= FORMAT:
            known = {entry.name for entry in fields(TraceIndex)}
            return TraceIndex(**{name: value for name, value in raw.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of traces ({error}); record them again, or restore it") from error
    raise ValueError(f"{path} has format version {version} and this kvkeep reads up to {FORMAT}; upgrade kvkeep")


def has_index(folder: Path) -> bool:
    """Whether there are traces, or were to be."""
    return (folder / _INDEX).is_file()


def is_recorded(folder: Path, key: str) -> bool:
    """Whether the file of this prompt is there and whole."""
    try:
        return _header(trace_path(folder, key))["key"] == key
    except (FileNotFoundError, ValueError):
        return False


def add_prompts(index: TraceIndex, keys: Iterable[str]) -> TraceIndex:
    """The index with these prompts too."""
    return replace(index, prompts=list(dict.fromkeys([*index.prompts, *keys])))


def write_trace(folder: Path, trace: Trace) -> None:
    """Write one prompt's file."""
    tensors = {name: getattr(trace, name) for name in _TENSORS}
    tensors |= {name: getattr(trace, name) for name in _OPTIONAL if getattr(trace, name) is not None}
    tensors |= {_WORTH + name: worth for name, worth in trace.worths.items()}
    state = {name: getattr(trace, name) for name in ("key", "source", "split", "num_tokens", "future_lengths")}
    header = {"kvkeep": "trace", "version": str(FORMAT), "state": json.dumps(state)}
    with whole_file(trace_path(folder, trace.key)) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header))


def trace_bytes(
    num_tokens: int,
    *,
    layers: int,
    heads: int,
    head_size: int,
    futures: int,
    longest: int,
    policies: int,
    later: int = 0,
) -> int:
    """Bytes of a file with these shapes: its tensors to the byte, and at most so much for its header.

    Args:
        longest: tokens of the longest future.
        policies: worths that are recorded.
        later: query heads of a KV head whose later attention is recorded; 0 for none.
    """
    of_slots = layers * heads * num_tokens * (2 * 2 * head_size + 4 * 3 * futures + 4 * policies + 4 * later)
    return of_slots + 4 * (num_tokens + futures * longest) + _HEADER_BYTES + _ENTRY_BYTES * (policies + bool(later))


# what a recording may lack
_OPTIONAL = ("later", "importance_square")
_TENSORS = tuple(
    entry.name for entry in fields(Trace) if entry.name not in ("key", "source", "split", "worths", *_OPTIONAL)
)


def _header(path: Path) -> dict[str, Any]:
    """What the file says of its prompt; it is opened for that, which finds a truncated one."""
    with _opened(path) as file:
        return _state(file, path)


def _state(file: Any, path: Path) -> dict[str, Any]:
    header = file.metadata() or {}
    if header.get("kvkeep") != "trace":
        raise ValueError(f"{path} is no trace, but {header.get('kvkeep') or 'some other safetensors file'}")
    refuse_newer(path, header["version"], FORMAT)
    return json.loads(header["state"])


def _read(path: Path) -> Trace:
    with _opened(path) as file:
        state = _state(file, path)
        # views of the mapped file: nothing is read yet
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    worths = {name.removeprefix(_WORTH): tensors.pop(name) for name in list(tensors) if name.startswith(_WORTH)}
    named = {name: state[name] for name in ("key", "source", "split")}
    optional: dict[str, Any] = {name: tensors.get(name) for name in _OPTIONAL}
    return Trace(**named, worths=worths, **optional, **{name: tensors[name] for name in _TENSORS})


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; run the same kvkeep trace again to record it anew") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or no safetensors file ({error}); delete it and run the same kvkeep trace again"
        ) from error


def _missing(paths: list[Path], there: list[Path]) -> str:
    first = next(path for path in paths if path not in there)
    return (
        f"{first} is missing: {len(there)} of {len(paths)} prompts are recorded; run the same kvkeep trace again to "
        "record the others, or take those that are there with partial=True"
    )


def _nothing(folder: Path, headers: Iterable[Mapping[str, Any]], split: str | None, source: str | tuple) -> str:
    found = sorted({f"{header['source']} ({header['split']})" for header in headers})
    wanted = f"split {split or 'any'}, source {source or 'any'}"
    return f"{folder} has no traces for {wanted}; there are: {', '.join(found) or 'none yet'}"
