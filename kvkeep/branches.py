"""Branches: a transformers cache of continuations that read other caches' slots and hold nothing but their own tokens.

P sequences, M continuations of each, H KV heads, G query heads per KV head, T tokens of a continuation, D head size.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from .attention import attend_shared
from .cache import KVCache
from .layer import AttendingLayer, KVLayer
from .slots import EMPTY


class Stem(NamedTuple):
    """The sequences of a cache, which are rows `places` of the model's batch."""

    cache: KVCache
    places: Int[Tensor, " P"]

    @property
    def lengths(self) -> Int[Tensor, " P"]:
        """Tokens each sequence has seen, without padding."""
        lengths = self.cache.managed[0].lengths
        assert lengths is not None
        return lengths


class Branches(Cache):
    """`num` continuations of every sequence of `stems`, each of at most `room` tokens.

    Row by row: the first stem's first sequence with its continuations, its second sequence, and so on. The stems' slots
    are read and never changed, so dropping this cache takes everything back. Sliding windows, which are transformers'
    own, are copied: they are short.

    Args:
        source: the cache that the model has just read the prompt into, whose layers the windows are taken from.
        hides_last: the continuations repeat the prompt's last token, so its slot is not seen.
    """

    def __init__(self, source: Cache, stems: Sequence[Stem], *, num: int, room: int, hides_last: bool = False):
        self.num = num
        self._places = places = torch.cat([stem.places for stem in stems]).repeat_interleave(num)
        super().__init__(
            layers=[
                _window(layer, places)
                if isinstance(layer, DynamicSlidingWindowLayer)
                else _BranchLayer([(stem.cache.layers[index], stem) for stem in stems], num, room, hides_last)  # type: ignore[misc]
                for index, layer in enumerate(source.layers)
            ]
        )

    def mask(self, prompt: Int[Tensor, "B S"] | None) -> Int[Tensor, "R S2"] | None:
        """The padding mask with the next token, from the prompt's; None where there is no padding."""
        if prompt is None or bool(prompt.all()):
            return None
        rows = prompt[self._places.to(prompt.device)]
        own = self.get_seq_length() + 1 - rows.shape[1]
        return torch.cat([rows, rows.new_ones(len(rows), own)], 1)

    def queries(self, layer: int) -> Float[Tensor, "P M HG T D"]:
        """The queries of all tokens read so far in a managed layer, after rotation."""
        held = self.layers[layer]
        assert isinstance(held, _BranchLayer)
        return held.queries[:, :, : held.read].unflatten(0, (-1, self.num))


class _BranchLayer(AttendingLayer):
    """The own tokens of every continuation in one full-attention layer, beside the layers whose slots they share."""

    def __init__(self, stems: list[tuple[KVLayer, Stem]], num: int, room: int, hides_last: bool):
        super().__init__()
        self._stems, self._num, self._room, self._hides_last = stems, num, room, hides_last
        self.read = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(like: Tensor) -> Tensor:
            return like.new_zeros(*like.shape[:2], self._room, like.shape[3])

        self._keys, self._values = empty(key_states), empty(value_states)
        super().lazy_initialization(key_states, value_states)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        """Append one token a row, and attend over what its stem holds and its own tokens."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.queries = queries.new_zeros(*queries.shape[:2], self._room, queries.shape[3])
        for held, new in ((self.queries, queries), (self._keys, keys), (self._values, values)):
            held[:, :, self.read] = new[:, :, 0]
        self.read += 1
        sizes = [len(stem.places) * self._num for _, stem in self._stems]
        own = (self._keys[:, :, : self.read], self._values[:, :, : self.read])
        rows = zip(self._stems, queries.split(sizes), own[0].split(sizes), own[1].split(sizes), strict=True)
        return torch.cat([self._attend_stem(*part, scale) for part in rows])

    def _attend_stem(
        self, stem: tuple[KVLayer, Stem], queries: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        layer, behind = stem
        slots = layer.slots
        assert slots is not None
        hidden = None
        if layer.has_empty or self._hides_last:
            end = behind.lengths[:, None, None] - int(self._hides_last)
            hidden = (slots.positions == EMPTY) | (slots.positions >= end)
        beyond = layer.beyond(scale)
        return attend_shared(queries, keys, values, slots.keys, slots.values, hidden, scale, beyond)

    def get_seq_length(self) -> int:
        return self._stems[0][0].seen + self.read

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + int(query_length), 0


def _window(layer: DynamicSlidingWindowLayer, places: Int[Tensor, " R"]) -> DynamicSlidingWindowLayer:
    window = copy(layer)
    window.batch_select_indices(places)
    return window
