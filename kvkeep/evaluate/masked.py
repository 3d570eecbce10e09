"""A whole text in few forwards, under the mask that an evicting cache would have been.

B sequences, H KV heads, G query heads per KV head, T new tokens, N tokens so far, D head size.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import KVCache
from ..layer import KVLayer, StandIn
from ..policies import Policy


class MaskedCache(Cache):
    """A cache that keeps everything and shows each token only what `like` would still hold by then.

    The prompt sees all of itself, as in a cache that evicts once it is read. Behind it any number of tokens may be
    read at once, with the result of reading them one by one through `like`.

    Args:
        like: a fresh cache whose policy tells beforehand what it keeps (`Policy.visible`), or without a limit.
        num_prompt: tokens of the prompt.

    Raises:
        ValueError: for a policy that cannot tell, a budget in bytes, and sliding-window layers.
    """

    def __init__(self, model: PreTrainedModel, like: KVCache, num_prompt: int):
        refuse_unmasked(like)
        whole = KVCache(model)
        layers = [
            _MaskedLayer(ours, theirs, num_prompt) for ours, theirs in zip(whole.managed, like.managed, strict=True)
        ]
        super().__init__(layers=layers)  # type: ignore[arg-type]


def refuse_unmasked(like: KVCache) -> None:
    """ValueError for a cache that no mask is known for."""
    name = type(like.policy).__name__
    if len(like.managed) < len(like.layers):
        raise ValueError("a model with sliding-window layers has no masked form; read it token by token")
    if like.budget.unlimited:
        return
    if type(like.policy).visible is Policy.visible:
        raise ValueError(f"policy {name} cannot tell beforehand what it keeps; read the text token by token")
    if like.budget.bytes is not None:
        raise ValueError(f"a budget in bytes ({like.budget}) has no masked form; give tokens or a share")


class _MaskedLayer(StandIn):
    layer: KVLayer

    def __init__(self, whole: KVLayer, like: KVLayer, num_prompt: int):
        super().__init__(whole)
        self.like, self.num_prompt = like, num_prompt

    def attend(
        self,
        queries: Float[Tensor, "B HG T D"],
        keys: Float[Tensor, "B H T D"],
        values: Float[Tensor, "B H T Dv"],
        valid: Tensor | None,
        scale: float,
    ) -> Float[Tensor, "B HG T Dv"]:
        start, plan = self.layer.seen, self.like.plan
        seen = self.layer.take(queries, keys, values, valid, scale)
        if plan.budget.unlimited or start < self.num_prompt:
            return self.layer.read(queries, seen, scale, stock=False)
        before = torch.arange(start, self.layer.seen)
        limits = plan.budget.slots(before, plan.num_layers)[self.like.order]
        visible = plan.policy.visible(seen, limits, plan.budget)
        assert visible is not None
        mask = visible.repeat_interleave(plan.group, 1)
        return scaled_dot_product_attention(
            queries, seen.slots.keys, seen.slots.values, mask, scale=scale, enable_gqa=plan.group > 1
        )
