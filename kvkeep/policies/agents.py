"""The agents of KVP: a small network for each KV head of each layer, all of them in stacked weights.

A agents, N tokens, D size of a key, V of a value, F features of a token.

An agent scores a token by its key, its value, its position and, if it glances, what the newest queries read of it. All
agents asked run in one batched product.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from ..arithmetic import multiplies_16_bits
from ..rotation import RotaryTable, rotary_of, rotate
from .stacks import EVERY, linear, make_stack, stacked_layer, stacked_norm, stacks_from

# width of the position embedding in the paper's released code
_POSITION_SIZE = 32
# of p / n, the distance to the end and the distance to the start
_NUM_PLACES = 3
# distances count by their logarithm; divided by this it is about 1 for a million tokens
_LOG_SCALE = 14.0
# attention counts by the logarithm of how many times an even share it is; as little as this is none
_NO_ATTENTION = 1e-3
_ATTENTION_SCALE = 3.0


@dataclass(frozen=True, kw_only=True)
class AgentShape:
    """The size and kind of a set of agents, as it stands in a policy file.

    Attributes:
        num_agents: layers times KV heads; the heads of a layer stand side by side.
        key_size, value_size: numbers of a key and of a value.
        architecture: "compact" (ours) or "paper".
        hidden: width of the hidden layers.
        recent: tokens at the end that training did not rank; compact agents see no distance below this.
        num_positions: rows of the paper's position table; later positions share the last.
        turned: numbers of a key that the model's rotation turns, which are turned as the next query would see them
            before they are read; 0 reads keys as they are cached.
        sight: what is further from the end is seen as if it stood so far from it.
        glance: the agents also see the attention that a token got from the newest query, and from so many of the
            newest in the mean; 0 sees neither.

    Raises:
        ValueError: for an unknown architecture, a size below 1 or a glance below 0.
    """

    num_agents: int
    key_size: int
    value_size: int
    architecture: str = "compact"
    hidden: int = 64
    recent: int = 16
    num_positions: int = 4096
    turned: int = 0
    sight: int = 1024
    glance: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
        for name, size in asdict(self).items():
            if name not in ("architecture", "recent", "turned", "sight", "glance") and size < 1:
                raise ValueError(f"{name} of the agents must be at least 1, got {size}")
        if self.glance < 0:
            raise ValueError(f"agents glance at the newest queries, or at 0 of them, got {self.glance}")


class Agents(nn.Module, ABC):
    """Scores for ranking. Every parameter is a stack `[A, ...]`, so that agents never mix."""

    frequencies: Tensor

    def __init__(self, shape: AgentShape):
        super().__init__()
        if shape.turned:
            self.register_buffer("frequencies", torch.zeros(shape.turned // 2))
        self.shape = shape
        # the same for all layers, so it is worked out once
        self._table = RotaryTable(self._rotary)

    @abstractmethod
    def forward(
        self,
        keys: Float[Tensor, "*B A N D"],
        values: Float[Tensor, "*B A N V"],
        positions: Int[Tensor, "*B A N"],
        lengths: Int[Tensor, "*B"],
        received: Float[Tensor, "*B A N 2"] | None = None,
        rows: slice = EVERY,
    ) -> Float[Tensor, "*B A N"]:
        """Score of each token in fp32; only the order within an agent means something.

        Args:
            keys, values: as cached. They decide the arithmetic: 16-bit ones are multiplied in bf16 where the device
                does that quickly, all else in fp32.
            positions: true positions; scores of empty slots (-1) are arbitrary.
            lengths: tokens each sequence has seen.
            received: mean attention from the newest `AgentShape.glance` queries, and attention from the newest, where
                the agents see any.
            rows: the agents asked, such as those of one layer.
        """

    def calibrate(self, samples: Iterable[Sequence[Any]]) -> None:
        """Learn what is typical from what `forward` reads of a few prompts, before training starts."""
        return

    def _in_sight(
        self, keys: Float[Tensor, "*B A N D"], positions: Int[Tensor, "*B A N"], lengths: Int[Tensor, "*B"]
    ) -> Float[Tensor, "*B A N D"]:
        """Keys turned back from their positions, and on as far as they lie behind the end, `sight` tokens at most."""
        if not self.shape.turned:
            return keys
        # in a prompt every head holds the same positions, as one row that is repeated without a copy
        if positions.stride(-2) == 0:
            positions = positions[..., :1, :]
        at = positions.clamp(min=0)
        back = at + (lengths[..., None, None] - 1 - at).clamp(max=self.shape.sight)
        cos, sin = self._table.at(back)
        return rotate(keys.float(), cos, -sin)

    def _glanced(
        self, received: Float[Tensor, "*B A N 2"] | None, lengths: Int[Tensor, "*B"]
    ) -> list[Float[Tensor, "*B A N 2"]]:
        """The attention the agents see, as more numbers of each token; nothing where they see none."""
        if not self.shape.glance:
            return []
        assert received is not None
        shares = received.float() * lengths[..., None, None, None]
        return [(shares + _NO_ATTENTION).log() / _ATTENTION_SCALE]

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_of(self.frequencies)(positions)


class Compact(Agents):
    """Ours: key, value and place, each centred and scaled, through two hidden layers.

    A place is p / n and the logarithms of the distances to the end and to the start: nothing in it ends with the
    longest prompt seen in training. The first layer reads everything at once, so there is one large product.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, shape: AgentShape):
        super().__init__(shape)
        size = shape.key_size + shape.value_size + _NUM_PLACES + _num_glances(shape)
        self.register_buffer("centre", torch.zeros(shape.num_agents, 1, size))
        self.register_buffer("spread", torch.ones(shape.num_agents, 1, size))
        self.first, self.first_bias = stacked_layer(shape.num_agents, size, shape.hidden)
        self.second, self.second_bias = stacked_layer(shape.num_agents, shape.hidden, shape.hidden)
        self.last, _ = stacked_layer(shape.num_agents, shape.hidden, 1)

    def forward(
        self,
        keys: Float[Tensor, "*B A N D"],
        values: Float[Tensor, "*B A N V"],
        positions: Int[Tensor, "*B A N"],
        lengths: Int[Tensor, "*B"],
        received: Float[Tensor, "*B A N 2"] | None = None,
        rows: slice = EVERY,
    ) -> Float[Tensor, "*B A N"]:
        dtype = _arithmetic(keys)
        # an autocast around the model must not round the scores
        with torch.autocast(keys.device.type, enabled=False):
            seen = self._inputs(keys, values, positions, lengths, received, dtype=dtype)
            seen.sub_(self.centre[rows].to(dtype))
            # the spread goes into the weights, which are far smaller than the inputs
            first = self.first[rows] / self.spread[rows].mT
            hidden = silu(linear(seen, first, self.first_bias[rows]))
            hidden = silu(linear(hidden, self.second[rows], self.second_bias[rows]))
            return _score(hidden, self.last[rows])

    def calibrate(self, samples: Iterable[Sequence[Any]]) -> None:
        inputs = torch.cat([self._inputs(*sample, dtype=torch.float32) for sample in samples], dim=-2)
        self.centre.copy_(inputs.mean(-2, keepdim=True))
        # an input that never changes in the samples is not blown up
        self.spread.copy_(inputs.std(-2, keepdim=True).clamp(min=1e-2))

    def _inputs(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        lengths: Tensor,
        received: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> Float[Tensor, "*B A N F"]:
        places = _places(positions, lengths, self.shape.recent)
        parts = (self._in_sight(keys, positions, lengths), values, places, *self._glanced(received, lengths))
        sizes = [part.shape[-1] for part in parts]
        inputs = torch.empty(*keys.shape[:-1], sum(sizes), dtype=dtype, device=keys.device)
        for part, room in zip(parts, inputs.split(sizes, dim=-1), strict=True):
            room.copy_(part)
        return inputs


class Paper(Agents):
    """The paper's agent (arXiv 2602.10238, as in its released code), with its learned table of positions."""

    def __init__(self, shape: AgentShape):
        super().__init__(shape)
        A, h = shape.num_agents, shape.hidden
        self.key, self.key_bias = stacked_layer(A, shape.key_size, h)
        self.value, self.value_bias = stacked_layer(A, shape.value_size, h)
        self.table = nn.Parameter(torch.randn(A, shape.num_positions, _POSITION_SIZE))
        self.first, self.first_bias = stacked_layer(A, 2 * h + _POSITION_SIZE + _num_glances(shape), h)
        self.second, self.second_bias = stacked_layer(A, h, h)
        self.last, _ = stacked_layer(A, h, 1)
        self.norms = nn.ParameterDict({name: stacked_norm(A, h) for name in ("key", "value", "first", "second")})
        self.norms["place"] = stacked_norm(A, _POSITION_SIZE)

    def forward(
        self,
        keys: Float[Tensor, "*B A N D"],
        values: Float[Tensor, "*B A N V"],
        positions: Int[Tensor, "*B A N"],
        lengths: Int[Tensor, "*B"],
        received: Float[Tensor, "*B A N 2"] | None = None,
        rows: slice = EVERY,
    ) -> Float[Tensor, "*B A N"]:
        dtype = _arithmetic(keys)

        def norm(name: str, x: Tensor) -> Tensor:
            gain, shift = self.norms[name][rows].to(dtype).unbind(-3)
            return layer_norm(x, x.shape[-1:]) * gain + shift

        with torch.autocast(keys.device.type, enabled=False):
            seen_keys = self._in_sight(keys, positions, lengths).to(dtype)
            key = norm("key", linear(seen_keys, self.key[rows], self.key_bias[rows]))
            value = norm("value", linear(values.to(dtype), self.value[rows], self.value_bias[rows]))
            place = norm("place", self._embedded(positions, rows).to(dtype))
            seen = torch.cat(
                [key, value, place, *(part.to(dtype) for part in self._glanced(received, lengths))], dim=-1
            )
            hidden = silu(norm("first", linear(seen, self.first[rows], self.first_bias[rows])))
            hidden = silu(norm("second", linear(hidden, self.second[rows], self.second_bias[rows])))
            return _score(hidden, self.last[rows])

    def _embedded(self, positions: Tensor, rows: slice) -> Tensor:
        table = self.table[rows]
        agents = torch.arange(table.shape[0], device=table.device)[:, None]
        return table[agents, positions.clamp(0, self.shape.num_positions - 1).long()]


ARCHITECTURES: dict[str, type[Agents]] = {"compact": Compact, "paper": Paper}


def make_agents(shape: AgentShape, seed: int = 0, frequencies: Tensor | None = None) -> Agents:
    """Untrained agents, the same for the same seed.

    Args:
        frequencies: by which the model's rotation turns pairs of dimensions a position, where keys are turned back.
    """
    return make_stack(lambda: ARCHITECTURES[shape.architecture](shape), seed, frequencies if shape.turned else None)


def load_agents(shape: AgentShape, tensors: Mapping[str, Tensor]) -> Agents:
    """Trained agents from their state, without gradients.

    Raises:
        ValueError: where the tensors do not belong to that shape.
    """
    return stacks_from(lambda: ARCHITECTURES[shape.architecture](shape), tensors, shape)


def _places(positions: Int[Tensor, "*B A N"], lengths: Int[Tensor, "*B"], recent: int) -> Float[Tensor, "*B A N 3"]:
    n, p = lengths[..., None, None].float(), positions.clamp(min=0).float()
    to_end = (n - 1 - p).clamp(min=recent)
    return torch.stack([p / n, to_end.log1p() / _LOG_SCALE, p.log1p() / _LOG_SCALE], dim=-1)


def _num_glances(shape: AgentShape) -> int:
    return 2 if shape.glance else 0


def _score(hidden: Tensor, weight: Tensor) -> Tensor:
    # in fp32: rounded to 16 bits, scores would tie
    return (hidden * weight.float().mT).sum(-1)


def _arithmetic(keys: Tensor) -> torch.dtype:
    # never fp16, which would overflow where keys are large
    quick = keys.dtype != torch.float32 and multiplies_16_bits(keys.device)
    return torch.bfloat16 if quick else torch.float32
