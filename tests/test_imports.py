"""Imports run downwards, transformers stays above the policies, and importing anything changes nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "kvkeep"

# from the ground up: a file or folder imports from its own line and from those above it here
LEVELS = [
    {
        "names",
        "arithmetic",
        "rotation",
        "slots",
        "quant",
        "windows",
        "routing",
        "budget",
        "selection",
        "fingerprint",
        "future",
        "pool",
        "losses",
        "metrics",
        "saving",
        "hub",
    },
    {"attention"},
    {"policies"},
    {"cache_report", "padding", "projections", "layer", "tiered_layer", "cache", "group", "branches"},
    {"models", "chat", "lookahead", "model", "trace", "recorder", "train"},
    {"evaluate"},
    {"corpus", "tracing", "report", "demo"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# what is not listed lies between the cache and the evaluation
UNLISTED = LEVEL["model"]
TORCH_ONLY = set().union(*LEVELS[:3])
# files and repositories of weights are met in one place each
WITH_MORE = {"saving": {"safetensors"}, "hub": {"huggingface_hub"}}
WITH_TRANSFORMERS = {
    "layer",
    "cache",
    "group",
    "branches",
    "models",
    "model",
    "recorder",
    "distill",
    "frequencies",
    "evaluate",
    "tracing",
    "demo",
    "cli",
}


class Import(NamedTuple):
    """`line` of `file` brings in `module`, a dotted name."""

    file: Path
    line: int
    module: str

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT.parent)}:{self.line} imports {self.module}"


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from runtime_nodes(child)


def package_of(file: Path) -> str:
    return ".".join(file.parent.relative_to(ROOT.parent).parts)


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports_of(file: Path, source: str | None = None) -> Iterator[Import]:
    tree = ast.parse(file.read_text() if source is None else source)
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = package_of(file).split(".")
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(file, node.lineno, inner if inner.startswith("kvkeep.") and is_module(inner) else base)


def part(name: str) -> str:
    """The file or folder of kvkeep that a dotted name or a path belongs to; "" for kvkeep itself."""
    return [*name.split("."), ""][1]


def own_part(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def level(name: str) -> int:
    return LEVEL.get(name, UNLISTED)


FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]
IMPORTS = [found for file in FILES for found in imports_of(file)]
INNER = [found for found in IMPORTS if found.module.startswith("kvkeep.")]


def upward(found: Import) -> bool:
    return level(part(found.module)) > level(own_part(found.file))


def foreign_below_the_cache(found: Import) -> bool:
    top = found.module.split(".")[0]
    known = {"kvkeep", "torch", "jaxtyping"} | sys.stdlib_module_names | WITH_MORE.get(own_part(found.file), set())
    return own_part(found.file) in TORCH_ONLY and top not in known


def transformers_elsewhere(found: Import) -> bool:
    return found.module.split(".")[0] == "transformers" and own_part(found.file) not in WITH_TRANSFORMERS


def test_no_file_imports_from_above_itself() -> None:
    # a file that is new and low goes into LEVELS
    assert [found.place for found in INNER if upward(found)] == []


def test_up_to_the_policies_everything_needs_torch_alone() -> None:
    assert [found.place for found in IMPORTS if foreign_below_the_cache(found)] == []


def test_transformers_appears_where_it_is_met_and_nowhere_else() -> None:
    assert [found.place for found in IMPORTS if transformers_elsewhere(found)] == []


def vllm_elsewhere(found: Import) -> bool:
    return found.module.split(".")[0] == "vllm" and own_part(found.file) != "vllm_plugin"


def test_vllm_appears_in_the_plugin_alone() -> None:
    assert [found.place for found in IMPORTS if vllm_elsewhere(found)] == []


def test_no_parts_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for found in INNER:
        if part(found.module) != own_part(found.file):
            graph.setdefault(own_part(found.file), set()).add(part(found.module))
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("file", "source", "broken"),
    [
        ("slots.py", "from .policies import Policy", upward),
        ("slots.py", "from . import cache", upward),
        ("policies/kvp.py", "def f():\n    from kvkeep.cache import KVCache", upward),
        ("attention/fast.py", "from ..policies.base import Policy", upward),
        ("budget.py", "import numpy as np", foreign_below_the_cache),
        ("policies/kvp.py", "from safetensors.torch import load_file", foreign_below_the_cache),
        ("chat.py", "from transformers import Cache", transformers_elsewhere),
        ("report/page.py", "import transformers.utils", transformers_elsewhere),
        ("cli/serve.py", "def f():\n    import vllm", vllm_elsewhere),
    ],
)
def test_the_rules_see_what_breaks_them(file: str, source: str, broken: object) -> None:
    assert callable(broken)
    assert [broken(found) for found in imports_of(ROOT / file, source)] == [True]


def test_an_import_for_types_alone_is_free() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import Cache\n"
    assert [found.module for found in imports_of(ROOT / "chat.py", source)] == ["typing"]


# runs in a fresh interpreter: no network, no writing, and the world is compared before and after
WATCHED = """
import logging, os, pkgutil, signal, sys, warnings
import torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface

def world():
    return {
        "attention functions": sorted(AttentionInterface().valid_keys()),
        "mask functions": sorted(AttentionMaskInterface().valid_keys()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                  torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
                  torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "rest": (dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGINT), len(warnings.filters)),
    }

def forbid(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen"):
        raise RuntimeError(f"import caused {event} {arguments}")

before = world()
sys.addaudithook(forbid)
import kvkeep
for module in pkgutil.walk_packages(kvkeep.__path__, "kvkeep."):
    # a subclass of the harness's model cannot be had without importing the harness, which sets variables
    if module.name == "kvkeep.evaluate.lm_eval_model":
        continue
    try:
        __import__(module.name)
    except ModuleNotFoundError as missing:
        assert missing.name.split(".")[0] in ("lm_eval", "vllm", "prometheus_client"), missing
after = world()
assert before == after, [key for key in before if before[key] != after[key]]
"""

LIGHT = """
import sys
import kvkeep
heavy = {"torch", "transformers", "matplotlib", "typer", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("code", [WATCHED, LIGHT], ids=["every module", "the package"])
def test_importing_has_no_effect(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
