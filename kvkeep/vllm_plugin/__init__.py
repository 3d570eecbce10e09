"""The same policies inside vLLM: `KVKEEP_POLICY=kvp KVKEEP_BUDGET=1024 vllm serve MODEL`; see docs/serving.md."""

from .settings import Settings


def register() -> None:
    """vLLM's entry point: nothing where `KVKEEP_POLICY` is not set."""
    settings = Settings.read()
    if settings is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .spec import register_spec

    register_spec()
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.backend.Backend")
