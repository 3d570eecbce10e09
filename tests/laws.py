"""The dense twin of an evicting cache: the stock model under a mask that hides, per head, what was evicted.

`DenseTwin` runs the model over all tokens again with eager attention and, for every query, shows each KV head exactly
the tokens the evicting cache held when that query was read.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from kvkeep.layer import KVLayer


class Witness:
    """Writes down, for every query of every layer, which positions each head could see."""

    def __init__(self) -> None:
        self.visible: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def watching(self) -> Iterator["Witness"]:
        read = KVLayer.read

        def watched(layer: KVLayer, queries, seen, scale):  # noqa: ANN001, ANN202
            held = (seen.slots.positions.clone(), seen.query_positions.clone())
            self.visible.setdefault(layer.index, []).append(held)
            return read(layer, queries, seen, scale)

        KVLayer.read = watched
        try:
            yield self
        finally:
            KVLayer.read = read

    def mask(self, layer: int, total: int) -> Tensor:
        """`[B, H, S, S]`: may the query at each position see each position?"""
        B, H, _ = self.visible[layer][0][0].shape
        mask = torch.zeros(B, H, total, total, dtype=torch.bool)
        for positions, queries in self.visible[layer]:
            held = torch.zeros(B, H, total + 1, dtype=torch.bool)
            held.scatter_(2, torch.where(positions < 0, total, positions).long(), True)
            for column in range(queries.shape[1]):
                at = queries[:, column]
                for row in range(B):
                    if at[row] >= 0:
                        causal = torch.arange(total) <= at[row]
                        mask[row, :, at[row]] = held[row, :, :total] & causal
        return mask


def dense_logits(model: PreTrainedModel, input_ids: Tensor, witness: Witness) -> Tensor:
    """Logits of the whole sequence from full attention maps under the witnessed masks (no padding)."""
    total = input_ids.shape[1]

    def masked(module, query, key, value, attention_mask, scaling=None, **kwargs):  # noqa: ANN001, ANN003, ANN202
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mask = witness.mask(module.layer_idx, total).repeat_interleave(group, 1)
        logits = (query.float() @ key.float().transpose(-1, -2)) * scaling
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ value.float()).to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dense_twin", masked)
    before = model.config._attn_implementation
    model.set_attn_implementation("dense_twin")
    try:
        with torch.no_grad():
            return model(input_ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
