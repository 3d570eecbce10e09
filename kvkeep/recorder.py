"""One prompt through a model: what it caches, and what its futures read of it, with one forward over the prompt.

L layers, H KV heads, G query heads per KV head, n prompt tokens, g given tokens, T new tokens, D head size, V words.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .budget import Budget
from .cache import KVCache
from .fingerprint import num_kv_heads
from .future import Importance, future_importance
from .group import CacheGroup
from .layer import AttendingLayer, KVLayer, StandIn
from .model import attach, next_logits
from .policies import make_policy, spelled
from .target import mean_later
from .trace import Trace

# with so small a budget a policy looks at everything, and keeps no copy of the prompt's keys and values
_ONLOOKER = Budget(tokens=1, sinks=0, recent=0)


class Branch(NamedTuple):
    """One future of a prompt: tokens that are given, then up to `num_new` that the model adds itself."""

    given: Int[Tensor, "1 g"]
    num_new: int = 0

    @property
    def longest(self) -> int:
        return self.given.shape[1] + self.num_new


@dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt to record.

    Attributes:
        source, split: as in `Trace`.
        name: tells it from the others of its source and split, such as its number.
        token_ids: what is cached and ranked.
        branches: its futures, each from the end of the prompt on; at least one, none of them empty.
    """

    source: str
    split: str
    name: str
    token_ids: Int[Tensor, "1 n"]
    branches: Sequence[Branch]

    def __post_init__(self) -> None:
        if not self.branches or min(branch.longest for branch in self.branches) < 1:
            raise ValueError(f"prompt {self.source} {self.name} has no future; nothing could be learned from it")

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    @property
    def key(self) -> str:
        """What it is and a digest of its tokens and futures: under equal settings equal keys are equal traces."""
        digest = hashlib.sha256(self.token_ids.long().numpy().tobytes())
        for branch in self.branches:
            digest.update(f"{branch.num_new}:{branch.given.tolist()}".encode())
        # it is a file's name
        named = re.sub(r"[^\w.]+", "-", f"{self.source}-{self.split}-{self.name}")
        return f"{named}-{digest.hexdigest()[:12]}"


