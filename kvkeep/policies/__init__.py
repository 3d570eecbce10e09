"""Policies: how much each cached token is worth. The budget says how many stay; the cache evicts.

B sequences, H KV heads, G query heads per KV head, N slots, T new tokens, D head size.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..names import nearest
from ..rotation import Rotary
from .base import Futures, Look, Observation, Policy, Tiers
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
from .kvpop import KVpop, KVpopMLP
from .lorekv import LoreKV
from .spelling import RANKING, parse, spell
from .tiered import QEvict, Tiered

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
    "kvpop": KVpop,
    "kvpop_mlp": KVpopMLP,
    "lorekv": LoreKV,
    "qevict": QEvict,
    "tiered": Tiered,
    "oracle": Oracle,
}


def make_policy(policy: "str | Policy", **options: Any) -> Policy:
    """A policy from its name and options, or the given one. The name may have options too: "snapkv(window=16)".

    Raises:
        ValueError: for an unknown name or option, with the near ones.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} go with a policy's name; {policy} already has its own")
        return policy
    name, written = parse(policy)
    kind = _kind(name)
    known = {field.name: field.default for field in fields(kind)}
    chosen = {}
    for option, value in [*written.items(), *options.items()]:
        if option not in known:
            hint = nearest(option, known) if known else "it has none"
            raise ValueError(f"unknown option {option!r} of policy {name!r}; {hint}")
        if option in chosen:
            raise ValueError(f"option {option!r} is given twice: in {policy!r} and beside it")
        if not _alike(value, known[option]):
            raise ValueError(f"option {option!r} of policy {name!r} is like {known[option]!r}, got {value!r}")
        chosen[option] = _converted(value, known[option])
    return kind(**chosen)


def saved_policy(name: str, settings: Mapping[str, Any]) -> Policy | None:
    """The policy of the class `name` with `Policy.settings`; None where no class here has that name.

    Raises:
        ValueError, OSError: where it cannot be made any more, such as for weights that are gone.
    """
    kind = next((kind for kind in POLICIES.values() if kind.__name__ == name), None)
    if kind is None:
        return None
    inner = {option: value for option, value in settings.items() if isinstance(value, Mapping)}
    ranked = {option: saved_policy(value["name"], value["options"]) for option, value in inner.items()}
    return None if None in ranked.values() else kind(**{**settings, **ranked})


def spelled(policy: str) -> str:
    """The one spelling of a policy's name with its options, for names of measurements.

    >>> spelled("lorekv(steps = 4, futures=4)"), spelled("tiered(kvp,q=.5)")
    ('lorekv(steps=4)', 'tiered(kvp, q=0.5)')
    """
    name, options = parse(policy)
    kind = _kind(name)
    if RANKING in options:
        options[RANKING] = spelled(options[RANKING])
        default = next(field.default for field in fields(kind) if field.name == RANKING)
        if POLICIES.get(options[RANKING]) is type(default):
            del options[RANKING]
    return spell(name, options, kind)


def _alike(value: Any, default: Any) -> bool:
    """Whether an option's value is of its default's type; whole numbers do for fractions."""
    if isinstance(default, Policy):
        return isinstance(value, Policy | str)
    if not isinstance(default, bool | int | float | str):
        return True
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)


def _converted(value: Any, default: Any) -> Any:
    if isinstance(default, Policy):
        return make_policy(value)
    return float(value) if isinstance(default, float) else value


def _kind(name: str) -> type[Policy]:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; {nearest(name, POLICIES)}")
    return POLICIES[name]


__all__ = [
    "KVP",
    "POLICIES",
    "Futures",
    "KVpop",
    "KVpopMLP",
    "Look",
    "LoreKV",
    "Observation",
    "Policy",
    "Projection",
    "QEvict",
    "Rotary",
    "Tiered",
    "Tiers",
    "make_policy",
    "parse",
    "saved_policy",
    "spelled",
]
