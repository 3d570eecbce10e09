"""Keep the keys and values that the future will read; drop the rest."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

_PUBLIC = {
    "Budget": "budget",
    "KVCache": "cache",
    "CacheGroup": "group",
    "POLICIES": "policies",
    "Policy": "policies",
    "Observation": "policies",
    "attach": "model",
    "prefill": "model",
    "generate": "model",
    "cache_argument": "model",
    "load": "models",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from .budget import Budget as Budget
    from .cache import KVCache as KVCache
    from .group import CacheGroup as CacheGroup
    from .model import attach as attach
    from .model import cache_argument as cache_argument
    from .model import generate as generate
    from .model import prefill as prefill
    from .models import load as load
    from .policies import POLICIES as POLICIES
    from .policies import Observation as Observation
    from .policies import Policy as Policy


def __getattr__(name: str) -> object:
    # loaded on first use: `import kvkeep` stays light and changes nothing anywhere
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
