"""Attention over a part of the tokens, with what it takes to merge it exactly with attention over the others.

B sequences, H KV heads, N slots, X queries of a KV head, D head size.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Part(NamedTuple):
    """Attention over one part of the tokens, and the log of its softmax's denominator."""

    output: Float[Tensor, "B H X Dv"]
    logsum: Float[Tensor, "B H X 1"]


def attend_part(
    queries: Float[Tensor, "B H X D"],
    keys: Float[Tensor, "B H N D"],
    values: Float[Tensor, "B H N Dv"],
    hidden: Bool[Tensor, "B H #X N"] | None,
    scale: float,
) -> Part:
    """Attention in fp32 (or in the queries' fp64) over the slots that are not hidden."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    # an autocast around the model must not round parts that are merged
    with torch.autocast(queries.device.type, enabled=False):
        logits = hide((queries.to(dtype) * scale) @ keys.to(dtype).mT, hidden)
        return part_of(logits, values.to(dtype))


def part_of(logits: Float[Tensor, "B H X N"], values: Float[Tensor, "B H N Dv"]) -> Part:
    """Attention with these logits."""
    return Part(logits.softmax(-1) @ values, logits.logsumexp(-1, keepdim=True))


def hide(logits: Tensor, hidden: Bool[Tensor, "..."] | None) -> Tensor:
    """Logits of what may not be seen, so small that they count for nothing; changed in place."""
    # finite, so that a part in which all is hidden has a softmax too, and loses against any other part
    return logits if hidden is None else logits.masked_fill_(hidden, torch.finfo(logits.dtype).min / 2)


def merged(one: Part, other: Part) -> Part:
    """Attention over both parts."""
    share = torch.sigmoid(other.logsum - one.logsum)
    return Part(torch.lerp(one.output, other.output, share), torch.logaddexp(one.logsum, other.logsum))
