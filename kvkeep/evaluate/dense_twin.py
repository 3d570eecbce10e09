"""The dense twin of an evicting cache: the model without a cache, under a mask that hides what was evicted.

B sequences, H KV heads, S tokens. Full attention maps are built here, on purpose: this is what the cache is checked
against, on any model whose attention goes through transformers' AttentionInterface.
"""

from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from ..policies import Observation, Policy

# for every layer, in order of time: slot positions [B, H, N] and query positions [B, T] of one forward
Log = dict[int, list[tuple[Tensor, Tensor]]]


def witnessed(policy: Policy) -> tuple[Policy, Log]:
    """The same policy, and a log of what each forward could see in each layer and head."""
    log: Log = {}

    def track(self: Policy, seen: Observation) -> None:
        if not seen.ahead:
            assert seen.query_positions is not None
            log.setdefault(seen.layer, []).append((seen.slots.positions.clone(), seen.query_positions.clone()))
        kind.track(self, seen)

    kind = type(policy)
    witness = type(kind.__name__, (kind,), {"track": track})
    return witness(**{field.name: getattr(policy, field.name) for field in fields(policy)}), log


def visible(log: Log, layer: int, total: int) -> Bool[Tensor, "B H S S"]:
    """May the query at each position see the token at each position?"""
    num_rows, num_heads, _ = log[layer][0][0].shape
    mask = torch.zeros(num_rows, num_heads, total, total, dtype=torch.bool)
    order = torch.arange(total)
    for positions, queries in log[layer]:
        held = torch.zeros(num_rows, num_heads, total + 1, dtype=torch.bool)
        held.scatter_(2, torch.where(positions < 0, total, positions).long(), True)
        for row in range(num_rows):
            at = queries[row][queries[row] >= 0].long()
            mask[row][:, at] = held[row, :, None, :total] & (order <= at[:, None])
    return mask


def dense_logits(model: PreTrainedModel, input_ids: Int[Tensor, "B S"], log: Log) -> Float[Tensor, "B S V"]:
    """Logits of every token from full attention maps in which each head sees what the log says it could see."""
    total = input_ids.shape[1]

    def masked(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1).float(), value.repeat_interleave(group, 1).float()
        hidden = ~visible(log, module.layer_idx, total).repeat_interleave(group, 1)
        weights = ((query.float() @ key.mT) * scaling).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ value).to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("kvkeep_dense_twin", masked)
    before = model.config._attn_implementation
    model.set_attn_implementation("kvkeep_dense_twin")
    try:
        with torch.no_grad():
            return model(input_ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
