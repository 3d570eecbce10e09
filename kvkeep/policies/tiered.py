"""Three tiers under any ranking: full precision, codes that can come back, and what goes.

B sequences, H KV heads, N slots, W windows of omega tokens each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from ..quant import BITS
from .base import Look, Observation, Policy, Tiers
from .baselines import H2O

# rotations whose angles change while a text grows: what was turned by one cannot be turned back by another
_CHANGING = ("dynamic", "longrope")
_ATTENTION = H2O()


@dataclass(frozen=True, kw_only=True)
class TieredPolicy(Policy):
    """Tokens ranked by another policy: the best in full precision, the next as codes, in windows of `omega`.

    A window is worth the mean of its tokens. All windows compete anew whenever one more has left the recent tokens: see
    docs/qevict.md. Sinks and recent tokens, which the budget protects, stay in full precision.

    Attributes:
        omega: tokens of a window.
        bits: of a code: 2, 4 or 8.
        q: share of the bytes for windows that codes get once not everything fits in full precision.
        share_heads: one set of windows for all KV heads of a layer, by the mean over heads.
        guard: a layer whose logits would err by more (root mean square in nats, in its worst head) codes its keys with
            more bits.
        element_bytes: plan as if an element of keys and values took so many bytes (2 for what a model in fp32 would
            hold in bf16), though no more than it takes; 0 for what it takes.
        promote: whether windows held as codes alone may come back into full precision, beside their codes; they are
            read either way.
        neighbours: a window is `omega` neighbouring tokens; else tokens are ranked one by one in full precision, and
            `omega` that fall together, of like worth, are coded together.
        first_after: tokens behind the prompt until windows compete for the first time; until then everything is held,
            over the budget.

    Raises:
        ValueError: for settings out of range.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries", "rotary"})
    side: ClassVar[tuple[str, ...]] = H2O.side

    omega: int = 8
    bits: int = 2
    q: float = 0.5
    share_heads: bool = False
    guard: float = 2.0
    element_bytes: int = 0
    promote: bool = False
    neighbours: bool = False
    first_after: int = 0

    # the policy whose worths are taken
    ranking: ClassVar[Policy]

    def __post_init__(self) -> None:
        if self.omega < 1:
            raise ValueError(f"a window has at least 1 token, got omega={self.omega}")
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {self.bits}")
        if not 0 <= self.q <= 1:
            raise ValueError(f"q must lie in [0, 1], got {self.q}")
        if not self.guard > 0:
            raise ValueError(f"guard must be positive, got {self.guard}")
        for name in ("element_bytes", "first_after"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        ranking = self._ranked_by()
        if ranking.tiers is not None:
            raise ValueError(f"{type(ranking).__name__} cannot rank windows: it has tiers of its own")
        for name, value in {
            "ranking": ranking,
            "needs": self.needs | ranking.needs,
            "side": ranking.side,
            "schedule": ranking.schedule,
        }.items():
            object.__setattr__(self, name, value)

    def _ranked_by(self) -> Policy:
        raise NotImplementedError

    @property
    def tiers(self) -> Tiers:
        return Tiers(
            self.omega,
            self.bits,
            self.q,
            self.share_heads,
            self.guard,
            self.element_bytes,
            self.promote,
            self.neighbours,
            self.first_after,
        )

    def check(self, fingerprint: Mapping[str, Any], layers: Sequence[int]) -> None:
        self.ranking.check(fingerprint, layers)
        rotation = fingerprint["rotation"]
        parts = [rotation, *(part for part in rotation.values() if isinstance(part, Mapping))]
        changing = [part["rope_type"] for part in parts if part.get("rope_type") in _CHANGING]
        if changing:
            raise ValueError(
                f"this model's rotation ({changing[0]}) changes with the length of the text, so keys cannot be coded "
                "before it; choose a policy without tiers"
            )

    def shard(self, index: int, count: int) -> Policy:
        if count > 1 and self.share_heads:
            raise ValueError(
                f"{type(self).__name__} shares its windows among all KV heads of a layer, of which a worker has some: "
                "set share_heads=False"
            )
        return self._with_ranking(self.ranking.shard(index, count))

    def _with_ranking(self, ranking: Policy) -> "TieredPolicy":
        return self

    @property
    def look(self) -> Look | None:
        return self.ranking.look

    def trust(self, likelihood: Tensor, entropy: Tensor, disagreement: Tensor) -> Tensor:
        return self.ranking.trust(likelihood, entropy, disagreement)

    def remember(self, seen: Observation) -> Observation:
        return self.ranking.remember(seen)

    def streams(self, num_heads: int, group: int, head_size: int) -> dict[str, tuple[int, ...]]:
        return self.ranking.streams(num_heads, group, head_size)

    def track(self, seen: Observation) -> None:
        self.ranking.track(seen)

    def forget(self, seen: Observation) -> None:
        self.ranking.forget(seen)

    def revise(self, worth: Float[Tensor, "B H W"], seen: Observation) -> Float[Tensor, "B H W"]:
        return self.ranking.revise(worth, seen)

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        return self.ranking.score(seen)


@dataclass(frozen=True, kw_only=True)
class Tiered(TieredPolicy):
    """Three tiers ranked by the policy `of`: "tiered(kvp, bits=4)", "tiered(snapkv(window=64), q=.5)"."""

    of: Policy = _ATTENTION

    def _ranked_by(self) -> Policy:
        return self.of

    def _with_ranking(self, ranking: Policy) -> TieredPolicy:
        return replace(self, of=ranking)

    def settings(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "of": {"name": type(self.of).__name__, "options": self.of.settings()}}


@dataclass(frozen=True, kw_only=True)
class QEvict(TieredPolicy):
    """QEvict (arXiv 2608.05326): three tiers ranked by cumulative attention, in windows that a layer's heads share.

    With the paper's settings but one: it waits with `first_after=8`, and so holds the whole prompt for eight tokens.
    With ours it is "tiered(h2o)". Windows in codes go on gathering attention through their dequantized keys.

    Attributes:
        decay: what the sum is multiplied by at each token.
        norm: attention of each query is raised to it before it is summed.
    """

    q: float = 0.7
    share_heads: bool = True
    promote: bool = True
    neighbours: bool = True
    decay: float = 1.0
    norm: float = 1.0

    def _ranked_by(self) -> Policy:
        return H2O(decay=self.decay, norm=self.norm)
