"""The frequencies of a rotation are those of the model's own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvkeep.cache import _rotary
from kvkeep.fingerprint import fingerprint
from kvkeep.frequencies import rotation_frequencies

SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_frequencies_are_those_of_the_models_own_rotation(tiny, family):
    model = tiny(family)
    cos, sin = _rotary(model)(torch.tensor([[1]]))
    expected = torch.atan2(sin, cos)[0, 0, :8]
    torch.testing.assert_close(rotation_frequencies(fingerprint(model.config)), expected)


def test_of_several_rotations_that_of_full_attention_counts(tiny):
    model = tiny("gemma3")
    expected = dict(model.named_buffers())["model.rotary_emb.full_attention_inv_freq"]
    found = rotation_frequencies(fingerprint(model.config))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, dict(model.named_buffers())["model.rotary_emb.sliding_attention_inv_freq"])


@pytest.mark.parametrize("kind", SCALED)
def test_so_are_those_of_scaled_rotations(kind):
    rotation = {"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, max_position_embeddings=256, rope_parameters=rotation)
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rotation_frequencies(fingerprint(config)), expected)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    config.rope_parameters = plain
    assert not torch.allclose(rotation_frequencies(fingerprint(config)), expected)


@pytest.mark.parametrize(
    "rotation",
    [
        {},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_a_rotation_that_changes_is_refused_with_the_way_out(rotation):
    with pytest.raises(ValueError, match=r"read them as they are cached .*--no-turn-back"):
        rotation_frequencies({"head size": 8, "rotation": rotation})
