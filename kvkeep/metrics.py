"""What a cache misses, measured while a full cache reads the same text: accumulators that are fed step by step.

*X any leading axes, such as layers and KV heads; n tokens so far. No map of steps by tokens is ever held.

An event is a moment at which a cache is asked what it holds; the measures are those of QEvict (arXiv 2608.05326). Its
unit is a window of tokens. Here the unit is a token: for a method that moves whole windows every share is the same.
"""

from collections import deque
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Closed(NamedTuple):
    """An event whose horizon is over: what each of its tokens got meanwhile, and what was noted at it."""

    mass: Float[Tensor, "*X n"]
    note: Any


class FutureMass:
    """The attention that tokens get within `horizon` steps after an event, handed out once it is known.

    An event whose horizon does not end within the text is never handed out.

    Raises:
        ValueError: for a horizon below 1.
    """

    def __init__(self, horizon: int):
        if horizon < 1:
            raise ValueError(f"a horizon has at least 1 step, got {horizon}")
        self.horizon = horizon
        self._total: Tensor | None = None
        self._open: deque[tuple[int, Tensor, Any]] = deque()

    def mark(self, note: Any = None) -> None:
        """An event, after the steps so far."""
        assert self._total is not None, "an event needs a step before it"
        self._open.append((self.horizon, self._total.clone(), note))

    def add(self, mass: Float[Tensor, "*X n"]) -> list[Closed]:
        """One step's attention to each of the n tokens so far; returns the events that close with it."""
        # fp64: small differences of sums over thousands of steps
        grown = mass.to(torch.float64, copy=True)
        if self._total is not None:
            grown[..., : self._total.shape[-1]] += self._total
        self._total = grown
        self._open = deque((left - 1, start, note) for left, start, note in self._open)
        closed = []
        while self._open and self._open[0][0] == 0:
            _, start, note = self._open.popleft()
            closed.append(Closed((grown[..., : start.shape[-1]] - start).float(), note))
        return closed


def tier_mass(mass: Float[Tensor, "*X n"], tiers: Int[Tensor, "*X n"], num_tiers: int) -> Float[Tensor, "*X num_tiers"]:
    """How much of the mass lies in each tier; tokens of tier -1 are left out."""
    sums = mass.new_zeros(*mass.shape[:-1], num_tiers)
    return sums.scatter_add_(-1, tiers.long().clamp(min=0), mass * (tiers >= 0))


def churn(before: Bool[Tensor, "*X n"], now: Bool[Tensor, "*X n"]) -> Float[Tensor, "*X"]:
    """1 - |both| / |either| of two selections; 0 where both are empty."""
    either = (before | now).sum(-1)
    return torch.where(either > 0, 1 - (before & now).sum(-1) / either.clamp(min=1), 0.0)


def heaviest(mass: Float[Tensor, "*X n"], count: int, *, omega: int, first: int, until: int) -> Bool[Tensor, "*X n"]:
    """Tokens of the `count` windows of most mass, of those that lie wholly between `first` and `until`.

    Args:
        omega: tokens of a window; the first begins at token `first`.
    """
    num = max(0, (until - first) // omega)
    windows = mass[..., first : first + num * omega].unflatten(-1, (num, omega)).sum(-1)
    chosen = torch.zeros_like(windows, dtype=torch.bool)
    chosen.scatter_(-1, windows.topk(min(count, num), dim=-1).indices, True)
    selected = torch.zeros_like(mass, dtype=torch.bool)
    selected[..., first : first + num * omega] = chosen.repeat_interleave(omega, dim=-1)
    return selected


class Rescues(NamedTuple):
    """Counts over episodes, by leading axes.

    An episode is an unbroken run of events at which a token is not selected; it counts (`lasting`) once it has lasted
    `least` events, and is `rescued` if the token is selected again, after a wait of (events lasted - least + 1).
    `decided` are those that were followed for `within` more events, so that none is left out for how it went on;
    `in_time` are those of them that were rescued meanwhile. `waits` is the sum of the waits of all rescued ones.
    """

    lasting: Float[Tensor, "*X"]
    rescued: Float[Tensor, "*X"]
    decided: Float[Tensor, "*X"]
    in_time: Float[Tensor, "*X"]
    waits: Float[Tensor, "*X"]


class Revivals:
    """Counts how often what was left out is taken back ("lazy insertion rescue").

    Global LIR = rescued / lasting, in_time / decided where the rescue must come within `within` events.

    Raises:
        ValueError: for numbers below 1.
    """

    def __init__(self, *, least: int = 4, within: int = 8):
        if least < 1 or within < 1:
            raise ValueError(f"an episode lasts at least 1 event, within at least 1, got {least} and {within}")
        self.least, self.within = least, within
        self._run: Tensor | None = None
        self._counts: dict[str, Tensor] = {}
        # episodes that began to count at each of the last events, and how many of them were rescued since
        self._followed: deque[tuple[Tensor, Tensor]] = deque()

    def add(self, selected: Bool[Tensor, "*X n"], eligible: Bool[Tensor, "*X n"]) -> None:
        """What is selected at the next event, of the tokens that may be; an episode cannot begin before that."""
        run = torch.zeros(selected.shape, dtype=torch.int32, device=selected.device)
        if self._run is not None:
            run[..., : self._run.shape[-1]] = self._run
        waits = run - self.least + 1
        back = selected & (waits >= 1)
        self._run = torch.where(eligible & ~selected, run + 1, 0)
        lasting = (self._run == self.least).sum(-1)
        self._count("lasting", lasting)
        self._count("rescued", back.sum(-1))
        self._count("waits", (waits * back).sum(-1))
        self._follow(lasting, tier_mass(back.float(), waits.clamp(0, self.within + 1) - 1, self.within + 1))

    def _follow(self, lasting: Int[Tensor, "*X"], rescued: Float[Tensor, "*X w"]) -> None:
        """Count what was followed long enough; `rescued` is by how long each had waited, those too late last."""
        for wait, (_, so_far) in enumerate(reversed(self._followed)):
            so_far.add_(rescued[..., wait])
        over = len(self._followed) == self.within
        done = self._followed.popleft() if over else (torch.zeros_like(lasting), torch.zeros_like(rescued[..., 0]))
        self._count("decided", done[0])
        self._count("in_time", done[1])
        self._followed.append((lasting, torch.zeros_like(rescued[..., 0])))

    def _count(self, name: str, found: Float[Tensor, "*X"] | Int[Tensor, "*X"]) -> None:
        self._counts[name] = self._counts.get(name, 0) + found.float()

    @property
    def counts(self) -> Rescues:
        """So far."""
        return Rescues(**self._counts)


def cosine(
    seen: Float[Tensor, "*X n"], true: Float[Tensor, "*X n"], among: Bool[Tensor, "*X n"]
) -> Float[Tensor, "*X"]:
    """Cosine between scores as a cache sees them and the true ones, over some tokens; NaN where there are none."""
    seen, true = seen * among, true * among
    return (seen * true).sum(-1) / (seen.norm(dim=-1) * true.norm(dim=-1))


def recovered(
    seen: Float[Tensor, "*X n"], true: Float[Tensor, "*X n"], among: Bool[Tensor, "*X n"]
) -> Float[Tensor, "*X"]:
    """R_Q: sum of min(seen, true) / sum of true, over some tokens; NaN where there are none."""
    return (torch.minimum(seen, true) * among).sum(-1) / (true * among).sum(-1)
