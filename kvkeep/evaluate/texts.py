"""Texts behind prompts, read under every arm: what agreement and diagnoses have in common.

P prompt tokens, T tokens behind the prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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
    """One model that reads texts under every arm."""

    model: PreTrainedModel
    tokenizer: Any
    arms: Sequence[Arm]
    seed: int

    @property
    def all_arms(self) -> Sequence[Arm]:
        """The arms that get a sample of each text."""
        return self.arms

    @property
    @abstractmethod
    def how(self) -> dict[str, Any]:
        """How texts are read, as far as a number depends on it."""

    @abstractmethod
    def read(self, item: Item, arms: Sequence[Arm], place: int) -> Iterable[tuple[Arm, dict[str, Any]]]:
        """The measured part of a sample for each of the arms; `place` counts the texts."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a number depends on and rows do not name."""
        weights = weights_digest(self.model, self.tokenizer)
        return {**self.how, "seed": self.seed, "weights": weights, "kvkeep": __version__}

    def run(
        self, items: Sequence[Item], out: Path, *, model_name: str, progress: Progress, command: str | None
    ) -> Records:
        """Read what `out`/samples.jsonl does not have yet; each text is saved before the next begins."""
        with SampleLog(output_folder(out) / "samples.jsonl") as log:
            refuse_other_settings(log, model_name, self.settings)
            for place, item in enumerate(items):
                progress(place, len(items), item.source)
                self._finish(log, item, model_name, place)
            progress(len(items), len(items), "")
            stamp = manifest(model_name, dtype=str(self.model.dtype), device=str(self.model.device), command=command)
            keys = {self._key(model_name, item, arm) for item in items for arm in self.all_arms}
            return Records([record for record in log.records if record["key"] in keys], stamp)

    def _key(self, model_name: str, item: Item, arm: Arm) -> str:
        return "/".join([model_name, item.key, *arm, digest_of(self.settings)])

    def _finish(self, log: SampleLog, item: Item, model_name: str, place: int) -> None:
        missing = [arm for arm in self.all_arms if not log.done(self._key(model_name, item, arm))]
        if not missing:
            return
        naming = {"model": model_name, "task": item.source, "split": item.split, "index": item.name, "seed": self.seed}
        for arm, record in self.read(item, missing, place):
            key = self._key(model_name, item, arm)
            log.append({"key": key, **naming, **arm._asdict(), **record, "settings": self.settings})


class Begun(NamedTuple):
    """Caches that have compressed all of a prompt but its last token, and the token before each of the text."""

    group: CacheGroup
    fed: Int[Tensor, "1 T"]


def begin(
    model: PreTrainedModel, members: Iterable[KVCache], prompt: Int[Tensor, "1 P"], text: Int[Tensor, "1 T"]
) -> Begun:
    """Read a prompt into all members, so that the first token of the text too is told by a compressed cache."""
    group = CacheGroup(members)
    read_prompt(model, group, prompt[:, :-1], torch.cat([prompt[:, -1:], text], dim=1))
    return Begun(group, fed(prompt, text))


def fed(prompt: Int[Tensor, "1 P"], text: Int[Tensor, "1 T"]) -> Int[Tensor, "1 T"]:
    """The token before each of the text."""
    return torch.cat([prompt[:, -1:], text[:, :-1]], dim=1)
