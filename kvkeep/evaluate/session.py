"""Sessions: one model that meets prompts under every arm, saved sample by sample, so that a stopped run goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from transformers import PreTrainedModel

from .. import __version__
from .rows import SampleLog, manifest
from .run import Arm, Progress, digest_of, output_folder, refuse_other_settings, weights_digest


@runtime_checkable
class Named(Protocol):
    """What a session asks of a prompt: where it comes from, which it is there, and a key that no other one has."""

    @property
    def source(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Named)
# the arms that have no sample of a prompt yet
Missing = Callable[[T], tuple[Arm, ...]]


class Records(NamedTuple):
    """The samples of a session, whenever they were measured, and the manifest for their rows."""

    records: list[Mapping[str, Any]]
    stamp: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Session(ABC, Generic[T]):
    """One model before prompts, with every arm; at most `batch` prompts are met at once."""

    model: PreTrainedModel
    tokenizer: Any
    arms: Sequence[Arm]
    seed: int
    batch: int = 1

    @property
    def all_arms(self) -> Sequence[Arm]:
        """The arms that get a sample of each prompt."""
        return self.arms

    @property
    @abstractmethod
    def how(self) -> dict[str, Any]:
        """How prompts are met, as far as a number depends on it."""

    @abstractmethod
    def parts(self, items: Sequence[T], missing: Missing[T]) -> Iterator[tuple[list[T], tuple[Arm, ...]]]:
        """All prompts, in the parts in which they are met, each with the arms that still need it."""

    @abstractmethod
    def read(self, items: Sequence[T], arms: Sequence[Arm], place: int) -> Iterable[tuple[T, Arm, dict[str, Any]]]:
        """The measured part of a sample for each prompt and arm; `place` counts the prompts before these."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a number depends on and rows do not name."""
        weights = weights_digest(self.model, self.tokenizer)
        return {**self.how, "seed": self.seed, "weights": weights, "kvkeep": __version__}

    def run(
        self, items: Sequence[T], out: Path, *, model_name: str, progress: Progress, command: str | None
    ) -> Records:
        """Meet what `out`/samples.jsonl does not have yet; each part is saved before the next begins."""
        with SampleLog(output_folder(out) / "samples.jsonl") as log:
            refuse_other_settings(log, model_name, self.settings)

            def missing(item: T) -> tuple[Arm, ...]:
                return tuple(arm for arm in self.all_arms if not log.done(self._key(model_name, item, arm)))

            place = 0
            for part, arms in self.parts(items, missing):
                progress(place, len(items), part[0].source)
                for item, arm, record in self.read(part, arms, place) if arms else ():
                    key = self._key(model_name, item, arm)
                    if not log.done(key):
                        naming = {"key": key, "model": model_name, **self._naming(item), **arm._asdict()}
                        log.append({**naming, **record, "settings": self.settings})
                place += len(part)
            progress(len(items), len(items), "")
            stamp = manifest(model_name, dtype=str(self.model.dtype), device=str(self.model.device), command=command)
            keys = {self._key(model_name, item, arm) for item in items for arm in self.all_arms}
            return Records([record for record in log.records if record["key"] in keys], stamp)

    def _key(self, model_name: str, item: T, arm: Arm) -> str:
        return "/".join([model_name, item.key, *arm, digest_of(self.settings)])

    def _naming(self, item: T) -> dict[str, Any]:
        return {"task": item.source, "split": item.split, "index": item.name, "seed": self.seed}
