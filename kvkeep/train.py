"""The training loop of the learned policies: many small agents at once, each as if it were alone.

A agents. Every parameter of the network is a stack `[A, ...]`; agents share prompts and steps, and nothing else.

A run writes into one folder: the best policy so far, and until it is finished `training.safetensors`, from which the
same command goes on after a kill, to the same numbers.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from . import saving
from .policies.files import PolicyFile, write_policy
from .team import Team

_FORMAT = 1
_CHECKPOINT = "training.safetensors"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train, whatever is trained.

    Attributes:
        steps: optimiser steps.
        batch: prompts a step, over all processes.
        lr: greatest learning rate (AdamW), reached after `warmup` steps and falling as a cosine to `lr_end`.
        weight_decay: of AdamW.
        clip: greatest gradient norm of one agent.
        ema: decay of the average of weights that is evaluated and kept.
        every: steps between two validations; progress is saved then too.
        patience: validations without a better reward after which to stop; 0 never does.
        seed: of everything that is drawn at random.

    Raises:
        ValueError: for numbers that make no training.
    """

    steps: int = 800
    batch: int = 1
    lr: float = 1e-2
    lr_end: float = 1e-6
    warmup: int = 100
    weight_decay: float = 1e-3
    clip: float = 5.0
    ema: float = 0.99
    every: int = 100
    patience: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "lr", "clip", "every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {self.ema}")

    def rate(self, step: int) -> float:
        """Learning rate of this step, counted from 0."""
        if step < self.warmup:
            return self.lr * (0.01 + 0.99 * step / self.warmup)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * done)) / 2


class Learner(ABC):
    """What is trained, and on what objective.

    Attributes:
        network: the agents; every parameter is `[A, ...]`, or there is one agent.
        names: what each agent is called in messages, such as "layer 3, head 1".

    What it learns from are traces or anything else that has a `key`.
    """

    network: nn.Module
    names: list[str]

    def keep(self, out: Path, network: nn.Module, training: dict[str, Any]) -> None:
        """Write what was learned into `out`."""
        write_policy(out, self.policy(network, training))

    def parts(self, network: nn.Module, recipe: Recipe) -> list[tuple[list[nn.Parameter], Callable[[int], float]]]:
        """Parameters that have a learning rate of their own, and that rate at each step."""
        return [(list(network.parameters()), recipe.rate)]

    @abstractmethod
    def loss(self, network: nn.Module, trace: Any, generator: torch.Generator) -> Float[Tensor, " A"]:
        """Loss of each agent on one prompt; what is drawn at random comes from `generator` (on the CPU)."""

    @abstractmethod
    def reward(self, network: nn.Module, trace: Any) -> Float[Tensor, " A"]:
        """How well each agent does on one prompt, without noise; more is better."""

    @abstractmethod
    def policy(self, network: nn.Module, training: dict[str, Any]) -> PolicyFile:
        """The policy as it is stored, with the manifest of its training."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The settings that make it this learner and no other, as JSON."""


class Validation(NamedTuple):
    """One look at held-out prompts.

    Attributes:
        step: steps done.
        loss: mean training loss since the last look (NaN before the first step).
        rewards: mean reward of each agent.
        best: whether no look before was as good; the first, before any step, never is.
    """

    step: int
    loss: float
    rewards: Float[Tensor, " A"]
    best: bool

    @property
    def reward(self) -> float:
        return float(self.rewards.mean())


@dataclass
class Progress:
    """Where a training stands, apart from weights; all of it JSON."""

    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    stale: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train(
    learner: Learner,
    prompts: Sequence[Any],
    validation: Sequence[Any],
    recipe: Recipe,
    out: str | Path,
    *,
    manifest: dict[str, Any] | None = None,
    team: Team | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
    on_validation: Callable[[Validation], None] = lambda seen: None,
) -> Progress:
    """Train on `prompts` and keep the policy of greatest validation reward in `out`.

    A folder with an unfinished run of the same settings is continued.

    Args:
        manifest: what the policy file should say of how it was made.
        team: processes that share the work; each calls this with the same arguments.
        on_step: called with (steps done, steps in all).
        on_validation: called after each look at the validation prompts.

    Raises:
        ValueError: if a loss is no finite number, naming the agents; if `out` holds another or a finished run.
    """
    run = _Run(learner, prompts, validation, recipe, Path(out), manifest or {}, team or Team())
    run.resume()
    if run.progress.step == 0:
        run.validate(on_validation)
    while run.progress.step < recipe.steps and not run.tired:
        run.step()
        on_step(run.progress.step, recipe.steps)
        if run.progress.step % recipe.every == 0 or run.progress.step == recipe.steps:
            run.validate(on_validation)
    run.finish()
    return run.progress


