"""KVpop: each token is scored once, as it leaves the recent window, and the least one goes (arXiv 2607.05061).

B sequences, H KV heads, N slots, T new tokens, D size of a key, Dv of a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..budget import Budget
from ..pool import Window, hold, static_priority
from ..slots import EMPTY, Slots
from .base import Observation
from .files import PolicyFile
from .learned import LearnedPolicy, Trained, policy_file, sizes_for
from .scorers import Memory, Scorers, ScorerShape, load_scorers, make_scorers, memory_shapes
from .scoring import Token, find_slots, judge_one, serves

_HELD, _LEVEL = "kvpop_held", "kvpop_level"
_NEVER = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class KVpop(LearnedPolicy):
    """KVpop (arXiv 2607.05061): keep or drop by a score learned per head and read late; see docs/kvpop.md.

    A small memory runs along with each head. When a token leaves the recent window of its weights (`window`), the
    memory has heard the whole window behind it: then the token gets its one score. The effective score falls with age
    at a learned rate, which leaves the order as it is, so what is stored beside the slot is one static priority.

    Args:
        weights: weights shipped with kvkeep ("smollm2"), a folder, or a hub id.
        digest: checksum that the weights must have, if given.
        trained: scorers at hand, in place of stored ones.

    Raises:
        ValueError: for unknown weights, or others than those of `digest`.
    """

    method: ClassVar[str] = "kvpop"
    architecture: ClassVar[str] = "both"
    side: ClassVar[tuple[str, ...]] = ("kvpop",)
    chunk_free: ClassVar[bool] = True

    @classmethod
    def network_of(cls, file: PolicyFile) -> Trained[Scorers]:
        return Trained(file, load_scorers(ScorerShape(**file.architecture), file.tensors))

    @classmethod
    def untrained_file(
        cls, fingerprint: Mapping[str, Any], layers: Sequence[int], seed: int, **options: Any
    ) -> PolicyFile:
        small = {"architecture": cls.architecture, "hidden": 16, "memory": 4, "window": 8}
        shape = ScorerShape(**{**small, **sizes_for(fingerprint, layers), **options})
        return scorers_file(make_scorers(shape, seed), fingerprint, layers, {"note": "not trained"})

    @property
    def shape(self) -> ScorerShape:
        """Of the scorers; `shape.window` tokens are always kept."""
        scorers: Scorers = self.trained.on(torch.device("cpu"))
        return scorers.shape

    def streams(self, num_heads: int, group: int, head_size: int) -> dict[str, tuple[int, ...]]:
        if not self.shape.reads_memory:
            return {}
        held, level = memory_shapes(self.shape)
        return {_HELD: (num_heads, *held), _LEVEL: (num_heads, *level)}

    def track(self, seen: Observation) -> None:
        if seen.ahead:
            # it will be taken back, and a memory does not forget again
            return
        slots, delay = seen.slots, self.shape.delay
        places = seen.new_positions - delay
        with torch.no_grad():
            if seen.num_new == 1 and serves(self._scorers(slots), slots):
                index, priority, memory = self._judge_one(seen, places)
            else:
                # judged are the new tokens themselves, or those that leave the window
                index = _new_slots(seen) if delay == 0 else _slots_at(slots.positions, places, seen)
                scores, memory = self._judge(seen, index, places)
                priority = static_priority(scores, places, self._scorers(slots).log_decay[self._rows(seen)])
        slots.side("kvpop").scatter_(2, index, priority)
        _keep(slots, memory)

    def _judge_one(
        self, seen: Observation, places: Int[Tensor, "B H 1"]
    ) -> tuple[Int[Tensor, "B H 1"], Float[Tensor, "B H 1"], Memory | None]:
        """The slot of the token that is judged, its static priority, and what the memory then holds."""
        slots, new = seen.slots, _new_slots(seen)
        index = find_slots(slots.positions, places, new) if self.shape.delay else new
        keys, values, at = slots.lying(torch.cat([index, new], -1))
        asked, fresh = Token(at[..., :1], places), Token(at[..., 1:], seen.new_positions)
        rows = self._rows(seen)
        return index, *judge_one(self._scorers(slots), keys, values, asked, fresh, _memory(slots), rows)

    def _judge(
        self, seen: Observation, index: Int[Tensor, "B H T"], places: Int[Tensor, "B H T"]
    ) -> tuple[Float[Tensor, "B H T"], Memory | None]:
        """The scores of the tokens in slots `index`, which stand at `places`, and what the memory then holds."""
        scorers, rows = self._scorers(seen.slots), self._rows(seen)
        new = (seen.new_keys, seen.new_values, seen.new_positions)
        memory, valid = _memory(seen.slots), seen.new_positions[:, :1] != EMPTY
        if self.shape.delay == 0:
            tokens = scorers.tokens(*new)
            return scorers.judge(tokens, tokens, memory, valid, rows)
        pairs = zip((*seen.slots.tokens(index), places), new, strict=True)
        asked, fresh = scorers.tokens(*(torch.cat(pair, 2) for pair in pairs)).chunk(2, dim=2)
        return scorers.judge(asked, fresh, memory, valid, rows)

    def _scorers(self, slots: Slots) -> Scorers:
        scorers: Scorers = self.trained.on(slots.positions.device)
        return scorers

    def _rows(self, seen: Observation) -> slice:
        return self.trained.rows(seen.layer, seen.slots.positions.shape[1])

    def visible(self, seen: Observation, limits: Int[Tensor, " T"], budget: Budget) -> Bool[Tensor, "B H T N"]:
        # under limits that grow, what is held depends on when they did
        assert seen.query_positions is not None
        limit = int(limits[0])
        if bool((limits != limit).any()):
            raise ValueError("kvpop has a mask for a budget in tokens alone; give tokens, or read token by token")
        recent = min(max(budget.recent, self.shape.window), limit - budget.sinks)
        slots, (B, H, N) = seen.slots, seen.slots.positions.shape
        scorers: Scorers = self.trained.on(slots.keys.device)
        rows = self.trained.rows(seen.layer, H)
        with torch.no_grad():
            scores = scorers(slots.keys, slots.values, rows)
            priority = static_priority(scores, slots.positions, scorers.log_decay[rows])
        held = hold(priority.view(B * H, N), Window(budget.sinks, recent), limit - budget.sinks - recent)
        return held.visible(seen.query_positions[0].long()).view(B, H, -1, N)

    def forget(self, seen: Observation) -> None:
        slots = seen.slots
        if not self.shape.reads_memory:
            return
        if not bool((slots.occupied[:, 0].sum(-1) == seen.lengths).all()):
            raise ValueError(
                "tokens that were evicted are in the memory of kvpop, and it cannot be made without them to take newer "
                "ones back; copy the cache before the tokens you may want to undo"
            )
        # what stays is taken in anew
        left = slots.length - seen.num_new
        scorers: Scorers = self.trained.on(slots.keys.device)
        kept = (array[:, :, :left] for array in (slots.keys, slots.values, slots.positions))
        tokens = scorers.tokens(*kept)
        memory = scorers.blank(tokens.shape[:2], tokens.device)
        if left:
            rows = self.trained.rows(seen.layer, tokens.shape[1])
            memory = scorers.judge(tokens, tokens, memory, slots.occupied[:, :1, :left], rows)[1]
        _keep(slots, memory)

    def score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        recent = seen.slots.positions >= (seen.lengths - self.shape.window)[:, None, None]
        return seen.slots.side("kvpop").masked_fill(recent, _NEVER)


@dataclass(frozen=True, kw_only=True)
class KVpopMLP(KVpop):
    """KVpop (arXiv 2607.05061) without a memory: the score of a token is read off its own key and value.

    The arguments are those of `KVpop`.
    """

    method: ClassVar[str] = "kvpop_mlp"
    architecture: ClassVar[str] = "mlp"


def scorers_file(
    scorers: Scorers, fingerprint: Mapping[str, Any], layers: Sequence[int], training: Mapping[str, Any]
) -> PolicyFile:
    """Scorers as they are stored."""
    method = KVpop.method if scorers.shape.reads_memory else KVpopMLP.method
    return policy_file(scorers, method, asdict(scorers.shape), fingerprint, layers, training)


def _memory(slots: Slots) -> Memory | None:
    return Memory(slots.streams[_HELD], slots.streams[_LEVEL]) if _HELD in slots.streams else None


def _keep(slots: Slots, memory: Memory | None) -> None:
    for name, array in zip((_HELD, _LEVEL), memory or (), strict=memory is not None):
        slots.streams[name].copy_(array)


def _new_slots(seen: Observation) -> Int[Tensor, "B H T"]:
    if seen.new is not None:
        return seen.new
    first = seen.slots.length - seen.num_new
    return torch.arange(first, seen.slots.length, device=seen.lengths.device).expand(seen.new_positions.shape)


def _slots_at(positions: Int[Tensor, "B H N"], wanted: Int[Tensor, "B H T"], seen: Observation) -> Int[Tensor, "B H T"]:
    """The slot of the token at each position that is wanted, T in a row; that of the newest token where there is none.

    The newest token is in the recent window: what is written there is not read before it is written anew.
    """
    newest = _new_slots(seen)[..., -1:]
    if seen.num_new == 1:
        there = positions == wanted
        return torch.where(there.any(-1, keepdim=True), there.byte().argmax(-1, keepdim=True), newest)
    # a table from positions, counted from the first that is wanted, to slots; all others share its last place
    known = wanted.masked_fill(seen.new_positions == EMPTY, torch.iinfo(wanted.dtype).max)
    first = known.amin(-1, keepdim=True)
    far = wanted.shape[-1]
    within = (positions != EMPTY) & (positions >= first) & (positions - far < first)
    table = newest.expand(-1, -1, far + 1).clone()
    slot = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
    table.scatter_(2, torch.where(within, positions - first, far).long(), torch.where(within, slot, newest))
    return table.gather(2, torch.where(seen.new_positions == EMPTY, far, wanted - first).long())
