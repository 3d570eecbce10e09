"""The agents of KVP: a small network for each KV head of each layer, all of them in stacked weights.

A agents, N tokens, D size of a key, V of a value, F features of a token.

An agent scores a token by its key, its value and its position alone. All agents asked run in one batched product.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

# width of the position embedding in the paper's released code
_POSITION_SIZE = 32
# of p / n, the distance to the end and the distance to the start
_NUM_PLACES = 3
# distances count by their logarithm; divided by this it is about 1 for a million tokens
_LOG_SCALE = 14.0

EVERY = slice(None)


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

    Raises:
        ValueError: for an unknown architecture or a size below 1.
    """

    num_agents: int
    key_size: int
    value_size: int
    architecture: str = "compact"
    hidden: int = 64
    recent: int = 16
    num_positions: int = 4096

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
        for name, size in asdict(self).items():
            if name not in ("architecture", "recent") and size < 1:
                raise ValueError(f"{name} of the agents must be at least 1, got {size}")


class Agents(nn.Module, ABC):
    """Scores for ranking. Every parameter is a stack `[A, ...]`, so that agents never mix."""

    def __init__(self, shape: AgentShape):
        super().__init__()
        self.shape = shape

    @abstractmethod
    def forward(
        self,
        keys: Float[Tensor, "*B A N D"],
        values: Float[Tensor, "*B A N V"],
        positions: Int[Tensor, "*B A N"],
        lengths: Int[Tensor, "*B"],
        rows: slice = EVERY,
    ) -> Float[Tensor, "*B A N"]:
        """Score of each token in fp32; only the order within an agent means something.

        Args:
            keys, values: as cached. They decide the arithmetic: fp32 in fp32, all else in bf16.
            positions: true positions; scores of empty slots (-1) are arbitrary.
            lengths: tokens each sequence has seen.
            rows: the agents asked, such as those of one layer.
        """

    def calibrate(self, samples: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        """Learn what is typical from (keys, values, positions, lengths) of a few prompts, before training starts."""
        return


class Compact(Agents):
    """Ours: key, value and place, each centred and scaled, through two hidden layers.

    A place is p / n and the logarithms of the distances to the end and to the start: nothing in it ends with the
    longest prompt seen in training. The first layer reads everything at once, so there is one large product.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, shape: AgentShape):
        super().__init__(shape)
        size = shape.key_size + shape.value_size + _NUM_PLACES
        self.register_buffer("centre", torch.zeros(shape.num_agents, 1, size))
        self.register_buffer("spread", torch.ones(shape.num_agents, 1, size))
        self.first, self.first_bias = _layer(shape.num_agents, size, shape.hidden)
        self.second, self.second_bias = _layer(shape.num_agents, shape.hidden, shape.hidden)
        self.last, _ = _layer(shape.num_agents, shape.hidden, 1)

    def forward(
        self,
        keys: Float[Tensor, "*B A N D"],
        values: Float[Tensor, "*B A N V"],
        positions: Int[Tensor, "*B A N"],
        lengths: Int[Tensor, "*B"],
        rows: slice = EVERY,
    ) -> Float[Tensor, "*B A N"]:
        dtype = _arithmetic(keys)
        # an autocast around the model must not round the scores
        with torch.autocast(keys.device.type, enabled=False):
            seen = self._inputs(keys, values, positions, lengths, dtype) - self.centre[rows].to(dtype)
            # the spread goes into the weights, which are far smaller than the inputs
            first = self.first[rows] / self.spread[rows].mT
            hidden = silu(_linear(seen, first, self.first_bias[rows]))
            hidden = silu(_linear(hidden, self.second[rows], self.second_bias[rows]))
            return _score(hidden, self.last[rows])

    def calibrate(self, samples: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        inputs = torch.cat([self._inputs(*sample, torch.float32) for sample in samples], dim=-2)
        self.centre.copy_(inputs.mean(-2, keepdim=True))
        # an input that never changes in the samples is not blown up
        self.spread.copy_(inputs.std(-2, keepdim=True).clamp(min=1e-2))

    def _inputs(
        self, keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> Float[Tensor, "*B A N F"]:
        places = _places(positions, lengths, self.shape.recent)
        return torch.cat([part.to(dtype) for part in (keys, values, places)], dim=-1)


class Paper(Agents):
    """The paper's agent (arXiv 2602.10238, as in its released code), with its learned table of positions."""

    def __init__(self, shape: AgentShape):
        super().__init__(shape)
        A, h = shape.num_agents, shape.hidden
        self.key, self.key_bias = _layer(A, shape.key_size, h)
        self.value, self.value_bias = _layer(A, shape.value_size, h)
        self.table = nn.Parameter(torch.randn(A, shape.num_positions, _POSITION_SIZE))
        self.first, self.first_bias = _layer(A, 2 * h + _POSITION_SIZE, h)
        self.second, self.second_bias = _layer(A, h, h)
        self.last, _ = _layer(A, h, 1)
        self.norms = nn.ParameterDict({name: _norm(A, h) for name in ("key", "value", "first", "second")})
        self.norms["place"] = _norm(A, _POSITION_SIZE)

    def forward(
        self,
        keys: Float[Tensor, "*B A N D"],
        values: Float[Tensor, "*B A N V"],
        positions: Int[Tensor, "*B A N"],
        lengths: Int[Tensor, "*B"],
        rows: slice = EVERY,
    ) -> Float[Tensor, "*B A N"]:
        dtype = _arithmetic(keys)

        def norm(name: str, x: Tensor) -> Tensor:
            gain, shift = self.norms[name][rows].to(dtype).unbind(-3)
            return layer_norm(x, x.shape[-1:]) * gain + shift

        with torch.autocast(keys.device.type, enabled=False):
            key = norm("key", _linear(keys.to(dtype), self.key[rows], self.key_bias[rows]))
            value = norm("value", _linear(values.to(dtype), self.value[rows], self.value_bias[rows]))
            place = norm("place", self._embedded(positions, rows).to(dtype))
            seen = torch.cat([key, value, place], dim=-1)
            hidden = silu(norm("first", _linear(seen, self.first[rows], self.first_bias[rows])))
            hidden = silu(norm("second", _linear(hidden, self.second[rows], self.second_bias[rows])))
            return _score(hidden, self.last[rows])

    def _embedded(self, positions: Tensor, rows: slice) -> Tensor:
        table = self.table[rows]
        agents = torch.arange(table.shape[0], device=table.device)[:, None]
        return table[agents, positions.clamp(0, self.shape.num_positions - 1).long()]


ARCHITECTURES: dict[str, type[Agents]] = {"compact": Compact, "paper": Paper}


def make_agents(shape: AgentShape, seed: int = 0) -> Agents:
    """Untrained agents, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ARCHITECTURES[shape.architecture](shape)


def load_agents(shape: AgentShape, tensors: Mapping[str, Tensor]) -> Agents:
    """Trained agents from their state, without gradients.

    Raises:
        ValueError: where the tensors do not belong to that shape.
    """
    with torch.device("meta"):
        agents = ARCHITECTURES[shape.architecture](shape)
    try:
        agents.load_state_dict(dict(tensors), assign=True)
    except RuntimeError as error:
        raise ValueError(f"these weights are not those of {shape}: {error}") from error
    return agents.requires_grad_(False)


def _places(positions: Int[Tensor, "*B A N"], lengths: Int[Tensor, "*B"], recent: int) -> Float[Tensor, "*B A N 3"]:
    n, p = lengths[..., None, None].float(), positions.clamp(min=0).float()
    to_end = (n - 1 - p).clamp(min=recent)
    return torch.stack([p / n, to_end.log1p() / _LOG_SCALE, p.log1p() / _LOG_SCALE], dim=-1)


def _layer(num_agents: int, size: int, hidden: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight `[A, size, hidden]` and bias `[A, 1, hidden]`."""
    weight = torch.randn(num_agents, size, hidden) / math.sqrt(size)
    return nn.Parameter(weight), nn.Parameter(torch.zeros(num_agents, 1, hidden))


def _norm(num_agents: int, size: int) -> nn.Parameter:
    """Gain and shift of a normalised layer, `[A, 2, 1, size]`."""
    return nn.Parameter(torch.stack([torch.ones(num_agents, 1, size), torch.zeros(num_agents, 1, size)], dim=1))


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight.to(x.dtype)) + bias.to(x.dtype)


def _score(hidden: Tensor, weight: Tensor) -> Tensor:
    # in fp32: rounded to 16 bits, scores would tie
    return (hidden * weight.float().mT).sum(-1)


def _arithmetic(keys: Tensor) -> torch.dtype:
    # fp16 would overflow where keys are large
    return keys.dtype if keys.dtype == torch.float32 else torch.bfloat16
