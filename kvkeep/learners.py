"""What the training loop trains: the agents of KVP, and the part that all learners have in common.

A agents, n ranked tokens of a prompt, D head size.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .frequencies import rotation_frequencies
from .losses import draw_orders, expected_cost_ratio, reward, sampled_loss
from .policies.agents import Agents, AgentShape, make_agents
from .policies.files import PolicyFile
from .policies.kvp import GLANCE, agents_file, glimpses_of
from .team import Team
from .trace import Trace, TraceIndex, refuse_unknown
from .train import Learner, Progress, Recipe, train
from .training_data import Data

OBJECTIVES = ("exact", "sampled")

# prompts that say what keys and values are typically like
NUM_CALIBRATION = 4


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """What KVP's agents learn.

    Attributes:
        objective: "exact" (the expected cost itself) or "sampled" (the paper's policy gradient).
        draws: rankings drawn of each prompt (sampled).
        against: random tokens that each token is compared with in a step (exact); 0 compares with all.
        group: what of a KV head's query heads counts: "max" or "mean" of them for each future query, or the "square" of
            the largest.
        futures: "mean" or "max" over several futures of a prompt.
        squares: how much squared attention counts beside attention: a token that one query reads alone, as when an
            answer copies it, then outweighs one that many queries read a little.
        sinks, recent: tokens at the start and end that are always kept, and so not ranked.

    Raises:
        ValueError: for an unknown name or an impossible number.
    """

    objective: str = "exact"
    draws: int = 8
    against: int = 128
    group: str = "max"
    futures: str = "mean"
    squares: float = 0.0
    sinks: int = 4
    recent: int = 16

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        refuse_unknown(self.group, self.futures)
        if self.draws < 2:
            raise ValueError(f"a leave-one-out baseline needs at least 2 draws, got {self.draws}")
        if min(self.against, self.squares, self.sinks, self.recent) < 0:
            raise ValueError(f"against, squares, sinks and recent cannot be negative, got {self}")

    def check(self, trace: Trace) -> None:
        """ValueError for a prompt with nothing to rank between its sinks and its recent tokens."""
        if trace.num_tokens - self.sinks - self.recent < 2:
            raise ValueError(
                f"trace {trace.key} has {trace.num_tokens} tokens, of which the first {self.sinks} and the last "
                f"{self.recent} are always kept, and at least 2 others are needed to rank; leave it out, or keep fewer"
            )


class Example(NamedTuple):
    """The tokens of a prompt that are ranked, as its agents see them."""

    keys: Float[Tensor, "A n D"]
    values: Float[Tensor, "A n Dv"]
    positions: Tensor
    length: Tensor
    received: Float[Tensor, "A n 2"] | None
    importance: Float[Tensor, "A n"]


class KVPLearner(Learner):
    """The agents of KVP for the layers and heads of a folder of traces.

    Args:
        index: what the traces share.
        prompts: training prompts; the first few say what keys and values are typically like.
        architecture, hidden: of the agents, see `AgentShape`.
        turn_back: whether the agents see keys as the next query would (`AgentShape.sight`), or as they are cached.
        glance: newest queries whose attention they see (`AgentShape.glance`), 0 for none.
        seed: of their first weights.

    Raises:
        ValueError: where keys are to be turned back and the fingerprint does not tell how, see `rotation_frequencies`;
            where that attention was not recorded.
    """

    def __init__(
        self,
        index: TraceIndex,
        prompts: Sequence[Trace],
        settings: Ranked,
        *,
        architecture: str = "compact",
        hidden: int = 64,
        turn_back: bool = True,
        glance: int = GLANCE,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        first = prompts[0]
        frequencies = rotation_frequencies(index.fingerprint) if turn_back else torch.empty(0)
        self.index, self.settings, self.device = index, settings, torch.device(device)
        self.names = agent_names(index)
        shape = AgentShape(
            num_agents=len(self.names),
            key_size=first.keys.shape[-1],
            value_size=first.values.shape[-1],
            architecture=architecture,
            hidden=hidden,
            recent=settings.recent,
            turned=2 * len(frequencies),
            glance=glance,
        )
        self.network: Agents = make_agents(shape, seed, frequencies).to(self.device)
        samples = [self.example(prompts[place]) for place in range(min(len(prompts), NUM_CALIBRATION))]
        self.network.calibrate([sample[:-1] for sample in samples])

    def example(self, trace: Trace) -> Example:
        """The ranked tokens of a prompt.

        Raises:
            ValueError: for a prompt too short to have any.
        """
        n, settings = trace.num_tokens, self.settings
        settings.check(trace)
        ranked = slice(settings.sinks, n - settings.recent)

        def agents(array: Tensor) -> Tensor:
            return array.flatten(0, 1)[:, ranked].to(self.device)

        importance = agents(trace.importance(settings.group, settings.futures))
        if settings.squares:
            importance = importance + settings.squares * agents(trace.importance("square", settings.futures))
        positions = torch.arange(n, dtype=torch.int32).expand(len(self.names), -1)[:, ranked].to(self.device)
        length = torch.tensor(n, device=self.device)
        received, glance = None, self.network.shape.glance
        if glance:
            names = glimpses_of(glance)
            received = torch.stack([agents(_glimpsed(trace, names[last])) for last in (glance, 1)], dim=-1)
        return Example(agents(trace.keys), agents(trace.values), positions, length, received, importance)

    def loss(self, network: nn.Module, trace: Trace, generator: torch.Generator) -> Float[Tensor, " A"]:
        example = self.example(trace)
        scores = network(*example[:-1])
        if self.settings.objective == "sampled":
            orders = draw_orders(scores, self.settings.draws, generator)
            return sampled_loss(scores, example.importance, orders).loss
        n, against = scores.shape[-1], None
        if 0 < self.settings.against < n:
            against = torch.randperm(n, generator=generator)[: self.settings.against].to(self.device)
        return expected_cost_ratio(scores, example.importance, against)

    def reward(self, network: nn.Module, trace: Trace) -> Float[Tensor, " A"]:
        example = self.example(trace)
        return reward(example.importance, network(*example[:-1]).argsort(dim=-1, descending=True))

    def policy(self, network: nn.Module, training: dict[str, Any]) -> PolicyFile:
        assert isinstance(network, Agents)
        return agents_file(network, self.index.fingerprint, self.index.layers, training)

    def identity(self) -> dict[str, Any]:
        return {**asdict(self.settings), **asdict(self.network.shape), "model": self.index.fingerprint}


def train_kvp(
    data: Data,
    out: str | Path,
    *,
    settings: Ranked | None = None,
    recipe: Recipe | None = None,
    architecture: str = "compact",
    hidden: int = 64,
    turn_back: bool = True,
    glance: int = GLANCE,
    made_by: dict[str, Any] | None = None,
    team: Team | None = None,
    **on: Any,
) -> Progress:
    """Train KVP's agents on traces; see `train`, whose callbacks `on_step` and `on_validation` it takes.

    >>> train_kvp(open_data(["traces"]), "policy")
    >>> KVP.from_pretrained("policy")

    Args:
        out: folder for the policy, and for what an interrupted training goes on from.
        architecture, hidden: of the agents, see `AgentShape`.
        turn_back: whether the agents see keys as the next query would (`AgentShape.sight`), or as they are cached.
        glance: newest queries whose attention they see (`AgentShape.glance`), 0 for none.
        made_by: command, commit and versions for the policy's manifest.
    """
    settings, recipe, team = settings or Ranked(), recipe or Recipe(), team or Team()
    learner = KVPLearner(
        data.index,
        data.prompts,
        settings,
        architecture=architecture,
        hidden=hidden,
        turn_back=turn_back,
        glance=glance,
        seed=recipe.seed,
        device=team.device,
    )
    return train_on(data, learner, asdict(settings), recipe, out, made_by=made_by, team=team, **on)


def train_on(
    data: Data,
    learner: Learner,
    objective: dict[str, Any],
    recipe: Recipe,
    out: str | Path,
    *,
    made_by: dict[str, Any] | None,
    team: Team,
    **on: Any,
) -> Progress:
    """Train a learner on data, with a manifest that says on what, to what end and how."""
    manifest = training_manifest(made_by, data.summary(), objective, recipe, team)
    return train(learner, data.prompts, data.validation, recipe, out, manifest=manifest, team=team, **on)


def training_manifest(
    made_by: dict[str, Any] | None, data: dict[str, Any], objective: dict[str, Any], recipe: Recipe, team: Team
) -> dict[str, Any]:
    """What a policy's file says of its training, beside what was reached."""
    return {
        **(made_by or {}),
        "data": data,
        "objective": objective,
        "recipe": asdict(recipe),
        "processes": team.size,
    }


def _glimpsed(trace: Trace, glimpse: str) -> Float[Tensor, "L H n"]:
    if glimpse not in trace.worths:
        raise ValueError(
            f"trace {trace.key} does not hold the attention that agents are to see ({glimpse}); record it with "
            f"kvkeep trace --policy {shlex.quote(glimpse)}, or let them see none (glance=0, --glance 0)"
        )
    return trace.worths[glimpse]


def agent_names(index: TraceIndex) -> list[str]:
    """What each KV head of each layer is called in messages."""
    return [f"layer {layer}, head {head}" for layer in index.layers for head in index.heads]
