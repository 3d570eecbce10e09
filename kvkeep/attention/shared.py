"""Attention of continuations that share the slots of the sequence they continue.

B sequences, M continuations of each, H KV heads, G query heads per KV head, N slots, U tokens of a continuation so far,
D head size.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attend_shared(
    queries: Float[Tensor, "BM HG 1 D"],
    own_keys: Float[Tensor, "BM H U D"],
    own_values: Float[Tensor, "BM H U Dv"],
    keys: Float[Tensor, "B H N D"],
    values: Float[Tensor, "B H N Dv"],
    hidden: Bool[Tensor, "B H N"] | None,
    scale: float,
) -> Float[Tensor, "BM HG 1 Dv"]:
    """Attention of each continuation's newest token over its sequence's slots and its own tokens.

    The slots are read once for all continuations and never copied; the two softmaxes are merged exactly.

    Args:
        hidden: slots that nobody may see; None when there are none.
    """
    (BM, HG, _, D), (B, H) = queries.shape, keys.shape[:2]
    group = HG // H
    packed = queries.view(B, BM // B, H, group, D).transpose(1, 2).reshape(B, H, -1, D)
    far, far_sum = _part(packed, keys, values, hidden, scale)
    near, near_sum = _part(queries.view(BM, H, group, D), own_keys, own_values, None, scale)

    def apart(rows: Tensor) -> Tensor:
        return rows.view(B, H, BM // B, group, -1).transpose(1, 2).reshape(BM, H, group, -1)

    share = torch.sigmoid(near_sum - apart(far_sum))
    return torch.lerp(apart(far), near, share).reshape(BM, HG, 1, -1).to(queries.dtype)


def _part(
    queries: Float[Tensor, "R H X D"], keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Float[Tensor, "R H X Dv"], Float[Tensor, "R H X 1"]]:
    """Attention over one part of the tokens, and the log of its softmax's denominator."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    logits = (queries.to(dtype) * scale) @ keys.to(dtype).mT
    if hidden is not None:
        logits.masked_fill_(hidden[:, :, None], -torch.inf)
    return logits.softmax(-1) @ values.to(dtype), logits.logsumexp(-1, keepdim=True)
