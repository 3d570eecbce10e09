"""What a scenario asks of a library: conversations under a policy and a budget, each with a cache of its own.

B sequences, H KV heads, N slots, T new tokens, S tokens so far, D head size, V vocabulary.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class NotThere(Exception):
    """The library has no such thing; the message says why."""


class Held(NamedTuple):
    """Keys `[B, H, N, D]` that one layer holds, and which of the slots are in use `[B, H, N]`."""

    keys: Tensor
    used: Tensor


class Conversation(ABC):
    """One conversation on `model`, with a cache of its own."""

    model: Any

    @abstractmethod
    def read(self, input_ids: Tensor) -> Tensor:
        """Read new tokens at their true positions, as the library's own calls do; logits of the last one, `[B, V]`."""

    @abstractmethod
    def call(self, input_ids: Tensor) -> Tensor:
        """The same by a bare `model(input_ids, cache)`, positions left to transformers."""

    @abstractmethod
    def generate(self, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        """`generate` on the whole conversation so far, `[B, S]`."""

    @abstractmethod
    def held(self) -> list[Held]:
        """Keys of each layer."""

    @abstractmethod
    def kept(self) -> int:
        """The most tokens that a head of any layer keeps."""

    @abstractmethod
    def claimed_bytes(self, full: int) -> float:
        """Bytes that the library says it holds, where the full cache holds `full`."""

    @abstractmethod
    def roots(self) -> list[Any]:
        """Objects from which every tensor held for this conversation can be reached."""

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path, model: Any, prefix: Tensor) -> "Conversation":
        """The saved conversation on another copy of the model, which must have read `prefix`."""


class Library(ABC):
    """One of the two libraries."""

    name: str
    # attention functions of transformers that importing the library replaced
    replaced: int

    @abstractmethod
    def versions(self) -> dict[str, str]: ...

    @abstractmethod
    def start(self, model: Any, policy: str, *, share: float | None = None, tokens: int | None = None) -> Conversation:
        """A new conversation. Policy "full" keeps everything; raises NotThere for a policy the library lacks."""

    @abstractmethod
    def pipeline(self, model: Any, folder: Path, text: str, policy: str, share: float) -> None:
        """Answer a short question about `text` by the library's own highest-level call."""


def cache_argument(model: Any) -> str:
    """What this transformers release calls the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def storage_bytes(roots: list[Any]) -> int:
    """Bytes of all distinct storages that can be reached from `roots`."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(roots)}
    return sum(storages.values())


def _tensors(node: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors in containers and in objects of the libraries' caches; a model's own parts are not followed."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, dict):
        for part in node.values():
            yield from _tensors(part, seen)
    elif isinstance(node, list | tuple):
        for part in node:
            yield from _tensors(part, seen)
    elif type(node).__module__.startswith(("kvkeep.", "transformers.cache_utils")):
        yield from _tensors(vars(node), seen)
