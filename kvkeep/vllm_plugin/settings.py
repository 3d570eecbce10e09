"""What the environment asks for: which policy serves, under which budget."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..budget import Budget
from ..policies import Policy, make_policy
from ..policies.tiered import TieredPolicy
from .pages import PageShape

POLICY, BUDGET, SINKS, RECENT = "KVKEEP_POLICY", "KVKEEP_BUDGET", "KVKEEP_SINKS", "KVKEEP_RECENT"
# what a policy may need that a served model does not offer
_ABSENT = {
    "future": "the future itself",
    "projection": "the model's output projections",
    "rotary": "the model's rotation",
}


@dataclass(frozen=True)
class Settings:
    """One policy and one budget for all requests of a server.

    Attributes:
        name: the policy as it was written, such as "snapkv(window=16)".
        policy: the policy.
        budget: tokens per KV head and layer.

    Raises:
        ValueError: for an unknown policy, one that a server cannot run, or a budget that is no number of tokens.
    """

    name: str
    policy: Policy
    budget: Budget

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "Settings | None":
        """The settings in `KVKEEP_POLICY`, `KVKEEP_BUDGET`, `KVKEEP_SINKS` and `KVKEEP_RECENT`.

        None where none is set.
        """
        given = os.environ if environment is None else environment
        if not given.get(POLICY):
            if given.get(BUDGET):
                raise ValueError(f"{BUDGET} is set and {POLICY} is not: name a policy, or unset both")
            return None
        if not given.get(BUDGET):
            raise ValueError(
                f"{POLICY} is set and {BUDGET} is not: say how many tokens each KV head keeps, such as 1024"
            )
        return cls.parse(given[POLICY], given[BUDGET], given.get(SINKS, "4"), given.get(RECENT, "16"))

    @classmethod
    def parse(cls, policy: str, budget: str, sinks: str = "4", recent: str = "16") -> "Settings":
        """The settings from what a user writes."""
        protected = {"sinks": _whole(SINKS, sinks), "recent": _whole(RECENT, recent)}
        parsed = Budget.parse(budget, **protected)
        if parsed.tokens is None:
            raise ValueError(
                "a server reserves the same slots for every request, so its budget is a number of tokens, such as "
                f"1024; got {budget!r}"
            )
        made = make_policy(policy)
        _refuse_unservable(policy, made)
        return cls(policy, made, parsed)

    @property
    def tokens(self) -> int:
        """Tokens that each KV head of each layer keeps."""
        assert self.budget.tokens is not None
        return self.budget.tokens

    def page(self, *, heads: int, head_size: int, dtype: torch.dtype) -> PageShape:
        """What one request has in a layer of this shape."""
        return PageShape.of(self.policy, self.budget, heads=heads, head_size=head_size, dtype=dtype)

    def environment(self) -> dict[str, str]:
        """What `read` would read these settings from."""
        budget = self.budget
        return {POLICY: self.name, BUDGET: str(budget.tokens), SINKS: str(budget.sinks), RECENT: str(budget.recent)}


def _whole(name: str, text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"{name} is a number of tokens, got {text!r}")
    return int(text)


def _refuse_unservable(name: str, policy: Policy) -> None:
    if policy.tiers is not None and policy.tiers.first_after:
        raise ValueError(f"policy {name!r} goes over its budget behind a prompt (first_after), and pages end there")
    if policy.look is not None:
        raise ValueError(f"policy {name!r} looks ahead after each prompt, which a server cannot do")
    # tiers turn keys by a rotation that the model's config tells
    needs = policy.ranking.needs if isinstance(policy, TieredPolicy) else policy.needs
    missing = [what for need, what in _ABSENT.items() if need in needs]
    if missing:
        raise ValueError(f"policy {name!r} needs {missing[0]}, which is not at hand inside vLLM")
    if policy.schedule != "uniform":
        raise ValueError(f"policy {name!r} gives layers budgets of their own, and all pages of a server have one size")
