"""Texts behind prompts, read under every arm: what agreement and diagnoses have in common.

B texts read together, P prompt tokens, T tokens behind the prompt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import KVCache
from ..group import CacheGroup
from ..recorder import Item
from .answers import read_prompt
from .run import Arm
from .session import Missing, Session


@dataclass(frozen=True, kw_only=True)
class TextSession(Session[Item]):
    """One model that reads texts under every arm; texts of equal lengths are read together."""

    def parts(self, items: Sequence[Item], missing: Missing[Item]) -> Iterator[tuple[list[Item], tuple[Arm, ...]]]:
        alike: dict[Any, list[Item]] = {}
        for item in items:
            alike.setdefault((missing(item), _shape(item)), []).append(item)
        for (arms, shape), texts in alike.items():
            # how long an answer will be is not known
            size = self.batch if shape.num_new == 0 else 1
            for start in range(0, len(texts), size):
                yield texts[start : start + size], arms


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