class Recorder:
    """Records prompts of one model.

    Args:
        layers: numbers of the layers to record; None for all full-attention layers.
        heads: numbers of the KV heads to record; None for all.
        policies: names of policies, with options if need be, whose worth right after the prompt is recorded too.
        temperature: of what the model adds to a future; 0 takes the likeliest token.
        seed: of sampling. A prompt's futures are the same in whatever order prompts are recorded.
        ends: tokens that end what the model adds; they are no part of a future that has others.
        delay: record also the attention that tokens get from those of the prompt at least so far behind them.

    Raises:
        ValueError: for layers and heads that the model does not have, a policy that needs a future, a delay below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        policies: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
        ends: Collection[int] = (),
        delay: int | None = None,
    ):
        if delay is not None and delay < 1:
            raise ValueError(f"delay must be at least 1, got {delay}; leave it out to record no later attention")
        managed = KVCache(model).managed
        self.model, self.ends, self.delay = model, ends, delay
        # equal policies have one name
        self.policies = list(dict.fromkeys(spelled(name) for name in policies))
        self.layers = _chosen("layer", layers, [layer.index for layer in managed])
        self.num_heads = num_kv_heads(managed[0].plan.config)
        self.heads = _chosen("KV head", heads, range(self.num_heads))
        self.group = managed[0].plan.group
        self.temperature, self.seed = temperature, seed
        for name in self.policies:
            policy = make_policy(name)
            if "future" in policy.needs or policy.look is not None:
                raise ValueError(f"policy {name!r} knows or samples a future, and the trace has its own; leave it out")

    @torch.no_grad()
    def record(self, item: Item) -> Trace:
        """What the model caches for a prompt, and what each of its futures reads of it.

        The queries of future tokens count, that of the prompt's last token does not.
        """
        cache = KVCache(self.model)
        with attach(self.model):
            logits, worths, later = self._read(item, cache)
            futures = [self._follow(item, number, cache, logits) for number in range(len(item.branches))]
        slots = [layer.slots for layer in cache.managed if layer.index in self.layers and layer.slots is not None]
        longest = max(branch.longest for branch in item.branches)
        return Trace(
            key=item.key,
            source=item.source,
            split=item.split,
            token_ids=item.token_ids[0].int(),
            future_ids=torch.stack([_padded(future.token_ids, longest) for future in futures]),
            keys=self._stacked(held.keys for held in slots).bfloat16(),
            values=self._stacked(held.values for held in slots).bfloat16(),
            importance_max=torch.stack([future.importance.max for future in futures]),
            importance_mean=torch.stack([future.importance.mean for future in futures]),
            importance_square=torch.stack([future.importance.square for future in futures]),
            worths=worths,
            later=later,
        )

    def _read(self, item: Item, cache: KVCache) -> tuple[Float[Tensor, "1 V"], dict[str, Tensor], Tensor | None]:
        """Read the prompt into `cache`: the logits behind it, what each policy says of it, and the later attention."""
        onlookers = {name: KVCache(self.model, policy=name, budget=_ONLOOKER) for name in self.policies}
        for onlooker in onlookers.values():
            onlooker.plan.holding = True
        group: Cache = CacheGroup([cache, *onlookers.values()])
        meter = _Meter(group, self.delay) if self.delay else None
        logits = self._forward(item.token_ids, meter or group)
        worths = {
            name: self._stacked(layer.worth() for layer in onlooker.managed if layer.index in self.layers)
            for name, onlooker in onlookers.items()
        }
        return logits, worths, self._stacked(meter.later[index] for index in self.layers) if meter else None

    def _follow(self, item: Item, number: int, cache: KVCache, logits: Float[Tensor, "1 V"]) -> "_Future":
        """Go on with one future from the end of the prompt, and take it back."""
        given, num_new = item.branches[number]
        tape = _Tape(cache)
        if given.shape[1]:
            logits = self._forward(given, tape)
        token_ids = given[0].tolist()
        draws = torch.Generator().manual_seed(_seed(self.seed, item.key, number))
        for _ in range(num_new):
            token = self._next(logits, draws)
            if token in self.ends and token_ids:
                break
            token_ids.append(token)
            logits = self._forward(torch.tensor([[token]]), tape)
        importance = self._importance(tape, item.num_tokens)
        for layer in cache.managed:
            layer.crop(-len(token_ids))
        return _Future(token_ids, importance)

    def _next(self, logits: Float[Tensor, "1 V"], draws: torch.Generator) -> int:
        if not self.temperature:
            return int(logits.argmax())
        # drawn on the CPU: the same tokens on every device
        chances = (logits[0].float().cpu() / self.temperature).softmax(-1)
        return int(torch.multinomial(chances, 1, generator=draws))

    def _importance(self, tape: "_Tape", num_tokens: int) -> Importance:
        each = [layer.importance(num_tokens, self.heads) for layer in tape.taped if layer.layer.index in self.layers]
        return Importance(*(torch.stack(arrays).cpu() for arrays in zip(*each, strict=True)))

    def _stacked(self, arrays: Iterable[Tensor]) -> Tensor:
        """`[1, H, ...]` of each layer as `[L, H, ...]`, recorded heads alone."""
        return torch.stack([array[0, self.heads] for array in arrays]).cpu()

    def _forward(self, token_ids: Int[Tensor, "1 T"], cache: Cache) -> Float[Tensor, "1 V"]:
        return next_logits(self.model, cache, input_ids=token_ids.to(self.model.device))


class _Future(NamedTuple):
    """Tokens of one future and what they read of the prompt, `[L, H, n]`."""

    token_ids: list[int]
    importance: Importance


class _Tape(Cache):
    """A cache that goes on where another stands, and remembers the queries of what it reads."""

    def __init__(self, cache: KVCache):
        self.taped = [_TapeLayer(layer) for layer in cache.managed]
        taped = {layer.layer.index: layer for layer in self.taped}
        # a window forgets what comes before a future: it goes on in a copy, and the original is as it was
        layers = [taped.get(index) or copy(layer) for index, layer in enumerate(cache.layers)]
        super().__init__(layers=layers)


class _TapeLayer(StandIn):
    layer: KVLayer

    def __init__(self, layer: KVLayer):
        super().__init__(layer)
        self.queries: list[Tensor] = []
        self.scale = 0.0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        seen = self.layer.take(queries, keys, values, valid, scale)
        self.queries.append(queries)
        self.scale = scale
        # nothing is evicted, so nothing settles
        return self.layer.read(queries, seen, scale, stock=False)

    def importance(self, num_tokens: int, heads: Sequence[int]) -> Importance:
        """Of the first `num_tokens` tokens for all queries remembered: `[H, n]` of the KV heads named."""
        assert self.layer.slots is not None
        keys = self.layer.slots.keys
        queries = torch.cat(self.queries, dim=2).unflatten(1, (keys.shape[1], -1))[:, heads].flatten(1, 2)
        found = future_importance(queries, keys[:, heads], num_tokens, self.scale)
        return Importance(*(array[0, ..., :num_tokens] for array in found))


class _Meter(Cache):
    """A cache that measures, while a whole prompt is read into another, the attention tokens get from later ones.

    Nothing of the queries is kept: each layer's are met while it attends.
    """

    def __init__(self, cache: Cache, delay: int):
        # by layer, `[1, H, G, n]`
        self.later: dict[int, Tensor] = {}
        layers = [
            _MeterLayer(layer, index, delay, self.later) if isinstance(layer, AttendingLayer) else layer
            for index, layer in enumerate(cache.layers)
        ]
        super().__init__(layers=layers)


class _MeterLayer(StandIn):
    def __init__(self, layer: AttendingLayer, index: int, delay: int, later: dict[int, Tensor]):
        super().__init__(layer)
        self.index, self.delay, self.later = index, delay, later

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        self.later[self.index] = mean_later(queries, keys, scale, self.delay)
        return self.layer.attend(queries, keys, values, valid, scale)


def _chosen(kind: str, wanted: Sequence[int] | None, there: Sequence[int]) -> list[int]:
    """The wanted ones in order, or all that are there."""
    for number in wanted if wanted is not None else ():
        if number not in there:
            raise ValueError(f"the model has no {kind} {number} to record; there are {', '.join(map(str, there))}")
    if wanted is not None and not wanted:
        raise ValueError(f"no {kind} was chosen; give some, or leave the choice out for all")
    return list(there) if wanted is None else sorted(set(wanted))


def _padded(token_ids: Sequence[int], length: int) -> Int32[Tensor, " f"]:
    return torch.tensor([*token_ids, *[-1] * (length - len(token_ids))], dtype=torch.int32)


def _seed(seed: int, key: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}/{number}".encode()).digest()[:8], "big") >> 1
