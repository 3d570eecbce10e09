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
