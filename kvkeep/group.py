"""CacheGroup: many policies over one prompt, decoded as one batch.

B sequences, H KV heads, G query heads per KV head, T new tokens, D head size.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache import KVCache
from .layer import KVLayer, Plan


class CacheGroup(Cache):
    """Several caches of one sequence each that read one prompt together and then decode as one batch.

    The prompt runs once with a batch of one; each member evicts by its own policy and budget. From then on row i of
    the batch belongs to member i. This is what makes a wide table of policies affordable.

    Args:
        members: fresh caches for the same model.
    """

    def __init__(self, members: Iterable[KVCache]):
        self.members = list(members)
        super().__init__(
            layers=[
                _GroupLayer([member.layers[index] for member in self.members], self.members[0].plan)  # type: ignore[misc]
                if isinstance(layer, KVLayer)
                else layer
                for index, layer in enumerate(self.members[0].layers)
            ]
        )


class _GroupLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, layers: list[KVLayer], plan: Plan):
        super().__init__()
        self.layers, self.plan = layers, plan
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("members initialize themselves")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.plan.attached:
            raise RuntimeError("a CacheGroup needs kvkeep.attach(model)")
        key_states._kvkeep_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        if keys.shape[0] == 1:
            return self._attend_shared(queries, keys, values, valid, scale)
        rows = zip(queries.split(1), keys.split(1), values.split(1), strict=True)
        outputs = [
            layer.attend(*row, None if valid is None else valid[i : i + 1], scale)
            for i, (layer, row) in enumerate(zip(self.layers, rows, strict=True))
        ]
        return torch.cat(outputs)

    def _attend_shared(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float
    ) -> Tensor:
        first, *others = self.layers
        seen = first.take(queries, keys, values, valid, scale)
        output = first.read(queries, seen, scale)
        for layer in others:
            theirs = layer.take(queries, keys, values, valid, scale)
            # the same prompt gives the same attention: it is worked out once for all
            layer.settle(replace(theirs, attention=seen.attention))
        first.settle(seen)
        return output

    def get_seq_length(self) -> int:
        return self.layers[0].get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layers[0].get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1
