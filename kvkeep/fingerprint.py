"""What must agree between two models for the cached keys and values of one to mean the same in the other."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# scaled rotations that turn a key by the same angle in every text
_STEADY = ("linear", "llama3", "yarn")


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


def rotation_frequencies(fingerprint: Mapping[str, Any]) -> list[float]:
    """Radians by which the model's rotation turns each pair of dimensions of a key a position, halves paired.

    Raises:
        ValueError: for a rotation that changes with the length of the text, or from layer to layer.
    """
    rotation, size = fingerprint.get("rotation", {}), fingerprint["head size"]
    kind = rotation.get("rope_type", "default")
    if "rope_theta" not in rotation or kind not in ("default", *_STEADY):
        raise ValueError(
            f"how this model turns its keys is not known here ({rotation}); read them as they are cached "
            "(turn_back=False, --no-turn-back)"
        )
    if kind == "default":
        turned = int(size * rotation.get("partial_rotary_factor", 1.0))
        return [rotation["rope_theta"] ** (-place / turned) for place in range(0, turned, 2)]
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=size, rope_parameters=dict(rotation))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].tolist()
