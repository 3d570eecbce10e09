"""The scorers of KVpop: for each KV head of each layer a small network that says once what a token will be worth.

A agents (one a KV head), B sequences, n tokens in a row, T new tokens, D size of a key, V of a value, F of both,
M size of the memory, P features it is addressed by (2 M).

A scorer reads the token itself, or a memory of the tokens around it, or both. The memory (an mLSTM) runs along with the
sequence and may be read late: a token is judged after the `delay` tokens behind it were taken in.
Source: KVpop, arXiv 2607.05061; reading both is ours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import layer_norm, logsigmoid, pad, silu

from ..rotation import rotary_of, rotate
from .stacks import EVERY, linear, make_stack, stacked_layer, stacked_norm, stacks_from

# a token's worth falls by this factor a step, between the two as a head has learned
SLOWEST, FASTEST = 0.999999, 0.999
# untrained, the memory forgets half of a token within some 40 more
_FORGET_BIAS = 4.0
# tokens that are taken in at once
_CHUNK = 32

# name -> whether the token is read itself, and whether by a memory
ARCHITECTURES = {"mlp": (True, False), "memory": (False, True), "both": (True, True)}


@dataclass(frozen=True, kw_only=True)
class ScorerShape:
    """The size and kind of a set of scorers, as it stands in a policy file.

    Attributes:
        num_agents: layers times KV heads; the heads of a layer stand side by side.
        key_size, value_size: numbers of a key and of a value.
        architecture: "mlp" (the token alone), "memory" (the paper's), or "both".
        hidden: width of the layer that reads the token itself.
        memory: numbers that the memory keeps under each of its features, and half as many features.
        window: tokens of the recent window, behind which a token competes.
        late: whether the memory is read when a token leaves that window; else when it comes.
        turned: numbers of a key that the model's rotation turns, which are turned back before they are read; 0 reads
            keys as they are cached.

    Raises:
        ValueError: for an unknown architecture or a size below 1.
    """

    num_agents: int
    key_size: int
    value_size: int
    architecture: str = "both"
    hidden: int = 64
    memory: int = 32
    window: int = 64
    late: bool = True
    turned: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
        for name, size in asdict(self).items():
            if name not in ("architecture", "late", "turned") and size < 1:
                raise ValueError(f"{name} of the scorers must be at least 1, got {size}")
        if self.turned % 2 or not 0 <= self.turned <= self.key_size:
            raise ValueError(f"turned is an even number of the {self.key_size} of a key, got {self.turned}")

    @property
    def reads_token(self) -> bool:
        return ARCHITECTURES[self.architecture][0]

    @property
    def reads_memory(self) -> bool:
        return ARCHITECTURES[self.architecture][1]

    @property
    def delay(self) -> int:
        """Tokens that come between a token and its judgement."""
        return self.window if self.late and self.reads_memory else 0


class Memory(NamedTuple):
    """What a memory holds: numbers and their total weight under each feature, divided by exp(`level`)."""

    held: Float[Tensor, "*B A P M1"]
    level: Float[Tensor, "*B A 1"]


class Scorers(nn.Module):
    """Scores in fp32; only their order within an agent means something. Every parameter is a stack `[A, ...]`."""

    centre: Tensor
    spread: Tensor
    frequencies: Tensor
    folded: Tensor | None
    folded_bias: Tensor | None
    decay: Tensor | None

    def __init__(self, shape: ScorerShape):
        super().__init__()
        if shape.turned:
            self.register_buffer("frequencies", torch.zeros(shape.turned // 2))
        self.shape = shape
        size = shape.key_size + shape.value_size
        # what is read of a token when it is judged, and what the memory takes in of it
        hidden, memory = shape.hidden * shape.reads_token, shape.memory * shape.reads_memory
        self._asked, self._hidden = hidden + memory, hidden
        width = self._asked + (2 * memory + 2 if memory else 0)
        self.register_buffer("centre", torch.zeros(shape.num_agents, 1, size))
        self.register_buffer("spread", torch.ones(shape.num_agents, 1, size))
        self.first, self.first_bias = stacked_layer(shape.num_agents, size, width)
        self.last, _ = stacked_layer(shape.num_agents, hidden + memory, 1)
        # worked out once where nothing is learned any more; buffers, so that they go where the weights go
        for name in ("folded", "folded_bias", "decay"):
            self.register_buffer(name, None, persistent=False)
        self.age = nn.Parameter(torch.zeros(shape.num_agents, 1))
        if memory:
            self.norm = stacked_norm(shape.num_agents, memory)
            with torch.no_grad():
                self.first_bias[..., -1] = _FORGET_BIAS

    @property
    def log_decay(self) -> Float[Tensor, "A 1"]:
        """Logarithm of the factor by which a token's worth falls with each step."""
        if self.decay is not None:
            return self.decay
        slowest, fastest = (torch.tensor(rate, dtype=torch.float64).log().item() for rate in (SLOWEST, FASTEST))
        return fastest + self.age.sigmoid() * (slowest - fastest)

    def forward(
        self, keys: Float[Tensor, "*B A n D"], values: Float[Tensor, "*B A n V"], rows: slice = EVERY
    ) -> Float[Tensor, "*B A n"]:
        """The score of each token of a whole sequence; the last `delay`, which nobody judges yet, have 0.

        Args:
            rows: the agents asked, such as those of one layer.
        """
        n, delay = keys.shape[-2], self.shape.delay
        read = self._read(self.tokens(keys, values, torch.arange(n, device=keys.device)), rows)
        asked, taken = read[..., : self._asked], read[..., self._asked :]
        late = pad(asked, (0, 0, delay, 0))[..., :n, :]
        scores, _ = self._judge(late, taken, self.blank(keys.shape[:-2], keys.device), None, rows)
        return pad(scores[..., delay:], (0, min(delay, n)))

    def tokens(
        self, keys: Float[Tensor, "*B n D"], values: Float[Tensor, "*B n V"], positions: Int[Tensor, "*_ n"]
    ) -> Float[Tensor, "*B n F"]:
        """What is read of tokens, in fp32: keys, turned back to position 0, and values, side by side."""
        keys = keys.float()
        if self.shape.turned:
            cos, sin = rotary_of(self.frequencies)(positions)
            keys = rotate(keys, cos, -sin)
        return torch.cat([keys, values.float()], dim=-1)

    def judge(
        self,
        asked: Float[Tensor, "B A T F"],
        new: Float[Tensor, "B A T F"],
        memory: Memory | None,
        valid: Bool[Tensor, "B 1 T"] | None = None,
        rows: slice = EVERY,
    ) -> tuple[Float[Tensor, "B A T"], Memory | None]:
        """The scores of T tokens, each judged once the new token at the same place is taken in, and what is then held.

        Args:
            asked: the tokens that are judged (`tokens`).
            new: those that are taken in.
            memory: what was held before them; None without a memory.
            valid: False where a new token is padding, which changes nothing; None where none is.
            rows: the agents asked, such as those of one layer.
        """
        # an autocast around the model must not round the scores
        with torch.autocast(asked.device.type, enabled=False):
            read = self._read(asked, rows, slice(None, self._asked))
            taken = self._read(new, rows, slice(self._asked, None)) if memory is not None else read[..., :0]
            return self._judge(read, taken, memory, valid, rows)

    def blank(self, batch: Iterable[int], device: torch.device | str = "cpu") -> Memory | None:
        """A memory of nothing for agents `[*B, A]`; None without a memory."""
        if not self.shape.reads_memory:
            return None
        held, level = memory_shapes(self.shape)
        return Memory(*(torch.zeros(*batch, *size, device=device) for size in (held, level)))

    def calibrate(self, samples: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Learn what keys and values `[A, n, ...]` of whole sequences are typically like, before training starts."""
        places = lambda keys: torch.arange(keys.shape[1], device=keys.device)  # noqa: E731
        inputs = torch.cat([self.tokens(keys, values, places(keys)) for keys, values in samples], dim=-2)
        self.centre.copy_(inputs.mean(-2, keepdim=True))
        # an input that never changes in the samples is not blown up
        self.spread.copy_(inputs.std(-2, keepdim=True).clamp(min=1e-2))

    def freeze(self) -> None:
        """Learn no more, and be quicker for it."""
        self.requires_grad_(False)
        self.folded, self.folded_bias = self._fold()
        self.decay = self.log_decay

    def _read(self, x: Float[Tensor, "*B A T F"], rows: slice, columns: slice = EVERY) -> Float[Tensor, "*B A T C"]:
        weight, bias = self.folded, self.folded_bias
        if weight is None or bias is None:
            weight, bias = self._fold()
        return linear(x.float(), weight[rows, :, columns], bias[rows, :, columns])

    def _fold(self) -> tuple[Tensor, Tensor]:
        """The first layer with centre and spread in its weights, which are far smaller than the inputs."""
        weight = self.first / self.spread.mT
        return weight, self.first_bias - self.centre @ weight

    def _judge(
        self, asked: Tensor, taken: Tensor, memory: Memory | None, valid: Tensor | None, rows: slice
    ) -> tuple[Tensor, Memory | None]:
        parts = [silu(asked[..., : self._hidden])] if self._hidden else []
        if memory is not None:
            queries = _features(asked[..., self._hidden :])
            found, memory = _remember(queries, _parts(taken, valid), memory)
            gain, shift = self.norm[rows].unbind(-3)
            parts.append(silu(layer_norm(found, found.shape[-1:]) * gain + shift))
        return (torch.cat(parts, dim=-1) @ self.last[rows])[..., 0], memory


def memory_shapes(shape: ScorerShape) -> tuple[tuple[int, int], tuple[int]]:
    """Shapes of one agent's `Memory`."""
    return (2 * shape.memory, shape.memory + 1), (1,)


def make_scorers(shape: ScorerShape, seed: int = 0, frequencies: Tensor | None = None) -> Scorers:
    """Untrained scorers, the same for the same seed.

    Args:
        frequencies: by which the model's rotation turns pairs of dimensions a position, where keys are turned back.
    """
    return make_stack(lambda: Scorers(shape), seed, frequencies if shape.turned else None)


def load_scorers(shape: ScorerShape, tensors: Mapping[str, Tensor]) -> Scorers:
    """Trained scorers from their state, in fp32 and without gradients.

    Raises:
        ValueError: where the tensors do not belong to that shape.
    """
    scorers = stacks_from(lambda: Scorers(shape), tensors, shape).float()
    scorers.freeze()
    return scorers


def _features(y: Float[Tensor, "*B M"]) -> Float[Tensor, "*B P"]:
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)


class _Taken(NamedTuple):
    """What the memory takes in of each token: where, what (with a 1 behind it), and the logarithms of its gates."""

    keys: Float[Tensor, "*B T P"]
    values: Float[Tensor, "*B T M1"]
    enter: Float[Tensor, "*B T"]
    stay: Float[Tensor, "*B T"]


def _parts(taken: Tensor, valid: Tensor | None) -> _Taken:
    size = taken.shape[-1] // 2 - 1
    keys, values, gates = taken.split([size, size, 2], dim=-1)
    enter, stay = gates[..., 0], logsigmoid(gates[..., 1])
    if valid is not None:
        enter, stay = enter.masked_fill(~valid, -torch.inf), stay.masked_fill(~valid, 0)
    return _Taken(_features(keys), pad(values, (0, 1), value=1.0), enter, stay)


def _remember(queries: Float[Tensor, "*B T P"], new: _Taken, memory: Memory) -> tuple[Float[Tensor, "*B T M"], Memory]:
    """What each query finds once the token at its place is taken in; one step, or many in chunks."""
    if queries.shape[-2] == 1:
        return _step(queries, new, memory)
    found = []
    rows, gates = ((queries, new.keys, new.values), -2), ((new.enter, new.stay), -1)
    pieces = [array.split(_CHUNK, dim=dim) for arrays, dim in (rows, gates) for array in arrays]
    for query, *taken in zip(*pieces, strict=True):
        weighed, memory = _take_in(query, _Taken(*taken), memory)
        found.append(weighed)
    return _mean(torch.cat(found, dim=-2)), memory


def _step(query: Tensor, new: _Taken, memory: Memory) -> tuple[Tensor, Memory]:
    """C = f C + i k v, with everything divided by exp(level)."""
    kept = new.stay + memory.level
    level = torch.maximum(kept, new.enter)
    fresh = new.keys.mT @ (new.values * (new.enter - level).exp()[..., None])
    held = memory.held * (kept - level).exp()[..., None] + fresh
    return _mean(query @ held), Memory(held, level)


def _take_in(queries: Tensor, new: _Taken, memory: Memory) -> tuple[Tensor, Memory]:
    """A chunk at once: what its queries find, with its total weight behind it, and what is then held."""
    stayed = new.stay.cumsum(-1)
    since = new.enter - stayed
    # the largest logarithm of a weight so far, by which all weights are divided
    level = stayed + torch.maximum(since.cummax(-1).values, memory.level)
    causal = torch.ones(since.shape[-1], since.shape[-1], dtype=torch.bool, device=since.device).tril()
    inside = (stayed - level)[..., :, None] + since[..., None, :]
    weights = inside.masked_fill(~causal, -torch.inf).exp()
    before = (stayed + memory.level - level).exp()
    found = (queries @ new.keys.mT * weights) @ new.values + before[..., None] * (queries @ memory.held)
    last = weights[..., -1, :, None] * new.values
    return found, Memory(memory.held * before[..., -1:, None] + new.keys.mT @ last, level[..., -1:])


def _mean(found: Float[Tensor, "*B T M1"]) -> Float[Tensor, "*B T M"]:
    """Weighted sums over total weights; nothing where there is no weight."""
    return found[..., :-1] / found[..., -1:].clamp(min=torch.finfo(found.dtype).tiny)
