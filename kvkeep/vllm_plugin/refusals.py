"""What pages cannot serve, each refused in one sentence before a model is loaded."""

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from ..fingerprint import fingerprint
from ..frequencies import rotation_frequencies
from .settings import Settings

# a name that vLLM's logging lets through
logger = init_logger("vllm.kvkeep")

_FULL, _TYPES = "full_attention", "layer_types"


def refuse_unsupported(config: VllmConfig, settings: Settings) -> None:
    """ValueError for a model or an engine argument that pages cannot serve."""
    if config.speculative_config is not None:
        raise ValueError("kvkeep: speculative decoding takes tokens back, which pages cannot; leave it off")
    text = config.model_config.hf_text_config
    kinds = set(getattr(text, _TYPES, None) or [_FULL])
    if kinds != {_FULL}:
        raise ValueError(f"kvkeep: {text.model_type} has layers of other kinds than full attention: {sorted(kinds)}")
    if config.cache_config.enable_prefix_caching:
        logger.warning_once("kvkeep: prefix caching is off, for no two requests keep the same tokens")
    try:
        settings.policy.check(fingerprint(text), list(range(text.num_hidden_layers)))
        if settings.policy.tiers is not None:
            rotation_frequencies(fingerprint(text))
    except ValueError as error:
        raise ValueError(f"kvkeep: {error}") from error


def refuse_layer(
    alibi_slopes: Any = None,
    sliding_window: int | None = None,
    kv_cache_dtype: str = "auto",
    logits_soft_cap: float | None = None,
    attn_type: str = "decoder",
    kv_sharing_target_layer_name: str | None = None,
    sinks: Any = None,
    **others: Any,
) -> None:
    """ValueError for attention that is not plain softmax over all earlier tokens."""
    found = {
        "ALiBi": alibi_slopes is not None,
        "a sliding window": sliding_window is not None,
        f"a KV cache of {kv_cache_dtype}": kv_cache_dtype != "auto",
        "a cap on logits": bool(logits_soft_cap),
        f"{attn_type} attention": attn_type != "decoder",
        "keys and values of another layer": kv_sharing_target_layer_name is not None,
        "attention sinks of its own": sinks is not None,
        **{name: value is not None for name, value in others.items()},
    }
    wrong = [name for name, is_there in found.items() if is_there]
    if wrong:
        raise ValueError(f"kvkeep: a layer of this model has {wrong[0]}, which pages cannot serve; unset KVKEEP_POLICY")
