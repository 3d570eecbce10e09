"""Which numbers a device multiplies quickly."""

import platform

import torch


def multiplies_16_bits(device: torch.device | str | None) -> bool:
    """Whether products of 16-bit numbers are not slower there than those of fp32; None is the CPU.

    Before AVX-512 x86 processors have none: theirs take 5 to 20 times as long as in fp32 (docs/log.md).
    """
    if device is not None and torch.device(device).type != "cpu":
        return True
    x86 = platform.machine() in ("x86_64", "AMD64")
    return not (x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"))
