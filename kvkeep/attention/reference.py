"""The slow twin: full attention maps in fp32, one formula a line. Tests compare everything else with it.

B sequences, H KV heads, G query heads per KV head, N slots, T queries, D head size.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def attention_map(
    queries: Float[Tensor, "B H G T D"],
    keys: Float[Tensor, "B H N D"],
    positions: Int[Tensor, "B H N"],
    query_positions: Int[Tensor, "B T"],
    scale: float,
) -> Float[Tensor, "B H G T N"]:
    """Softmax probabilities of each query over the slots it may see; a padding query sees nothing."""
    logits = torch.einsum("bhgtd,bhnd->bhgtn", queries.float(), keys.float()) * scale
    seen = positions[:, :, None, None, :] <= query_positions[:, None, None, :, None]
    visible = seen & (positions >= 0)[:, :, None, None, :]
    return torch.nan_to_num(logits.masked_fill(~visible, -torch.inf).softmax(-1))


def attend(
    queries: Float[Tensor, "B H G T D"],
    keys: Float[Tensor, "B H N D"],
    values: Float[Tensor, "B H N Dv"],
    positions: Int[Tensor, "B H N"],
    query_positions: Int[Tensor, "B T"],
    scale: float,
) -> Float[Tensor, "B H G T Dv"]:
    """Attention output in fp32."""
    return attention_map(queries, keys, positions, query_positions, scale) @ values.float()[:, :, None]


def attention_mass(
    queries: Float[Tensor, "B H G T D"],
    keys: Float[Tensor, "B H N D"],
    positions: Int[Tensor, "B H N"],
    query_positions: Int[Tensor, "B T"],
    scale: float,
    last: int | None = None,
) -> Float[Tensor, "B H N"]:
    """Attention each slot receives from the last `last` tokens of each sequence: mean over G, sum over queries."""
    weights = attention_map(queries, keys, positions, query_positions, scale).mean(2)
    if last is not None:
        newest = query_positions.amax(-1, keepdim=True)
        recent = query_positions > newest - last
        weights = weights * recent[:, None, :, None]
    return weights.sum(2)


def future_importance(
    queries: Float[Tensor, "B H G T D"],
    keys: Float[Tensor, "B H S D"],
    query_positions: Int[Tensor, "B T"],
    scale: float,
    delay: int = 0,
    horizon: int | None = None,
) -> tuple[Float[Tensor, "B H S"], Float[Tensor, "B H G S"], Float[Tensor, "B H S"]]:
    """Attention each key gets from queries at least `delay` and less than `horizon` behind it, summed over queries.

    The first takes the largest of a group's query heads for each query, the second is that of each of them, the third
    the largest squared.
    """
    B, H, S, _ = keys.shape
    positions = torch.arange(S)
    weights = attention_map(queries, keys, positions.expand(B, H, S), query_positions, scale)
    behind = query_positions[:, None, None, :, None] - positions
    counted = weights * (behind >= delay) * (behind < (S if horizon is None else horizon))
    return counted.amax(2).sum(2), counted.sum(3), counted.amax(2).square().sum(2)
