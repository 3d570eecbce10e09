"""What the training loop trains for KVpop: scorers whose running top-k keeps what a teacher's does.

A agents, n tokens of a prompt, m of them that enter the pool, P pairs.

The teacher ranks by the target: the attention that later queries pay beyond the delay (`Trace.later`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .frequencies import rotation_frequencies
from .learners import NUM_CALIBRATION, agent_names, train_on
from .losses import Pairs, boundary_loss
from .policies.files import PolicyFile
from .policies.kvpop import scorers_file
from .policies.scorers import Scorers, ScorerShape, make_scorers
from .pool import Newcomers, Window, newcomers, static_priority
from .target import EPSILON, target
from .team import Team
from .trace import AGGREGATIONS, Trace, TraceIndex
from .train import Learner, Progress, Recipe
from .training_data import Data

# moments of a prompt at which a validation compares what is held
_MOMENTS = 4
# prompts whose teacher is remembered; 2,048 tokens of 90 heads take some 6 MB
_REMEMBERED = 256


@dataclass(frozen=True, kw_only=True)
class Cutoff:
    """What the scorers of KVpop learn.

    Attributes:
        shares: of a prompt's tokens that a cache keeps, sinks and recent window included; each is learned.
        sinks: first tokens that always stay.
        window: recent tokens that always stay; the traces' delay.
        group: "max" or "mean" of a KV head's query heads, for the target.
        epsilon: mean attention below which tokens are alike.
        num_pairs: pairs at the cutoff of one step and share, half of them from anywhere and half from the last quarter.
        pairs: how much each counts.

    Raises:
        ValueError: for an unknown name or an impossible number.
    """

    shares: tuple[float, ...] = (0.25, 0.125)
    sinks: int = 4
    window: int = 64
    group: str = "max"
    epsilon: float = EPSILON
    num_pairs: int = 512
    pairs: Pairs = field(default_factory=Pairs)

    def __post_init__(self) -> None:
        if self.group not in AGGREGATIONS:
            raise ValueError(f"group is {' or '.join(AGGREGATIONS)}, got {self.group!r}")
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise ValueError(f"shares lie between 0 and 1, and there is at least one, got {self.shares}")
        if self.sinks < 0 or min(self.window, self.num_pairs) < 1 or self.epsilon <= 0:
            raise ValueError(f"window, num_pairs and epsilon are above 0 and sinks is not below, got {self}")

    @property
    def protected(self) -> Window:
        return Window(self.sinks, self.window)

    def sizes(self, num_tokens: int) -> list[int]:
        """Tokens in the pool at each share, of a prompt so long; shares that leave no choice are passed over."""
        entered = self.protected.pool(num_tokens)
        sizes = [int(share * num_tokens) - self.sinks - self.window for share in self.shares]
        return [size for size in sizes if 0 < size < entered.stop - entered.start]

    def check(self, trace: Trace, index: TraceIndex) -> None:
        """ValueError for a trace that says nothing of later attention, or in which nothing is ever dropped."""
        delay = index.settings.get("delay")
        if trace.later is None or delay != self.window:
            raise ValueError(
                f"trace {trace.key} was recorded with a delay of {delay}, and the window is {self.window}; record "
                f"traces with kvkeep trace --delay {self.window}, or train with their window"
            )
        if not self.sizes(trace.num_tokens):
            raise ValueError(
                f"trace {trace.key} has {trace.num_tokens} tokens, of which shares {self.shares} leave no pool beside "
                f"{self.sinks} sinks and {self.window} recent tokens; leave it out (--least-tokens), or keep "
                "larger shares"
            )


def new_scorers(index: TraceIndex, settings: Cutoff, *, turn_back: bool, seed: int, **shape: Any) -> Scorers:
    """Untrained scorers for the layers and heads of `index`; `shape` is what else `ScorerShape` takes."""
    frequencies = rotation_frequencies(index.fingerprint) if turn_back else torch.empty(0)
    sizes: dict[str, Any] = {
        "num_agents": len(agent_names(index)),
        "window": settings.window,
        "turned": 2 * len(frequencies),
    }
    return make_scorers(ScorerShape(**sizes, **shape), seed, frequencies)


class Lesson(NamedTuple):
    """What the teacher says of a prompt: the target of the tokens that enter the pool, and what each size keeps."""

    worth: Float[Tensor, "A m"]
    pools: dict[int, Newcomers]


class KVpopLearner(Learner):
    """The scorers of KVpop for the layers and heads of a folder of traces.

    Args:
        index: what the traces share.
        prompts: training prompts; the first few say what keys and values are typically like.
        architecture, hidden, memory, late: of the scorers, see `ScorerShape`.
        turn_back: whether the scorers read keys as they were before the model's rotation.
        seed: of their first weights.
    """

    def __init__(
        self,
        index: TraceIndex,
        prompts: Sequence[Trace],
        settings: Cutoff,
        *,
        architecture: str = "both",
        hidden: int = 64,
        memory: int = 32,
        late: bool = True,
        turn_back: bool = True,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        first = prompts[0]
        self.index, self.settings, self.device = index, settings, torch.device(device)
        self.names = agent_names(index)
        sizes = {"key_size": first.keys.shape[-1], "value_size": first.values.shape[-1]}
        options = {"architecture": architecture, "hidden": hidden, "memory": memory, "late": late}
        scorers = new_scorers(index, settings, turn_back=turn_back, seed=seed, **sizes, **options)
        self.network: Scorers = scorers.to(self.device)
        self.network.calibrate(self._tokens(prompts[place]) for place in range(min(len(prompts), NUM_CALIBRATION)))
        self._lessons: dict[str, Lesson] = {}

    def lesson(self, trace: Trace) -> Lesson:
        """What the teacher says of a prompt; remembered for the first prompts that are asked for.

        Raises:
            ValueError: for a prompt that nothing can be learned from.
        """
        known = self._lessons.get(trace.key)
        if known is None:
            self.settings.check(trace, self.index)
            assert trace.later is not None
            entered = self.settings.protected.pool(trace.num_tokens)
            worth = target(trace.later, self.settings.group, self.settings.epsilon).flatten(0, 1)[:, entered]
            worth = worth.to(self.device)
            known = Lesson(worth, {size: newcomers(worth, size) for size in self.settings.sizes(trace.num_tokens)})
            if len(self._lessons) < _REMEMBERED:
                self._lessons[trace.key] = known
        return known

    def loss(self, network: nn.Module, trace: Trace, generator: torch.Generator) -> Float[Tensor, " A"]:
        lesson, priority = self.lesson(trace), self._priority(network, trace)
        losses = [
            pair_loss(priority, lesson.worth, size, self.settings, generator, pool)
            for size, pool in lesson.pools.items()
        ]
        return torch.stack(losses).mean(0)

    def reward(self, network: nn.Module, trace: Trace) -> Float[Tensor, " A"]:
        """Share of what the teacher holds that is held, mean over sizes and a few moments up to the prompt's end."""
        lesson, priority = self.lesson(trace), self._priority(network, trace)
        return torch.stack([recall(priority, lesson.worth, size, _MOMENTS) for size in lesson.pools]).mean(0)

    def policy(self, network: nn.Module, training: dict[str, Any]) -> PolicyFile:
        assert isinstance(network, Scorers)
        return scorers_file(network, self.index.fingerprint, self.index.layers, training)

    def identity(self) -> dict[str, Any]:
        return {**asdict(self.settings), **asdict(self.network.shape), "model": self.index.fingerprint}

    def _tokens(self, trace: Trace) -> tuple[Tensor, Tensor]:
        keys, values = (array.flatten(0, 1).to(self.device).float() for array in (trace.keys, trace.values))
        return keys, values

    def _priority(self, network: nn.Module, trace: Trace) -> Float[Tensor, "A m"]:
        """Static priorities of the tokens that enter the pool."""
        assert isinstance(network, Scorers)
        entered = self.settings.protected.pool(trace.num_tokens)
        places = torch.arange(entered.start, entered.stop, device=self.device)
        return static_priority(network(*self._tokens(trace))[:, entered], places, network.log_decay)


