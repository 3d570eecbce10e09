"""The attention backend that vLLM gets in place of its own for the CPU."""

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec

from ..fingerprint import fingerprint
from ..frequencies import rotation_frequencies
from ..layer import Plan
from ..policies import Policy
from ..rotation import rotary_of
from .layers import ServedLayer
from .pages import Pages
from .refusals import refuse_layer, refuse_unsupported
from .settings import Settings
from .spec import PageSpec
from .steps import Step, Steps


class Backend(AttentionBackend):
    """Attention over pages, one for each request and layer, each KV head with tokens of its own."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = CPUAttentionBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return CPUAttentionBackend.get_name()

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return CPUAttentionBackend.get_supported_head_sizes()

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return CPUAttentionBackend.supported_kv_cache_layouts()

    @staticmethod
    def get_impl_cls() -> type["Implementation"]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> PageSpec:
        """The page of a request in place of blocks of tokens."""
        page = _settings().page(heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.dtype)
        return PageSpec.of(page, spec)


class Builder(AttentionMetadataBuilder[Step]):
    """Says of each forward which requests are prompts and which decode."""

    def __init__(self, kv_cache_spec: PageSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        heads = kv_cache_spec.num_kv_heads
        group = model.get_num_attention_heads(parallel) // heads
        settings = _settings()
        shape = settings.page(heads=heads, head_size=kv_cache_spec.head_size, dtype=model.dtype)
        self._steps = Steps(settings.policy, settings.budget, shape, group)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """One forward; see `AttentionMetadataBuilder.build`."""
        common = common_attn_metadata
        return self._steps.step(common.query_start_loc, common.seq_lens, common.block_table_tensor[:, 0].long())


class Implementation(AttentionImpl):
    """One layer's attention."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **kwargs: Any):
        refuse_layer(*args, **kwargs)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self._config, self._settings = get_current_vllm_config(), _settings()
        refuse_unsupported(self._config, self._settings)
        worker = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._policy = _shard(self._settings.policy, *worker)
        self._served: ServedLayer | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend and evict; see `AttentionImpl.forward`."""
        if attn_metadata is None:
            # vLLM measures memory, with nothing in it
            return output
        # vLLM may hand out other memory once it has measured what there is
        if self._served is None or self._served.pages.memory.data_ptr() != kv_cache.data_ptr():
            self._served = self._layer(layer.layer_name, kv_cache)
        self._served.attend(query, key, value, self.scale, attn_metadata, output)
        return output

    def _layer(self, name: str, memory: Tensor) -> ServedLayer:
        model, settings = self._config.model_config, self._settings
        shape = settings.page(heads=self.num_kv_heads, head_size=self.head_size, dtype=model.dtype)
        text = model.hf_text_config
        rotary = None if self._policy.tiers is None else rotary_of(rotation_frequencies(fingerprint(text)))
        plan = Plan(text, self._policy, settings.budget, text.num_hidden_layers, rotary)
        return ServedLayer(plan, extract_layer_index(name), Pages(memory, shape))


# one for all layers
@lru_cache(maxsize=1)
def _shard(policy: Policy, index: int, count: int) -> Policy:
    try:
        return policy.shard(index, count) if count > 1 else policy
    except ValueError as error:
        raise ValueError(f"kvkeep: {error}") from error


def _settings() -> Settings:
    settings = Settings.read()
    assert settings is not None, "the backend is registered where a policy is set"
    return settings