class _Run:
    """One training under way."""

    def __init__(
        self,
        learner: Learner,
        prompts: Sequence[Any],
        validation: Sequence[Any],
        recipe: Recipe,
        out: Path,
        manifest: dict[str, Any],
        team: Team,
    ):
        self.learner, self.prompts, self.validation, self.recipe = learner, prompts, validation, recipe
        self.out, self.manifest, self.team = out, manifest, team
        self.network = learner.network
        self.average = deepcopy(self.network).requires_grad_(False)
        parts = learner.parts(self.network, recipe)
        self.rates = [rate for _, rate in parts]
        self.weights: list[Tensor] = [weight for weights, _ in parts for weight in weights]
        self.averages: list[Tensor] = [weight for part in learner.parts(self.average, recipe) for weight in part[0]]
        self.grads = [torch.zeros_like(weight) for weight in self.weights]
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad
        groups = [{"params": weights} for weights, _ in parts]
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.progress = Progress()

    @property
    def tired(self) -> bool:
        return 0 < self.recipe.patience <= self.progress.stale

    # a step

    def step(self) -> None:
        step, recipe = self.progress.step, self.recipe
        torch._foreach_zero_(self.grads)
        losses = torch.zeros(len(self.learner.names), device=self.grads[0].device)
        batch = self._batch(step)
        for place in self.team.share(range(recipe.batch)):
            generator = torch.Generator().manual_seed(_seed(recipe.seed, step, place))
            loss = self.learner.loss(self.network, self.prompts[batch[place]], generator) / recipe.batch
            loss.sum().backward()
            losses += loss.detach()
        self.team.sum_([losses, *self.grads])
        self._refuse_if_not_finite(losses, batch)
        self._clip()
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate(step)
        self.optimiser.step()
        # early weights are soon forgotten
        decay = min(recipe.ema, step / (step + 10))
        torch._foreach_lerp_(self.averages, self.weights, 1 - decay)
        self.progress.step += 1
        self.progress.losses.append(float(losses.mean()))

    def _batch(self, step: int) -> list[int]:
        """Which prompts: every epoch takes all in an order of its own, which needs no state."""
        batch, places = [], range(step * self.recipe.batch, (step + 1) * self.recipe.batch)
        for epoch, place in (divmod(place, len(self.prompts)) for place in places):
            generator = torch.Generator().manual_seed(_seed(self.recipe.seed, epoch, -1))
            batch.append(int(torch.randperm(len(self.prompts), generator=generator)[place]))
        return batch

    def _norms(self) -> Float[Tensor, " A"]:
        """Gradient norm of each agent."""
        num_agents = len(self.learner.names)
        return torch.stack([grad.reshape(num_agents, -1).square().sum(1) for grad in self.grads]).sum(0).sqrt()

    def _clip(self) -> None:
        factor = (self.recipe.clip / self._norms().clamp(min=1e-12)).clamp(max=1)
        for grad in self.grads:
            grad.mul_(factor.view(-1, *[1] * (grad.ndim - 1)))

    def _refuse_if_not_finite(self, losses: Tensor, batch: list[int]) -> None:
        broken = ~(losses.isfinite() & self._norms().isfinite())
        if not bool(broken.any()):
            return
        names = [name for name, bad in zip(self.learner.names, broken.tolist(), strict=True) if bad]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        keys = ", ".join(self.prompts[place].key for place in batch)
        kept = f"the best policy so far, of step {self.progress.best_step}, stays in {self.out}"
        raise ValueError(
            f"the loss of {'; '.join(names[:3])}{more} is no finite number at step {self.progress.step}, on {keys}; "
            f"{kept if self.progress.best_step else 'no policy was good enough to keep yet'}. Look at these traces, "
            "or train with a lower learning rate in another folder"
        )

    # validation

    @torch.no_grad()
    def validate(self, report: Callable[[Validation], None]) -> None:
        total = torch.zeros(len(self.learner.names), device=self.grads[0].device)
        for place in self.team.share(range(len(self.validation))):
            total += self.learner.reward(self.average, self.validation[place])
        self.team.sum_([total])
        now, losses = self.progress, self.progress.losses
        loss = sum(losses) / len(losses) if losses else math.nan
        rewards = total.cpu() / len(self.validation)
        seen = Validation(now.step, loss, rewards, best=now.step > 0 and float(rewards.mean()) > now.best)
        if now.step:
            self._remember(seen)
        report(seen)

    def _remember(self, seen: Validation) -> None:
        now = self.progress
        now.history.append({"step": now.step, "loss": seen.loss, "reward": seen.reward})
        now.stale, now.losses = 0 if seen.best else now.stale + 1, []
        if seen.best:
            now.best, now.best_step = seen.reward, now.step
        if self.team.rank == 0:
            if seen.best:
                reached = {"step": now.step, "reward": seen.reward, "history": now.history}
                self.learner.keep(self.out, self.average, {**self.manifest, "reached": reached})
            self._save()

    # files

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to be continued."""
        prompts = {"prompts": [[trace.key for trace in part] for part in (self.prompts, self.validation)]}
        # as it comes back from the file
        return json.loads(json.dumps({**asdict(self.recipe), **self.learner.identity(), **prompts}))

    def _save(self) -> None:
        state = {"identity": self._identity, "progress": asdict(self.progress)}
        saving.write(self.out / _CHECKPOINT, "training", _FORMAT, state, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes, by name; the tensors themselves."""
        tensors = {}
        for kind, network in {"network": self.network, "average": self.average}.items():
            tensors.update({f"{kind}.{name}": array for name, array in _arrays(network)})
        for place, state in self.optimiser.state_dict()["state"].items():
            tensors.update({f"optimiser.{place}.{name}": value for name, value in state.items()})
        return tensors

    def resume(self) -> None:
        path = self.out / _CHECKPOINT
        if not path.is_file():
            if (self.out / "policy.safetensors").is_file():
                raise ValueError(f"{self.out} holds a finished policy already; give another folder, or delete it")
            return
        state, tensors = saving.read(path, "training", _FORMAT)
        for name, value in self._identity.items():
            if state["identity"].get(name) != value:
                was = state["identity"].get(name)
                raise ValueError(
                    f"{self.out} holds an unfinished training whose {_short(name, was, value)}; run it with the same "
                    "settings to go on, or give another folder"
                )
        self.progress = Progress(**state["progress"])
        self._restore(tensors)

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        def part(head: str) -> dict[str, Tensor]:
            return {name.removeprefix(head): t for name, t in tensors.items() if name.startswith(head)}

        for kind, network in {"network.": self.network, "average.": self.average}.items():
            saved = part(kind)
            with torch.no_grad():
                for name, array in _arrays(network):
                    array.copy_(saved[name])
        slots: dict[int, dict[str, Tensor]] = {}
        for name, value in part("optimiser.").items():
            place, _, kind = name.partition(".")
            slots.setdefault(int(place), {})[kind] = value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": slots})

    def finish(self) -> None:
        """Nothing is left to continue."""
        if self.team.rank == 0:
            (self.out / _CHECKPOINT).unlink(missing_ok=True)


def _arrays(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything a network is made of; what two places share once."""
    yield from network.named_parameters()
    yield from network.named_buffers()


def _short(name: str, was: Any, value: Any) -> str:
    if name == "prompts":
        return "prompts are others"
    return f"{name} is {was}, not {value}"


def _seed(*parts: int) -> int:
    """A seed of its own for every combination of whole numbers."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + (part + 1) * 1442695040888963407 + 1) % 2**63
    return mixed