def pair_loss(
    priority: Float[Tensor, "A m"],
    worth: Float[Tensor, "A m"],
    size: int,
    settings: Cutoff,
    generator: torch.Generator,
    pool: Newcomers | None = None,
) -> Float[Tensor, " A"]:
    """The loss over pairs drawn at moments at which something must go: any of them, and as many of the last quarter.

    Args:
        priority, worth: of the tokens that enter the pool: what is learned, and what the teacher goes by.
        size: of the pool; one that holds all of them gives no loss.
        pool: what the teacher did with each token, if that is known.
    """
    num_entered = worth.shape[1]
    if not 0 < size < num_entered:
        return 0 * priority.sum(1)
    half = (settings.num_pairs + 1) // 2
    starts = (size, max(size, num_entered * 3 // 4))
    drawn = [torch.randint(start, num_entered, (half,), generator=generator) for start in starts]
    moments = torch.cat(drawn)[: settings.num_pairs].to(worth.device)
    kept, boundary = (array[:, moments] for array in pool or newcomers(worth, size))
    newcomer = moments.expand(len(worth), -1)
    return boundary_loss(priority, worth, kept, newcomer, boundary, settings.pairs)


def recall(
    priority: Float[Tensor, "A m"], worth: Float[Tensor, "A m"], size: int, num_moments: int
) -> Float[Tensor, " A"]:
    """Share of the `size` tokens of greatest worth that are among those of greatest priority.

    The mean over moments, evenly spaced from the first at which anything must go to the end; one alone is the end.
    """
    m = worth.shape[1]
    stops = torch.linspace(m, size, num_moments + 1)[:-1].ceil().long().tolist()
    found = []
    for stop in stops:
        best, held = (array[:, :stop].topk(size, dim=1).indices for array in (worth, priority))
        marks = torch.zeros(len(worth), stop, device=worth.device).scatter_(1, held, 1.0)
        found.append(marks.gather(1, best).mean(1))
    return torch.stack(found).mean(0)


def train_kvpop(
    data: Data,
    out: str | Path,
    *,
    settings: Cutoff | None = None,
    recipe: Recipe | None = None,
    made_by: dict[str, Any] | None = None,
    team: Team | None = None,
    architecture: str = "both",
    hidden: int = 64,
    memory: int = 32,
    late: bool = True,
    turn_back: bool = True,
    **on: Any,
) -> Progress:
    """Train KVpop's scorers on traces of a frozen model; see `train`, whose callbacks it takes.

    >>> train_kvpop(open_data(["traces"]), "policy")
    >>> KVpop.from_pretrained("policy")

    Args:
        out: folder for the policy, and for what an interrupted training goes on from.
        made_by: command, commit and versions for the policy's manifest.
        architecture, hidden, memory, late: of the scorers, see `ScorerShape`.
        turn_back: whether the scorers read keys as they were before the model's rotation.
    """
    settings, recipe, team = settings or Cutoff(), recipe or RECIPE, team or Team()
    learner = KVpopLearner(
        data.index,
        data.prompts,
        settings,
        architecture=architecture,
        hidden=hidden,
        memory=memory,
        late=late,
        turn_back=turn_back,
        seed=recipe.seed,
        device=team.device,
    )
    return train_on(data, learner, asdict(settings), recipe, out, made_by=made_by, team=team, **on)


RECIPE = Recipe(steps=400, lr=5e-3, lr_end=1e-4, warmup=20, weight_decay=1e-4, clip=1.0, ema=0.97, every=50)
