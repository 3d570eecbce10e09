"""C that the machine's compiler builds when it is first used, and that is done without where there is none."""

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

# types of keys and values that the functions know, by their own numbers
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

logger = logging.getLogger(__name__)

_COMPILE = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-std=gnu11", "-c")


def function(source: Path, name: str, *arguments: type, result: Any = None) -> Callable[..., Any] | None:
    """One function of a file, with the types of what it takes and gives; None where there is no library."""
    built = library(source)
    if built is None:
        return None
    found = getattr(built, name)
    found.argtypes, found.restype = list(arguments), result
    return found


def library(source: Path) -> ctypes.CDLL | None:
    """The functions of one file, built once a process.

    None without a compiler, or with KVKEEP_KERNEL=0 in the environment.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("KVKEEP_KERNEL") == "0":
        return None
    return _built(source, compiler)


@cache
def _built(source: Path, compiler: str) -> ctypes.CDLL | None:
    # a loaded library outlives its file
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
        unit, built = Path(folder) / "unit.o", Path(folder) / "unit.so"
        # linked without -ffast-math, which would flush the whole process's small numbers to zero
        for step in ((*_COMPILE, source, "-o", unit), ("-shared", unit, "-lm", "-o", built)):
            done = subprocess.run([compiler, *map(str, step)], capture_output=True, text=True)
            if done.returncode:
                logger.warning("torch does what %s would do faster; %s said: %s", source.name, compiler, done.stderr)
                return None
        return ctypes.CDLL(str(built))
