"""Texts behind prompts, read under every arm: what agreement and diagnoses have in common.

B texts read together, P prompt tokens, T tokens behind the prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from .. import __version__
from ..cache import KVCache
from ..group import CacheGroup
from ..recorder import Item
from .answers import read_prompt
from .rows import SampleLog, manifest
from .run import Arm, Progress, digest_of, output_folder, refuse_other_settings, weights_digest


class Records(NamedTuple):
    """The samples of a session, whenever they were measured, and the manifest for their rows."""

    records: list[Mapping[str, Any]]
    stamp: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TextSession(ABC):
    """One model that reads texts under every arm, at most `batch` texts of equal lengths at once."""

    model: PreTrainedModel
    tokenizer: Any
    arms: Sequence[Arm]
    seed: int
    batch: int = 1

    @property
    def all_arms(self) -> Sequence[Arm]:
        """The arms that get a sample of each text."""
        return self.arms

    @property
    @abstractmethod
    def how(self) -> dict[str, Any]:
        """How texts are read, as far as a number depends on it."""

    @abstractmethod
    def read(
        self, items: Sequence[Item], arms: Sequence[Arm], place: int
    ) -> Iterable[tuple[Item, Arm, dict[str, Any]]]:
        """The measured part of a sample for each text and arm; `place` counts the texts before these."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a number depends on and rows do not name."""
        weights = weights_digest(self.model, self.tokenizer)
        return {**self.how, "seed": self.seed, "weights": weights, "kvkeep": __version__}

    def run(
        self, items: Sequence[Item], out: Path, *, model_name: str, progress: Progress, command: str | None
    ) -> Records:
        """Read what `out`/samples.jsonl does not have yet; what is read at once is saved before the next begins."""
        with SampleLog(output_folder(out) / "samples.jsonl") as log:
            refuse_other_settings(log, model_name, self.settings)
            place = 0
            for texts, missing in self._batches(log, items, model_name):
                progress(place, len(items), texts[0].source)
                for item, arm, record in self.read(texts, missing, place) if missing else ():
                    log.append({**self._naming(model_name, item, arm), **record, "settings": self.settings})
                place += len(texts)
            progress(len(items), len(items), "")
            stamp = manifest(model_name, dtype=str(self.model.dtype), device=str(self.model.device), command=command)
            keys = {self._key(model_name, item, arm) for item in items for arm in self.all_arms}
            return Records([record for record in log.records if record["key"] in keys], stamp)

    def _key(self, model_name: str, item: Item, arm: Arm) -> str:
        return "/".join([model_name, item.key, *arm, digest_of(self.settings)])

    def _batches(
        self, log: SampleLog, items: Sequence[Item], model_name: str
    ) -> Iterator[tuple[list[Item], tuple[Arm, ...]]]:
        """Texts that can be read together, each with the arms that the log does not have for them."""
        alike: dict[Any, list[Item]] = {}
        for item in items:
            missing = tuple(arm for arm in self.all_arms if not log.done(self._key(model_name, item, arm)))
            alike.setdefault((missing, _shape(item)), []).append(item)
        for (missing, shape), texts in alike.items():
            size = self.batch if shape.num_new == 0 else 1
            for start in range(0, len(texts), size):
                yield texts[start : start + size], missing

    def _naming(self, model_name: str, item: Item, arm: Arm) -> dict[str, Any]:
        key = self._key(model_name, item, arm)
        text = {"task": item.source, "split": item.split, "index": item.name, "seed": self.seed}
        return {"key": key, "model": model_name, **text, **arm._asdict()}


class _Shape(NamedTuple):
    """Lengths of a prompt and of the text behind it, and tokens that the model is to add to that."""

    prompt: int
    text: int
    num_new: int


def _shape(item: Item) -> _Shape:
    given, num_new = item.branches[0]
    return _Shape(item.num_tokens, given.shape[1], num_new)


class Begun(NamedTuple):
    """Caches that have compressed all of their prompts but the last token, and the token before each of the texts."""

    group: CacheGroup
    fed: Int[Tensor, "B T"]


def begin(
    model: PreTrainedModel, members: Iterable[KVCache], prompt: Int[Tensor, "B P"], text: Int[Tensor, "B T"]
) -> Begun:
    """Read prompts into all members, so that the first token of the text too is told by a compressed cache."""
    group = CacheGroup(members)
    read_prompt(model, group, prompt[:, :-1], torch.cat([prompt[:, -1:], text], dim=1))
    return Begun(group, fed(prompt, text))


def fed(prompt: Int[Tensor, "B P"], text: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The token before each of the texts."""
    return torch.cat([prompt[:, -1:], text[:, :-1]], dim=1)
