"""Policies as one writes them: a name, or a name with options."""

import ast
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .base import Policy

# the option whose name is not written: the policy that another one is made of
RANKING = "of"


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `name(option=value, ...)`. Values are Python's; a word needs no quotes.

    A policy that another is made of comes first, without the option's name.

    >>> parse("lorekv(futures=1, objective=mass)"), parse("tiered(snapkv(window=16), q=.5)")
    (('lorekv', {'futures': 1, 'objective': 'mass'}), ('tiered', {'of': 'snapkv(window=16)', 'q': 0.5}))

    Raises:
        ValueError: for anything else.
    """
    if "(" not in text:
        return text.strip(), {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and _is_policy(call.args):
            made_of = {RANKING: ast.unparse(call.args[0])} if call.args else {}
            options = made_of | {keyword.arg: _value(keyword.value) for keyword in call.keywords}
            if None not in options and len(options) == len(call.args) + len(call.keywords):
                return call.func.id, options  # type: ignore[return-value]
    except (SyntaxError, ValueError) as error:
        raise ValueError(_unreadable(text)) from error
    raise ValueError(_unreadable(text))


def spell(name: str, options: Mapping[str, Any], kind: type[Policy]) -> str:
    """The one spelling of equal policies: options in the class's order, without those that have their defaults."""
    given = [(field.name, options[field.name]) for field in fields(kind) if field.name in options]
    defaults = {field.name: field.default for field in fields(kind)}
    made_of = [options[RANKING]] if RANKING in options else []
    shown = made_of + [f"{o}={_word(value)}" for o, value in given if o != RANKING and value != defaults[o]]
    return f"{name}({', '.join(shown)})" if shown else name


def _is_policy(given: list[ast.expr]) -> bool:
    return not given or (len(given) == 1 and isinstance(given[0], ast.Name | ast.Call))


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _word(value: Any) -> str:
    # True and None would be read as themselves
    plain = isinstance(value, str) and value.isidentifier() and value not in ("True", "False", "None")
    return value if plain else repr(value)


def _unreadable(text: str) -> str:
    return (
        f"cannot read the policy {text!r}; write a name, or a name with options such as snapkv(window=16, kernel=5), "
        "with what is no plain word in quotes: kvp(weights='runs/policy')"
    )
