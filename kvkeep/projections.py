"""The output projections of a model's attention layers, where what a head reads goes straight into them."""

import warnings
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from .fingerprint import head_size, num_kv_heads
from .policies import Projection

_OUTPUT = ("o_proj", "out_proj", "dense")
# whatever else an attention module has may stand between its heads and the projection, as a gate or a norm does
_BEFORE_ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "W_pack"),
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm"),
    *("rotary_emb", "rotary_fn", "attention_dropout"),
}


def projections(model: Any, layers: Collection[int]) -> dict[int, Projection]:
    """By layer; layers that are missing here have something else before their projection, which one warning tells.

    Raises:
        ValueError: for a configuration in place of a model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            "this policy needs the model's output projections: pass the model itself to KVCache, not its config"
        )
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore
    heads, group = num_kv_heads(config), config.num_attention_heads // num_kv_heads(config)
    found = {}
    for module in model.modules():
        weight = _straight_weight(module, config.num_attention_heads, head_size(config))
        index: Any = getattr(module, "layer_idx", None)
        if weight is not None and index in layers:
            found[index] = Projection(weight, heads, group)
    missing = sorted(set(layers) - set(found))
    if missing:
        warnings.warn(
            f"what the heads of {type(model).__name__} read passes through more than an output projection in layers "
            f"{missing}, so losses are measured before the projection there (objective 'unprojected')",
            stacklevel=3,
        )
    return found


def _straight_weight(module: Any, num_heads: int, size: int) -> Tensor | None:
    """The weight of the output projection of an attention module that feeds it from its heads alone."""
    children = dict(module.named_children())
    names = [name for name in _OUTPUT if name in children]
    if not names or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    queries = getattr(children.get("q_proj"), "out_features", num_heads * size)
    weight = getattr(children[names[0]], "weight", None)
    fits = isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape[1:] == (num_heads * size,)
    # a query projection of twice the size carries a gate
    straight = children.keys() - {names[0]} <= _BEFORE_ATTENTION and queries == num_heads * size
    return weight if fits and straight else None
