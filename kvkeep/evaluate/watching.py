"""A policy that tells what it is shown and what it answers, and is otherwise the same."""

from collections.abc import Callable
from dataclasses import fields

from jaxtyping import Float
from torch import Tensor

from ..policies import Observation, Policy


def watched(
    policy: Policy,
    *,
    seen: Callable[[Observation], None] = lambda seen: None,
    scored: Callable[[Observation, Tensor], None] = lambda seen, worth: None,
) -> Policy:
    """The same policy, which calls `seen` before it tracks and `scored` after it has scored."""
    kind = type(policy)

    def track(self: Policy, observation: Observation) -> None:
        seen(observation)
        kind.track(self, observation)

    def score(self: Policy, observation: Observation) -> Float[Tensor, "B H N"]:
        worth = kind.score(self, observation)
        scored(observation, worth)
        return worth

    told = type(kind.__name__, (kind,), {"track": track, "score": score})
    return told(**{field.name: getattr(policy, field.name) for field in fields(policy)})
