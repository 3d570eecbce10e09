"""CacheGroup: many policies over one prompt, or one batch of prompts, decoded as one batch.

B sequences, H KV heads, G query heads per KV head, T new tokens, D head size.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from .cache import KVCache
from .layer import KVLayer, Plan, StandIn
from .policies import Observation, Policy


class CacheGroup(Cache):
    """Several caches that read the same prompt together, or the same batch of them, and then decode as one batch.

    The prompts run once; each member evicts by its own policy and budget. From then on the first rows of the batch
    belong to the first member, as many as there were prompts, the next to the second, and so on. This is what makes a
    wide table of policies affordable.

    Args:
        members: caches for the same model, all fresh or all with the same prompts behind them. Sliding-window layers
            are not a policy's: the group takes those of its first member, and shares them while the prompts are read.

    Raises:
        ValueError: without members, or where they have not seen equally many tokens.
    """

    def __init__(self, members: Iterable[KVCache]):
        self.members = list(members)
        _check_together(self.members)
        super().__init__(
            layers=[
                _GroupLayer([member.layers[index] for member in self.members], self.members[0].plan)  # type: ignore[misc]
                if isinstance(layer, KVLayer)
                else layer
                for index, layer in enumerate(self.members[0].layers)
            ]
        )

    @property
    def apart(self) -> bool:
        """Whether members may hold different tokens, so that each must read on by itself."""
        return any(layer.apart for layer in self.layers if isinstance(layer, _GroupLayer))

    def select(self, rows: Sequence[int]) -> "CacheGroup":
        """A group of the members `rows` alone, in that order; they stay the same objects.

        The new group has sliding windows of its own: what either group reads from now on, the other does not see there.
        """
        chosen = CacheGroup(self.members[row] for row in rows)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicSlidingWindowLayer):
                chosen.layers[index] = _window(layer, rows, sequences_of(self.members[0]))
        return chosen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if isinstance(layer, DynamicSlidingWindowLayer) and 0 < (windows := _num_windows(layer)) < key_states.shape[0]:
            # one window was enough for each prompt; the member it came from keeps it
            self.layers[layer_idx] = layer = copy(layer)
            layer.batch_select_indices(torch.arange(windows).repeat(key_states.shape[0] // windows))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _check_together(members: Sequence[KVCache]) -> None:
    if not members:
        raise ValueError("a group needs at least one member")
    seen = sorted({member.managed[0].get_seq_length() for member in members})
    if len(seen) > 1:
        raise ValueError(f"the members of a group must have read the same prompt; these have seen {seen} tokens")


def sequences_of(member: KVCache) -> int:
    """How many sequences a cache holds, 0 while it is fresh."""
    lengths = member.managed[0].lengths
    return 0 if lengths is None else len(lengths)


def _num_windows(layer: DynamicSlidingWindowLayer) -> int:
    return layer.keys.shape[0] if layer.keys is not None else 0


def _window(layer: DynamicSlidingWindowLayer, members: Sequence[int], each: int) -> DynamicSlidingWindowLayer:
    """A copy of a sliding-window layer for some members; they still share what it holds of the prompts alone."""
    window = copy(layer)
    if _num_windows(layer) > each:
        rows = torch.tensor(members)[:, None] * each + torch.arange(each)
        window.batch_select_indices(rows.flatten())
    return window


class _GroupLayer(StandIn):
    def __init__(self, layers: list[KVLayer], plan: Plan):
        super().__init__(layers[0])
        self.layers, self.plan = layers, plan

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.plan.attached:
            raise RuntimeError("a CacheGroup needs kvkeep.attach(model)")
        return super().update(key_states, value_states)

    @property
    def apart(self) -> bool:
        """Whether several layers hold what is left of a longer text."""
        evicted = (layer.slots is not None and layer.slots.kept < layer.seen for layer in self.layers)
        return len(self.layers) > 1 and any(evicted)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        slots = self.layers[0].slots
        each = keys.shape[0] if slots is None else slots.batch_size
        if keys.shape[0] == each:
            return self._attend_shared(queries, keys, values, valid, scale)
        masks = [None] * len(self.layers) if valid is None else valid.split(each)
        rows = zip(self.layers, queries.split(each), keys.split(each), values.split(each), masks, strict=True)
        return torch.cat([_attend_alone(*row, scale) for row in rows])

    def _attend_shared(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float
    ) -> Tensor:
        first, *others = self.layers
        if self.apart:
            raise ValueError(
                f"the {len(self.layers)} members of this group hold different tokens by now: give rows to each, "
                "input_ids.repeat(len(group.members), 1)"
            )
        seen = first.take(queries, keys, values, valid, scale)
        output = first.read(queries, seen, scale)
        show = _ShowOnce()
        for layer in others:
            theirs = layer.take(queries, keys, values, valid, scale)
            # the same prompt gives the same attention: it is worked out once for all
            layer.settle(replace(theirs, attention=seen.attention), show)
        first.settle(seen, show)
        return output


class _ShowOnce:
    """Shows a prompt to one of several equal policies; the others know what that one found, whatever their budgets."""

    def __init__(self) -> None:
        self._found: dict[tuple[Policy, bool], dict[str, Tensor]] = {}

    def __call__(self, policy: Policy, seen: Observation) -> None:
        found = self._found.get((policy, seen.held))
        if found is None:
            policy.track(seen)
            # eviction makes new arrays and leaves these as they are
            self._found[policy, seen.held] = seen.slots.notes
        else:
            seen.slots.copy_notes(found)


def _attend_alone(
    layer: KVLayer, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float
) -> Tensor:
    """What `KVLayer.attend` does, by the fast kernels even where nothing was evicted yet.

    A batch has other last bits than a batch of one, so the stock cache's slower call would gain nothing here.
    """
    seen = layer.take(queries, keys, values, valid, scale)
    output = layer.read(queries, seen, scale, stock=False)
    layer.settle(seen)
    return output
