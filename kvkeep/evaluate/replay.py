"""Replay: how much of the future's attention the tokens hold that each policy keeps, over recorded prompts.

Or how many of them are those that a teacher would keep, who knows what later tokens of the same prompt read.

L layers, H KV heads, n prompt tokens.

No model runs. A policy that reads keys, values and positions is asked anew, through the same observation as in a cache;
one that reads queries must have been asked when the traces were recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import AttentionMass
from ..budget import Budget
from ..policies import POLICIES, Observation, Policy, make_policy, spelled
from ..selection import protected, survivors
from ..slots import Slots
from ..target import target
from ..trace import Trace, TraceIndex, Traces
from .rows import Row, mean_row

METRIC, RECALL = "kept_future", "teacher_recall"
# the task of a row over all sources of prompts
ALL = "all"
# its worth is the importance itself
_ORACLE = "oracle"

# called with prompts done, prompts in all, and the source of the next
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is kept of every prompt, and which importance that is measured by.

    Attributes:
        policies: as for `KVCache`; "oracle" keeps by the exact future. What no trace can answer is refused by `run`.
        budgets: tokens, or shares of the prompt.
        sinks, recent: first and last tokens that are always kept, inside the budget.
        group, futures: see `Trace.importance`.
        metric: "kept_future", or "teacher_recall": of the tokens beside sinks and recent ones that a ranking by the
            later attention of the prompt's own tokens keeps (`target.target`), the share that is kept too; `recent`
            must be the delay that the traces were recorded with.

    Raises:
        ValueError: for unknown policies and metrics, impossible budgets, and budgets in bytes.
    """

    policies: Sequence[str]
    budgets: Sequence[int | float | str] = (64, 128, 256, 512)
    sinks: int = 4
    recent: int = 16
    group: str = "max"
    futures: str = "mean"
    metric: str = METRIC

    def __post_init__(self) -> None:
        if self.metric not in (METRIC, RECALL):
            raise ValueError(f"unknown metric {self.metric!r}; choose {METRIC} or {RECALL}")
        for budget in self.budgets:
            if self._budget(budget).bytes is not None:
                raise ValueError(f"a replay counts tokens, and {budget!r} is in bytes; give tokens or a share")
        if not self.policies or not self.budgets:
            raise ValueError("a replay needs at least one policy and one budget")

    def run(
        self,
        traces: Traces,
        *,
        stamp: Mapping[str, Any] | None = None,
        by_source: bool = False,
        progress: Progress = lambda done, total, source: None,
    ) -> list[Row]:
        """One row for each policy and budget: the share of future attention kept, mean over layers, heads and prompts.

        The interval is a bootstrap over prompts; `extra` holds the mean of each head, layer by layer.

        Args:
            stamp: manifest of the run.
            by_source: rows for each source of prompts too.

        Raises:
            ValueError: for policies that these traces cannot answer for.
        """
        if self.metric == RECALL:
            _refuse_untaught(traces, self.recent)
        policies = {name: make_policy(name) for name in self._names}
        for name, policy in policies.items():
            _refuse_unanswerable(name, policy, traces)
        found: list[_Kept] = []
        for done, trace in enumerate(traces):
            progress(done, len(traces), trace.source)
            found += [kept for name in policies for kept in self._ask(name, policies[name], trace, traces.index)]
        progress(len(traces), len(traces), "")
        return list(self._rows(found, traces, {"model": traces.index.model, **(stamp or {})}, by_source))

    @property
    def _names(self) -> list[str]:
        """Equal policies have one name, as in the traces."""
        return list(dict.fromkeys(spelled(name) for name in self.policies))

    def _budget(self, budget: int | float | str, schedule: str = "uniform") -> Budget:
        return Budget.parse(budget, sinks=self.sinks, recent=self.recent, schedule=schedule)

    def _ask(self, name: str, policy: Policy, trace: Trace, index: TraceIndex) -> "Iterator[_Kept]":
        """What one policy keeps of one prompt at every budget."""
        importance = self._importance(trace)
        worth = importance if name == _ORACLE else trace.worths.get(name)
        worth = _worth(policy, trace, index) if worth is None else worth
        for spoken in self.budgets:
            budget = self._budget(spoken, policy.schedule)
            shares, tokens = _keep(worth, importance, budget, recall=self.metric == RECALL)
            yield _Kept(name, str(budget), trace.source, trace.num_tokens, tokens, shares)

    def _importance(self, trace: Trace) -> Float[Tensor, "L H n"]:
        """What the best ranking goes by."""
        if self.metric == METRIC:
            return trace.importance(self.group, self.futures)
        assert trace.later is not None
        return target(trace.later, self.group)

    def _rows(
        self, found: "Sequence[_Kept]", traces: Traces, stamp: Mapping[str, Any], by_source: bool
    ) -> Iterator[Row]:
        sources = sorted({kept.source for kept in found})
        tasks = [ALL, *sources] if by_source and len(sources) > 1 else [ALL]
        for task in tasks:
            for policy in self._names:
                for budget in dict.fromkeys(kept.budget for kept in found):
                    group = [
                        kept
                        for kept in found
                        if (kept.policy, kept.budget) == (policy, budget) and task in (ALL, kept.source)
                    ]
                    yield self._row(group, traces.index, {**stamp, "task": task, "split": _split(traces)})

    def _row(self, group: "Sequence[_Kept]", index: TraceIndex, naming: Mapping[str, Any]) -> Row:
        values = [float(kept.shares.mean()) for kept in group]
        heads = torch.stack([kept.shares for kept in group]).mean(0)
        return mean_row(
            self.metric,
            values,
            **naming,
            policy=group[0].policy,
            budget=group[0].budget,
            length=round(fmean(kept.num_tokens for kept in group)),
            kept=fmean(kept.tokens for kept in group),
            extra={
                "group": self.group,
                "futures": self.futures,
                "sinks": self.sinks,
                "recent": self.recent,
                "heads": {str(layer): row for layer, row in zip(index.layers, heads.tolist(), strict=True)},
            },
        )


