"""What all tests share: checked shapes, one thread, no network, and models to run on."""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from zlib import crc32

# Only the folder of fetched models is read; before transformers is imported, which reads this once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jaxtyping
import pytest
import torch

# Before kvkeep is imported: from here on each call of its functions checks types and shapes, where that is asked for.
jaxtyping.install_import_hook("kvkeep", "beartype.beartype")
# JAXTYPING_DISABLE=1 leaves the checks out
CHECKED = not jaxtyping.config.jaxtyping_disable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvkeep.models import Loaded

# those inside vLLM run in an environment of their own: make test-vllm
collect_ignore_glob = [] if find_spec("vllm") else ["served/*"]

# Two busy cores: with more threads timings explode, and sums change their order.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Checks double a test's time, and its variants make much the same calls: one variant in four checks shapes."""
    variant = hasattr(item, "callspec") and crc32(item.nodeid.encode()) % 4 > 0
    jaxtyping.config.update("jaxtyping_disable", not CHECKED or variant)


SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # ten times the usual: attention differs from token to token, as in a trained model
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# name -> the config class in transformers, and what differs from SHAPE
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "phi3": ("Phi3Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            # tied, it only repeats its last token
            "tie_word_embeddings": False,
        },
    ),
}


def build_tiny(name: str, **changes: Any) -> "PreTrainedModel":
    """A random fp32 model of the family `name` (a key of TINY), the same one in every run."""
    import transformers

    kind, differs = TINY[name]
    config = getattr(transformers, kind)(**{**SHAPE, **differs, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        # biases start at zero, which would hide a lost one
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def tiny() -> Callable[..., "PreTrainedModel"]:
    """`tiny("llama")`, `tiny("gemma3", sliding_window=8)`: one model for equal arguments; leave it as it was."""
    return cache(build_tiny)


@pytest.fixture(scope="session")
def embedded() -> "Loaded":
    """The embedded model and its tokenizer, in bf16 as stored, or in fp32 where bf16 would take far longer."""
    from kvkeep.models import load

    return load("smollm2", dtype="fast")


@pytest.fixture(scope="session")
def embedded_fp32() -> "Loaded":
    """The embedded model and its tokenizer, in fp32."""
    from kvkeep.models import load

    return load("smollm2", dtype=torch.float32)
