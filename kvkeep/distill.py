"""Distillation: a model that reads under the masks of its own scorers learns to say what it said when it read densely.

H KV heads, G query heads per KV head, T tokens of one text, t of a tile, V words, D head size.

The student's attention is dense under the mask that decoding token by token would be, worked out in tiles of queries
that are not kept for the gradient. Source: KVpop, arXiv 2607.05061, which trains model and scorers together.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import kl_div, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .cache import KVCache
from .fingerprint import fingerprint, head_size, num_kv_heads
from .future import log_importance
from .layer import AttendingLayer
from .learners import training_manifest
from .model import attach, cache_argument
from .policies.files import PolicyFile, write_policy
from .policies.kvpop import scorers_file
from .policies.scorers import Scorers
from .pool import Held, hold, static_priority
from .pool_learner import Cutoff, new_scorers, pair_loss
from .target import num_later, target
from .team import Team
from .trace import TraceIndex
from .train import Learner, Progress, Recipe, train

_TILE = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A piece of text to distil on."""

    key: str
    token_ids: Int[Tensor, "1 T"]


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What the student learns.

    Attributes:
        cutoff: budgets and targets of the scorers; one of its shares is drawn for each text.
        top: of the teacher's words at each place, how many are compared.
        model_lr: constant learning rate of the model's own weights; 0 leaves them as they are.

    Raises:
        ValueError: for an impossible number.
    """

    cutoff: Cutoff = field(default_factory=Cutoff)
    top: int = 256
    model_lr: float = 8e-5

    def __post_init__(self) -> None:
        if self.top < 1 or self.model_lr < 0:
            raise ValueError(f"top must be at least 1 and model_lr not below 0, got {self.top} and {self.model_lr}")


class Student(nn.Module):
    """A model with its scorers."""

    def __init__(self, model: PreTrainedModel, scorers: Scorers):
        super().__init__()
        self.model, self.scorers = model, scorers

    def forward(
        self, token_ids: Int[Tensor, "1 T"], share: float, cutoff: Cutoff, generator: torch.Generator
    ) -> tuple[Float[Tensor, "1 T V"], Float[Tensor, ""]]:
        """Logits when read at this share of the tokens, and the loss of the scorers, mean over layers and heads."""
        reading = _Reading(self, share, cutoff, generator)
        with attach(self.model):
            logits = self.model(input_ids=token_ids, use_cache=True, **{cache_argument(self.model): reading}).logits
        return logits, torch.cat(reading.losses).mean()


class DistillLearner(Learner):
    """Model and scorers together, taught by the model as it was.

    Args:
        model: what is trained, in evaluation mode; its weights change.
        architecture, hidden, memory, late: of the scorers, see `ScorerShape`.
        turn_back: whether the scorers read keys as they were before the model's rotation.
        scorers: trained ones to start from, in place of new ones.
    """

    network: Student

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Distillation,
        *,
        architecture: str = "both",
        hidden: int = 64,
        memory: int = 32,
        late: bool = True,
        turn_back: bool = True,
        seed: int = 0,
        scorers: Scorers | None = None,
    ):
        config = model.config.get_text_config(decoder=True)
        layers = [layer.index for layer in KVCache(model).managed]
        heads, size = num_kv_heads(config), head_size(config)
        self.index = TraceIndex(
            fingerprint=fingerprint(config), model="", layers=layers, heads=list(range(heads)), group=1, dtype=""
        )
        self.settings, self.names = settings, ["the student"]
        self.teacher = deepcopy(model).requires_grad_(False)
        if scorers is None:
            sizes = {"key_size": size, "value_size": size}
            options = {"architecture": architecture, "hidden": hidden, "memory": memory, "late": late}
            scorers = new_scorers(self.index, settings.cutoff, turn_back=turn_back, seed=seed, **sizes, **options)
        self.network = Student(model, scorers.to(model.device))

    def loss(self, network: nn.Module, text: Text, generator: torch.Generator) -> Float[Tensor, "1"]:
        shares = self.settings.cutoff.shares
        share = shares[int(torch.randint(len(shares), (1,), generator=generator))]
        divergence, of_scorers = self._read(network, text, share, generator)
        return (divergence + of_scorers)[None]

    def reward(self, network: nn.Module, text: Text) -> Float[Tensor, "1"]:
        """Minus the divergence from the teacher, in nats a token, mean over shares."""
        generator = torch.Generator().manual_seed(0)
        each = [self._read(network, text, share, generator)[0] for share in self.settings.cutoff.shares]
        return -torch.stack(each).mean()[None]

    def policy(self, network: nn.Module, training: dict[str, Any]) -> PolicyFile:
        assert isinstance(network, Student)
        return scorers_file(network.scorers, self.index.fingerprint, self.index.layers, training)

    def keep(self, out: Path, network: nn.Module, training: dict[str, Any]) -> None:
        """The scorers as a policy, and the model they were trained with in `model`."""
        assert isinstance(network, Student)
        network.model.save_pretrained(out / "model")
        write_policy(out, self.policy(network, training))

    def parts(self, network: nn.Module, recipe: Recipe) -> list[tuple[list[nn.Parameter], Callable[[int], float]]]:
        assert isinstance(network, Student)
        return [
            (list(network.scorers.parameters()), recipe.rate),
            (list(network.model.parameters()), lambda step: self.settings.model_lr),
        ]

    def identity(self) -> dict[str, Any]:
        scorers = asdict(self.network.scorers.shape)
        return {**asdict(self.settings), **scorers, "model": self.index.fingerprint}

    def _read(
        self, network: nn.Module, text: Text, share: float, generator: torch.Generator
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Divergence of the student from the teacher on the teacher's likeliest words, and the loss of the scorers."""
        token_ids = text.token_ids.to(self.teacher.device)
        with torch.no_grad():
            logits = self.teacher(input_ids=token_ids, use_cache=False).logits.float()
            top = logits.topk(min(self.settings.top, logits.shape[-1]), dim=-1)
        logits, of_scorers = network(token_ids, share, self.settings.cutoff, generator)
        says = logits.float().gather(-1, top.indices).log_softmax(-1)
        divergence = kl_div(says, top.values.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
        return divergence, of_scorers


def distil(
    learner: DistillLearner,
    texts: Sequence[Text],
    validation: Sequence[Text],
    out: str | Path,
    *,
    recipe: Recipe,
    made_by: dict[str, Any] | None = None,
    team: Team | None = None,
    **on: Any,
) -> Progress:
    """Train model and scorers together; see `train`, whose callbacks it takes.

    `out` gets the scorers as a policy, the model beside it in `model`, and until the end what an interrupted run goes
    on from. Several processes share the texts of each batch; each holds the whole model.

    Raises:
        ValueError: for texts so short that no share leaves anything to drop.
    """
    team, settings = team or Team(), learner.settings
    for text in (*texts, *validation):
        if not settings.cutoff.sizes(text.token_ids.shape[1]):
            raise ValueError(
                f"text {text.key} has {text.token_ids.shape[1]} tokens, of which shares {settings.cutoff.shares} leave "
                f"no pool beside {settings.cutoff.sinks} sinks and {settings.cutoff.window} recent tokens; give longer "
                "texts, or keep larger shares"
            )
    data = {"texts": [text.key for text in texts], "validation": [text.key for text in validation]}
    manifest = training_manifest(made_by, data, asdict(settings), recipe, team)
    return train(learner, texts, validation, recipe, out, manifest=manifest, team=team, **on)


class _Reading(Cache):
    """One forward of a student over a text: holds nothing but the losses of its scorers, `[H]` of each layer."""

    def __init__(self, student: Student, share: float, cutoff: Cutoff, generator: torch.Generator):
        self.student, self.share, self.cutoff, self.generator = student, share, cutoff, generator
        self.losses: list[Tensor] = []
        like = KVCache(student.model)
        orders = {layer.index: layer.order for layer in like.managed}
        layers = [
            _ReadingLayer(self, orders[index]) if index in orders else layer for index, layer in enumerate(like.layers)
        ]
        super().__init__(layers=layers)


class _ReadingLayer(AttendingLayer):
    def __init__(self, reading: _Reading, order: int):
        super().__init__()
        self.reading, self.order = reading, order
        self.is_initialized = True

    def attend(
        self,
        queries: Float[Tensor, "1 HG T D"],
        keys: Float[Tensor, "1 H T D"],
        values: Float[Tensor, "1 H T Dv"],
        valid: Tensor | None,
        scale: float,
    ) -> Float[Tensor, "1 HG T Dv"]:
        cutoff, T = self.reading.cutoff, keys.shape[2]
        priority = self._priority(keys[0].detach(), values[0].detach())
        size = max(0, int(self.reading.share * T) - cutoff.sinks - cutoff.window)
        held = hold(priority.detach(), cutoff.protected, size)
        tiles = [
            # what is seen is worked out again for the gradient: all tiles' would be a map
            checkpoint(_attend_tile, rows, keys, values, held, at, scale, use_reentrant=False)
            for rows, at in zip(
                queries.split(_TILE, dim=2), torch.arange(T, device=keys.device).split(_TILE), strict=True
            )
        ]
        output, sums = (torch.cat(parts, dim=2) for parts in zip(*tiles, strict=True))
        with torch.no_grad():
            paid = log_importance(queries, keys, 0, scale, sums, delay=cutoff.window)[0].exp()
            worth = target(paid / num_later(T, cutoff.window, keys.device), cutoff.group, cutoff.epsilon)
        entered = cutoff.protected.pool(T)
        self.reading.losses.append(
            pair_loss(priority[:, entered], worth[:, entered], size, cutoff, self.reading.generator)
        )
        return output

    def _priority(self, keys: Float[Tensor, "H T D"], values: Float[Tensor, "H T Dv"]) -> Float[Tensor, "H T"]:
        scorers, heads = self.reading.student.scorers, keys.shape[0]
        rows = slice(self.order * heads, (self.order + 1) * heads)
        places = torch.arange(keys.shape[1], device=keys.device)
        return static_priority(scorers(keys, values, rows), places, scorers.log_decay[rows])

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def _attend_tile(
    queries: Float[Tensor, "1 HG t D"], keys: Tensor, values: Tensor, held: Held, at: Int[Tensor, " t"], scale: float
) -> tuple[Float[Tensor, "1 HG t Dv"], Float[Tensor, "1 HG t"]]:
    """Attention of some queries to what they find, and the log-sum-exp over that."""
    reach = int(at[-1]) + 1
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys[:, :, :reach], values[:, :, :reach]
    mask = held.visible(at)[..., :reach].repeat_interleave(group, dim=0)[None]
    output = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=group > 1)
    with torch.no_grad():
        rows = (queries * scale).unflatten(1, (-1, group)).flatten(2, 3).float()
        logits = (rows @ keys.float().mT).view(1, queries.shape[1], -1, reach)
        sums = logits.masked_fill_(~mask, -torch.inf).logsumexp(-1)
    return output, sums
