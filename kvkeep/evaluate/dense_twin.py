"""The dense twin of an evicting cache: the model without a cache, under a mask that hides what was evicted.

Tokens that were held as codes have from then on the keys and values that the codes stand for.

B sequences, H KV heads, G query heads per KV head, N slots, S tokens, T queries, D head size.

Full attention maps are built here, on purpose: this is what the cache is checked against, on any model whose attention
goes through transformers' AttentionInterface.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from ..attention import CodedAttention, CodedTokens
from ..policies import Observation, Policy
from ..slots import EMPTY


class Moment(NamedTuple):
    """What one forward could see in one layer: slot positions, and tokens held as codes."""

    positions: Int[Tensor, "B H N"]
    query_positions: Int[Tensor, "B T"]
    coded: CodedTokens | None


# for every layer, in order of time
Log = dict[int, list[Moment]]


def witnessed(policy: Policy) -> tuple[Policy, Log]:
    """The same policy, and a log of what each forward could see in each layer and head."""
    log: Log = {}

    def track(self: Policy, seen: Observation) -> None:
        if not seen.ahead:
            assert seen.query_positions is not None
            coded = seen.coded.tokens() if isinstance(seen.coded, CodedAttention) else None
            moment = Moment(seen.slots.positions.clone(), seen.query_positions.clone(), coded)
            log.setdefault(seen.layer, []).append(moment)
        kind.track(self, seen)

    kind = type(policy)
    witness = type(kind.__name__, (kind,), {"track": track})
    return witness(**{field.name: getattr(policy, field.name) for field in fields(policy)}), log


def visible(moment: Moment, total: int) -> Bool[Tensor, "B H S"]:
    """Which tokens are held."""
    held = torch.zeros(*moment.positions.shape[:2], total + 1, dtype=torch.bool)
    held.scatter_(2, _or_behind(moment.positions, total), True)
    if moment.coded is not None:
        positions = moment.coded.positions.masked_fill(~moment.coded.read, EMPTY)
        held.scatter_(2, _or_behind(positions, total), True)
    return held[..., :total]


def dense_logits(model: PreTrainedModel, input_ids: Int[Tensor, "B S"], log: Log) -> Float[Tensor, "B S V"]:
    """Logits of every token from full attention maps in which each head sees what the log says it could see."""
    total = input_ids.shape[1]
    order = torch.arange(total)

    def masked(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = key.float(), value.float()
        output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=torch.float32)
        for moment in log[module.layer_idx]:
            if moment.coded is not None:
                key = _replaced(key, moment.coded.positions, moment.coded.keys)
                value = _replaced(value, moment.coded.positions, moment.coded.values)
            held = visible(moment, total).repeat_interleave(group, 1)
            for row, positions in enumerate(moment.query_positions):
                at = positions[positions >= 0].long()
                logits = query[row][:, at].float() @ key[row].repeat_interleave(group, 0).mT * scaling
                hidden = ~(held[row][:, None] & (order <= at[:, None]))
                weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
                output[row][:, at] = weights @ value[row].repeat_interleave(group, 0)
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("kvkeep_dense_twin", masked)
    before = model.config._attn_implementation
    model.set_attn_implementation("kvkeep_dense_twin")
    try:
        with torch.no_grad():
            return model(input_ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)


def _or_behind(positions: Int[Tensor, "B H N"], total: int) -> Int[Tensor, "B H N"]:
    """Positions as an index, where what is empty points behind the last token."""
    return torch.where(positions < 0, total, positions).long()


def _replaced(
    array: Float[Tensor, "B H S D"], positions: Int[Tensor, "B H N"], new: Float[Tensor, "B H N D"]
) -> Float[Tensor, "B H S D"]:
    """`array` with other numbers at some positions of each head."""
    index = _or_behind(positions, array.shape[2])[..., None].expand_as(new)
    return torch.cat([array, array[:, :, :1]], 2).scatter(2, index, new)[:, :, :-1]
