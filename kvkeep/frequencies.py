"""By how much a model's rotation turns keys, from its fingerprint alone.

P pairs of dimensions that are turned.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# scaled rotations that turn a key by the same angle in every text
_STEADY = ("linear", "llama3", "yarn")


def rotation_frequencies(fingerprint: Mapping[str, Any]) -> Float[Tensor, " P"]:
    """Radians by which the model's rotation turns each pair of dimensions of a key a position, halves paired.

    Raises:
        ValueError: for a rotation that changes with the length of the text, or is not told.
    """
    rotation, size = fingerprint.get("rotation", {}), fingerprint["head size"]
    # where kinds of layers have rotations of their own, these are the ones that are managed
    rotation = rotation.get("full_attention", rotation)
    kind = rotation.get("rope_type", "default")
    if "rope_theta" not in rotation or kind not in ("default", *_STEADY):
        raise ValueError(
            f"how this model turns its keys is not known here ({rotation}); read them as they are cached "
            "(turn_back=False, --no-turn-back)"
        )
    if kind == "default":
        turned = int(size * rotation.get("partial_rotary_factor", 1.0))
        return torch.tensor([rotation["rope_theta"] ** (-place / turned) for place in range(0, turned, 2)])
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=size, rope_parameters=dict(rotation))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
