"""`kvkeep trace`: record the prompts of some data into a folder of traces.

Each prompt is on disk before the next begins. Stopped or killed, the same call goes on after those; several processes
that `torchrun` or `accelerate launch` starts share the prompts among them.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .corpus import Harvest, Reading, harvest
from .evaluate.run import end_tokens, weights_digest
from .fingerprint import fingerprint, head_size, refuse_other_model
from .policies.kvp import GLANCE, glimpses_of
from .recorder import Item, Recorder
from .trace import (
    Trace,
    TraceIndex,
    add_prompts,
    has_index,
    is_recorded,
    read_index,
    trace_bytes,
    trace_path,
    write_index,
    write_trace,
)

# called with prompts done, prompts in all, and the prompt that comes next
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Share:
    """This process among those that share the prompts."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Share":
        """As torchrun and accelerate launch say it, in RANK and WORLD_SIZE."""
        return cls(rank=int(environment.get("RANK", 0)), size=int(environment.get("WORLD_SIZE", 1)))


class Tracing:
    """Prompts and what is left to do of them. Nothing is written before `run`.

    Args:
        model_name: what the index calls the model.
        data: sources of prompts (see `corpus.harvest`).
        out: folder of traces, new or with others made under the same settings.
        reading: how data becomes prompts and futures.
        layers, heads, delay: as for `Recorder`.
        policies: as for `Recorder`, beside those that tell what kvp's agents see of queries.
        temperature: of sampled futures.
        made_by: manifest of this run, for the index.
        share: this process among several; None asks the environment.

    Raises:
        ValueError: for what `harvest` and `Recorder` refuse, and an `out` with traces of another model or settings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_name: str,
        data: Sequence[str],
        out: Path,
        reading: Reading,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        policies: Sequence[str] = (),
        delay: int | None = None,
        temperature: float = 1.0,
        made_by: Mapping[str, Any] | None = None,
        share: Share | None = None,
    ):
        self.out, self.share = out, share or Share.of_environment()
        self.recorder = Recorder(
            model,
            layers=layers,
            heads=heads,
            # what kvp's agents see of queries
            policies=[*glimpses_of(GLANCE).values(), *policies],
            temperature=temperature if reading.sampled else 0.0,
            seed=reading.seed,
            ends=end_tokens(model, reading.tokenizer),
            delay=delay,
        )
        config = model.config.get_text_config(decoder=True)
        self._head_size = head_size(config)
        index = TraceIndex(
            fingerprint=fingerprint(config),
            model=model_name,
            layers=self.recorder.layers,
            heads=self.recorder.heads,
            group=self.recorder.group,
            dtype=str(model.dtype).removeprefix("torch."),
            settings=_settings(self.recorder, reading),
            made_by=dict(made_by or {}),
        )
        known = _joinable(out, index)
        self.harvests: list[Harvest] = [harvest(source, reading) for source in data]
        # the same prompt may be in two sources
        self.items = list({item.key: item for found in self.harvests for item in found.items}.values())
        self.index = add_prompts(replace(index, prompts=known), [item.key for item in self.items])

    @property
    def left(self) -> list[Item]:
        """Prompts of all processes that are not recorded yet."""
        return self._unrecorded(self.items)

    def _unrecorded(self, items: Sequence[Item]) -> list[Item]:
        return [item for item in items if not is_recorded(self.out, item.key)]

    def bytes(self, items: Sequence[Item]) -> int:
        """What the traces of these prompts take on disk."""
        return sum(map(self._bytes_of, items))

    def _bytes_of(self, item: Item) -> int:
        return trace_bytes(
            item.num_tokens,
            layers=len(self.recorder.layers),
            heads=len(self.recorder.heads),
            head_size=self._head_size,
            futures=len(item.branches),
            longest=max(branch.longest for branch in item.branches),
            policies=len(self.recorder.policies),
            later=self.recorder.group if self.recorder.delay else 0,
        )

    def run(self, progress: Progress = lambda done, total, what: None) -> int:
        """Record what is left of this process's share; returns how many prompts that were.

        Raises:
            ValueError: before anything is written, if the disk has not enough room; and for a prompt where the model
                gives numbers that are not finite. What was recorded before stays.
        """
        _check_room(self.out, self.bytes(self.left))
        if self.share.rank == 0:
            write_index(self.out, self.index)
        # shared out of all prompts: what is left changes while others record
        mine = self._unrecorded(self.items[self.share.rank :: self.share.size])
        for done, item in enumerate(mine):
            progress(done, len(mine), item.source)
            _sweep(self.out, item.key)
            write_trace(self.out, _finite(self.recorder.record(item)))
        progress(len(mine), len(mine), "")
        return len(mine)


def _settings(recorder: Recorder, reading: Reading) -> dict[str, Any]:
    """What traces in one folder must have in common, beside the model and what is recorded of it."""
    return {
        "futures": reading.futures,
        "future_tokens": reading.future_tokens,
        "temperature": recorder.temperature,
        "seed": recorder.seed,
        "policies": recorder.policies,
        "delay": recorder.delay,
        "weights": weights_digest(recorder.model, reading.tokenizer),
    }


def _joinable(out: Path, index: TraceIndex) -> list[str]:
    """Keys of the traces in `out`, which must be of the same model and settings."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {out}, which is a file; give a folder for traces")
    if not has_index(out):
        return []
    there = read_index(out)
    refuse_other_model(there.fingerprint, index.fingerprint, out)
    theirs, ours = ({"layers": i.layers, "heads": i.heads, "dtype": i.dtype, **i.settings} for i in (there, index))
    differs = [
        f"{name} {theirs.get(name)!r} there, {value!r} now" for name, value in ours.items() if theirs.get(name) != value
    ]
    if differs:
        raise ValueError(
            f"{out} holds traces with other settings ({'; '.join(differs)}); give another out folder, or the settings "
            "of before"
        )
    return there.prompts


def _check_room(out: Path, needed: int) -> None:
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"the traces take {needed / 1e9:.2f} GB and {there} has {free / 1e9:.2f} GB left; record fewer or shorter "
            "prompts, or only some layers or heads"
        )


def _sweep(out: Path, key: str) -> None:
    """Remove what a killed process left half written of this prompt."""
    path = trace_path(out, key)
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        # another process that sweeps is as good
        with suppress(FileNotFoundError):
            left.unlink()


def _finite(trace: Trace) -> Trace:
    measured = [trace.importance_mean.transpose(0, 1), *([] if trace.later is None else [trace.later])]
    for layer, arrays in enumerate(zip(*measured, strict=True)):
        if not all(bool(array.isfinite().all()) for array in arrays):
            raise ValueError(
                f"prompt {trace.key} gives attention that is not finite in recorded layer {layer}; the model's numbers "
                "overflow, load it with another dtype"
            )
    return trace
