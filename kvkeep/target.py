"""The target of a score that is given late: what later queries pay to a token, on average, beyond a delay.

H KV heads, G query heads per KV head, n tokens. Source: KVpop, arXiv 2607.05061.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .attention import flex
from .future import future_importance
from .trace import AGGREGATIONS

# less attention than this on average is as good as none (the paper does not say its own)
EPSILON = 1e-6


def mean_later(
    queries: Float[Tensor, "B HG n D"], keys: Float[Tensor, "B H n D"], scale: float, delay: int
) -> Float[Tensor, "B H G n"]:
    """Mean softmax probability that each key gets from the queries at least `delay` behind it, for each query head.

    Queries and keys are those of a whole sequence from its first token on, after rotation. The last `delay` keys have
    no such query and get 0. On a GPU FlexAttention works it out, elsewhere tiles of queries.
    """
    if keys.is_cuda:
        sums = flex.log_sums(queries, keys, scale)
        summed = flex.log_importance(queries, keys, scale, sums, delay=delay).float().exp()
    else:
        summed = future_importance(queries, keys, 0, scale, delay=delay).heads
    return summed / num_later(keys.shape[2], delay, keys.device)


def target(later: Float[Tensor, "*H G n"], group: str = "max", epsilon: float = EPSILON) -> Float[Tensor, "*H n"]:
    """Log of the mean later attention, of a group's query heads the largest or the mean.

    Raises:
        ValueError: for another name.
    """
    if group not in AGGREGATIONS:
        raise ValueError(f"group is {' or '.join(AGGREGATIONS)} of the query heads, got {group!r}")
    worth = (later + epsilon).log()
    return worth.amax(-2) if group == "max" else worth.mean(-2)


def num_later(num_tokens: int, delay: int, device: torch.device) -> Float[Tensor, " n"]:
    """Queries that count for each token, at least 1."""
    return (num_tokens - delay - torch.arange(num_tokens, device=device)).clamp(min=1).float()
