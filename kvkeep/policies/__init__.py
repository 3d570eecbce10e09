"""Policies: how much each cached token is worth. The budget says how many stay; the cache evicts.

B sequences, H KV heads, G query heads per KV head, N slots, T new tokens, D head size.
"""

from typing import Any

from ..names import nearest
from .base import Futures, Look, Observation, Policy, Rotary
from .baselines import (
    H2O,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    LagKV,
    Oracle,
    PyramidKV,
    Random,
    SnapKV,
    Streaming,
    Tova,
)
from .deletion import Projection
from .kvp import KVP
from .lorekv import LoreKV

POLICIES: dict[str, type[Policy]] = {
    "random": Random,
    "streaming": Streaming,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "lagkv": LagKV,
    "tova": Tova,
    "h2o": H2O,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "expected_attention": ExpectedAttention,
    "kvp": KVP,
    "lorekv": LoreKV,
    "oracle": Oracle,
}


def make_policy(policy: "str | Policy", **options: Any) -> Policy:
    """A policy from its name and options, or the given one.

    Raises:
        ValueError: for an unknown name, with the near ones.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} go with a policy's name; {policy} already has its own")
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; {nearest(policy, POLICIES)}")
    return POLICIES[policy](**options)


__all__ = [
    "KVP",
    "POLICIES",
    "Futures",
    "Look",
    "LoreKV",
    "Observation",
    "Policy",
    "Projection",
    "Rotary",
    "make_policy",
]