class _Kept(NamedTuple):
    """What one policy at one budget keeps of one prompt: tokens of a head, and the share that is measured."""

    policy: str
    budget: str
    source: str
    num_tokens: int
    tokens: float
    shares: Float[Tensor, "L H"]


def answerable(traces: Traces) -> list[str]:
    """The policies that these traces can answer for, by name, recorded ones and the oracle included."""
    names = list(dict.fromkeys([*POLICIES, *traces[0].worths]))
    return [name for name in names if _why_not(name, traces) is None]


def _why_not(name: str, traces: Traces) -> ValueError | None:
    try:
        _refuse_unanswerable(name, make_policy(name), traces)
    except ValueError as error:
        return error
    return None


def _refuse_unanswerable(name: str, policy: Policy, traces: Traces) -> None:
    index, recorded = traces.index, list(traces[0].worths)
    if name == _ORACLE or name in recorded:
        return
    glimpsed = set(policy.glimpses.values())
    if policy.needs and not (glimpsed and glimpsed <= set(recorded)):
        raise ValueError(
            f"policy {name!r} reads {' and '.join(sorted(policy.needs))}, which traces do not hold, and what it says "
            f"was not recorded (there is {', '.join(recorded) or 'nothing'}); record it: kvkeep trace --policy {name}"
        )
    if len(index.heads) < index.fingerprint["number of KV heads"] and type(policy).check is not Policy.check:
        raise ValueError(
            f"policy {name!r} was made for all KV heads, and {traces.folder} holds heads {index.heads} alone"
        )
    policy.check(index.fingerprint, index.layers)


class _RecordedMass(AttentionMass):
    """Attention of the newest queries as it was recorded, `[1, H, n]` for so many of them."""

    def __init__(self, sums: Mapping[int, Float[Tensor, "1 H n"]]):
        self._sums = sums

    def received(self, last: int | None = None, *, power: float = 1.0, decay: float = 1.0) -> Float[Tensor, "1 H n"]:
        assert last is not None and power == decay == 1
        return self._sums[last]


def _worth(policy: Policy, trace: Trace, index: TraceIndex) -> Float[Tensor, "L H n"]:
    """What the policy says right after the prompt, layer by layer as in a cache."""
    H, n = trace.keys.shape[1:3]
    positions = torch.arange(n, dtype=torch.int32).expand(1, H, n)
    glimpsed = {last: last * trace.worths[name][:, None] for last, name in policy.glimpses.items()}
    worths = []
    for place, (layer, keys, values) in enumerate(zip(index.layers, trace.keys, trace.values, strict=True)):
        side = {name: torch.zeros(1, H, n) for name in policy.side}
        shapes = policy.streams(H, index.group, keys.shape[-1])
        streams = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
        seen = Observation(
            slots=Slots(keys[None], values[None], positions, side, streams),
            new=None,
            num_new=n,
            lengths=torch.tensor([n], dtype=torch.int32),
            layer=layer,
            attention=_RecordedMass({last: mass[place] for last, mass in glimpsed.items()}),
            query_positions=positions[:, 0],
        )
        policy.track(seen)
        worths.append(policy.score(seen)[0].float())
    return torch.stack(worths)


def _keep(
    worth: Float[Tensor, "L H n"], importance: Float[Tensor, "L H n"], budget: Budget, *, recall: bool
) -> tuple[Float[Tensor, "L H"], float]:
    """The share of each head's importance, or of its most important tokens, that is kept; and tokens kept in a head."""
    L, H, n = worth.shape
    lengths = torch.tensor([n], dtype=torch.int32)
    counts = [n] * L if budget.unlimited else budget.slots(lengths, L)[:, 0].clamp(max=n).tolist()
    positions = torch.arange(n, dtype=torch.int32).expand(1, H, n)
    guarded = protected(positions, lengths, sinks=budget.sinks, recent=budget.recent)

    def kept(ranked: Tensor) -> Tensor:
        """Marks `[L, H, n]` of what is kept by a ranking."""
        marks = torch.zeros_like(ranked)
        for row, of_layer, count in zip(marks, ranked, counts, strict=True):
            row.scatter_(1, survivors(of_layer[None], positions, guarded, count)[0], 1.0)
        return marks

    counted = kept(importance) * ~guarded if recall else importance
    return (kept(worth) * counted).sum(-1) / counted.sum(-1), fmean(counts)


def _refuse_untaught(traces: Traces, recent: int) -> None:
    delay = traces.index.settings.get("delay")
    if delay != recent:
        raise ValueError(
            f"{traces.folder} was recorded with a delay of {delay} and recent is {recent}; a teacher's recall needs "
            "both to be the same: replay with --recent, or record with kvkeep trace --delay"
        )


def _split(traces: Traces) -> str:
    splits = {trace.split for trace in traces}
    return splits.pop() if len(splits) == 1 else ""
