"""What must agree between two models for the cached keys and values of one to mean the same in the other."""

import json
from collections.abc import Mapping
from typing import Any


def fingerprint(config: Any) -> dict[str, Any]:
    """The shape and rotation of the model with this transformers config, as plain JSON."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "type": config.model_type,
        "number of layers": config.num_hidden_layers,
        "number of KV heads": num_kv_heads(config),
        "head size": head_size(config),
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "rotation": json.loads(json.dumps(rope, sort_keys=True, default=str)),
    }


def refuse_other_model(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: object) -> None:
    """Refuse what another model has made.

    Args:
        theirs: fingerprint that was stored with it.
        ours: fingerprint of the model it is wanted for.
        what: how the message names it, such as its file.

    Raises:
        ValueError: naming what differs first, and both sides.
    """
    for name, value in theirs.items():
        if ours.get(name) != value:
            raise ValueError(f"{what} was made with a model whose {name} is {value}; this model's is {ours.get(name)}")


def num_kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
