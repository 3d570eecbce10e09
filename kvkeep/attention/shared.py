"""Attention of continuations that share the slots of the sequence they continue.

B sequences, M continuations of each, H KV heads, G query heads per KV head, N slots, U tokens of a continuation so far,
D head size.
"""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from .parts import Part, attend_part, merged


def attend_shared(
    queries: Float[Tensor, "BM HG 1 D"],
    own_keys: Float[Tensor, "BM H U D"],
    own_values: Float[Tensor, "BM H U Dv"],
    keys: Float[Tensor, "B H N D"],
    values: Float[Tensor, "B H N Dv"],
    hidden: Bool[Tensor, "B H N"] | None,
    scale: float,
    beyond: Callable[[Float[Tensor, "B H X D"]], Part] | None = None,
) -> Float[Tensor, "BM HG 1 Dv"]:
    """Attention of each continuation's newest token over its sequence's slots and its own tokens.

    The slots are read once for all continuations and never copied; the two softmaxes are merged exactly.

    Args:
        hidden: slots that nobody may see; None when there are none.
        beyond: attention over what the sequences hold beside their slots, if anything.
    """
    (BM, HG, _, D), (B, H) = queries.shape, keys.shape[:2]
    group = HG // H
    packed = queries.view(B, BM // B, H, group, D).transpose(1, 2).reshape(B, H, -1, D)
    far = attend_part(packed, keys, values, None if hidden is None else hidden[:, :, None], scale)
    if beyond is not None:
        far = merged(far, beyond(packed))
    near = attend_part(queries.view(BM, H, group, D), own_keys, own_values, None, scale)

    def apart(rows: Tensor) -> Tensor:
        return rows.view(B, H, BM // B, group, -1).transpose(1, 2).reshape(BM, H, group, -1)

    whole = merged(Part(apart(far.output), apart(far.logsum)), near)
    return whole.output.reshape(BM, HG, 1, -1).to(queries.dtype)
