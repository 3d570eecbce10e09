"""What vLLM's memory manager knows of pages: their size, and that each request has one in every layer."""

from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from .pages import PageShape


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):
    """One block a request and layer, for its whole life: vLLM's ring buffers are held in the same way."""

    @classmethod
    def of(cls, shape: PageShape, spec: AttentionSpec) -> "PageSpec":
        """The spec of pages of this shape, in place of `spec`."""
        return cls(
            block_size=shape.capacity,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            state_content_bytes=shape.slot_bytes,
        )

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        # the older runner maps every position to a slot, though nobody reads it
        return cdiv(max_len, self.block_size)


def register_spec() -> None:
    """Let vLLM know the spec; more than once is harmless."""
    # its own specs first, which else would be missing in workers
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PageSpec, CircularBufferManager, uniform_type_base_spec=CircularBufferSpec)
