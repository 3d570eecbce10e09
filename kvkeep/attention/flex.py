"""Attention of later queries by FlexAttention, whose log-sum-exp over keys is one over queries once they change places.

B sequences, H KV heads, G query heads per KV head, T queries of as many keys, D head size.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@cache
def _compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), create_block_mask


def log_sums(
    queries: Float[Tensor, "B HG T D"], keys: Float[Tensor, "B H T D"], scale: float
) -> Float[Tensor, "B HG T"]:
    """Log-sum-exp of each query over the keys up to its own place."""
    attention, block_mask = _compiled()
    T = keys.shape[2]
    # it counts the arguments of what it is given, which must be bare functions
    mask = block_mask(lambda b, h, query, key: query >= key, None, None, T, T, device=str(keys.device))
    return attention(queries, keys, keys, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True)[1]


def log_importance(
    queries: Float[Tensor, "B HG T D"],
    keys: Float[Tensor, "B H T D"],
    scale: float,
    normaliser: Float[Tensor, "B HG T"],
    *,
    delay: int = 0,
) -> Float[Tensor, "B H G T"]:
    """What `future.log_importance` gives for a whole sequence, without a map, in one compiled kernel.

    The keys take the place of the queries. Compiling fails where FlexAttention has no kernel, which is up to torch.

    Args:
        queries, keys: of a sequence from its first token on, after rotation.
        normaliser: log-sum-exp of each query over what it saw.
    """
    attention, block_mask = _compiled()
    T, group = keys.shape[2], queries.shape[1] // keys.shape[1]
    asked = keys.repeat_interleave(group, dim=1)
    mask = block_mask(lambda b, h, key, query: query >= key + delay, None, None, T, T, device=str(keys.device))
    relative = lambda score, b, h, key, query: score - normaliser[b, h, query]  # noqa: E731
    # what the values say is not read
    _, summed = attention(asked, queries, queries, score_mod=relative, block_mask=mask, scale=scale, return_lse=True)
    return summed.unflatten(1, (-1, group))
