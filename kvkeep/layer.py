"""One layer's slots under a policy and a budget: where tokens enter, are read, and leave.

B sequences, H KV heads, G query heads per KV head, N slots, T new tokens, D head size.
"""

import math
import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .attention import AttentionMass, Part, WindowAttention, attend
from .budget import Budget
from .fingerprint import num_kv_heads
from .policies import Futures, Observation, Policy, Projection, Rotary
from .rotation import RotaryTable
from .selection import finite_or_recent, protected, surplus, survivors, victim
from .slots import EMPTY, Slots, Snapshot

ATTENTION_NAME = "kvkeep"

# how a policy is shown what a layer has read
Show = Callable[[Policy, Observation], None]

_POSITION_BYTES = 4
_EVERYTHING = 2**62


def show(policy: Policy, seen: Observation) -> None:
    """Let the policy look."""
    policy.track(seen)


class Plan:
    """What the layers of one cache share: settings, and the moment the whole cache is in."""

    def __init__(
        self, config: PretrainedConfig, policy: Policy, budget: Budget, num_layers: int, rotary: Rotary | None
    ):
        self.config, self.policy, self.budget, self.rotary = config, policy, budget, rotary
        # for windows held as codes: the rotation at every position, the same for all layers
        self.table = None if rotary is None else RotaryTable(rotary)
        tiers = policy.tiers
        # tokens wait for the others of their window
        self._reserving = budget.reserving(0 if tiers is None else tiers.window - 1)
        # by layer; those missing have none that a policy could use
        self.projections: dict[int, Projection] = {}
        self.num_layers = num_layers
        self.group = config.num_attention_heads // num_kv_heads(config)
        # tokens each sequence will have seen once a chunked prefill is through
        self.expected: Tensor | None = None
        # whether these are several new ones; a single one is decoding
        self.reads_prompt = False
        self.holding = False
        self.ahead = False
        # the tokens that follow the prompt are its answer and stay
        self.answering = False
        # logits behind a prompt that was read apart from the drafts that came with it
        self.prompt_logits: Tensor | None = None
        # tokens seen when a model that is not attached last said that those to come hold no padding
        self.vouched: int | None = None
        self._memo: tuple[int, list[tuple[int, Tensor | None]]] | None = None
        self._unlimited: list[tuple[int, Tensor | None]] = [(_EVERYTHING, None)] * num_layers

    def __deepcopy__(self, memo: dict) -> "Plan":
        # the model's own objects stay shared: a copied config would not see the model being attached
        return copy(self)

    @property
    def attached(self) -> bool:
        return self.config._attn_implementation == ATTENTION_NAME

    def limits(self, seen: int, lengths: Int[Tensor, " B"], costs: "Costs") -> list[tuple[int, Tensor | None]]:
        """For each layer the slots to keep, and the number for each sequence where they differ; once per forward."""
        if self.budget.unlimited:
            return self._unlimited
        if self._memo is None or self._memo[0] != seen:
            limits = self._limits(lengths, costs)
            rows = limits.to(lengths.device)
            uniform = limits.amin(1) == limits.amax(1)
            self._memo = (
                seen,
                [
                    (most, None if same else rows[order])
                    for order, (most, same) in enumerate(zip(limits.amax(1).tolist(), uniform.tolist(), strict=True))
                ],
            )
        return self._memo[1]

    def check_bytes(self, costs: "Costs") -> None:
        """ValueError where one sequence's least does not fit into the bytes."""
        nothing = torch.zeros(1, dtype=torch.int32)
        self._reserving.slots_for_bytes(nothing, self.num_layers, slot_bytes=costs.slot, fixed_bytes=costs.fixed)

    def forget_limits(self) -> None:
        self._memo = None

    def ends_prompt(self, lengths: Int[Tensor, " B"], num_new: int) -> bool:
        """Whether a prompt is through after `num_new` tokens; without a word about it, several tokens are one."""
        if self.expected is None:
            return num_new > 1
        return self.reads_prompt and torch.equal(lengths.cpu(), self._expected_rows(lengths))

    def _expected_rows(self, lengths: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        assert self.expected is not None
        # beams and several answers repeat each prompt's row
        return self.expected.repeat_interleave(lengths.shape[0] // self.expected.shape[0]).to(lengths.dtype)

    def _limits(self, lengths: Tensor, costs: "Costs") -> Int[Tensor, "L B"]:
        lengths = lengths.cpu()
        if self.expected is not None:
            lengths = torch.maximum(lengths, self._expected_rows(lengths))
        if self.budget.bytes is not None:
            spent = {"slot_bytes": costs.slot, "fixed_bytes": costs.fixed}
            return self._reserving.slots_for_bytes(lengths, self.num_layers, **spent)
        return self._reserving.slots(lengths, self.num_layers)


class _Undo(NamedTuple):
    """A layer before one draft token."""

    snapshot: Snapshot
    lengths: Tensor
    fresh: int


class AttendingLayer(CacheLayerMixin):
    """A cache layer that attends itself: `update` stores nothing and leaves that to `attend`."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # the attention function finds its layer on the keys it is handed, without globals
        key_states._kvkeep_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(
        self,
        queries: Float[Tensor, "B HG T D"],
        keys: Float[Tensor, "B H T D"],
        values: Float[Tensor, "B H T Dv"],
        valid: Bool[Tensor, "B T"] | None,
        scale: float,
    ) -> Float[Tensor, "B HG T Dv"]:
        """Take T new tokens and attend; `valid` is False where one is padding, None when none is."""
        raise NotImplementedError

    def get_max_length(self) -> int:
        return -1


class StandIn(AttendingLayer):
    """Attends in the place of `layer`, and says of lengths and masks what that one says."""

    def __init__(self, layer: AttendingLayer):
        super().__init__()
        self.layer = layer
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.layer.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.get_mask_sizes(query_length)


class KVLayer(AttendingLayer):
    """One full-attention layer's slots under the plan's policy and budget."""

    storage: ClassVar[type[Slots]] = Slots

    def __init__(self, plan: Plan, index: int, order: int):
        super().__init__()
        self.plan = plan
        self.index = index
        # place among the managed layers, where layer schedules count
        self.order = order
        self._clear()

    def _clear(self) -> None:
        self.slots: Slots | None = None
        self.seen = 0
        self.lengths: Tensor | None = None
        self.has_empty = False
        self.is_initialized = False
        self._new: Tensor | None = None
        self._costs: Costs | None = None
        # tokens that can still be taken back: nothing was evicted since they came
        self._fresh = 0
        self._awaited = False
        self._held_back: Observation | None = None
        # what the policy knows of a prompt until it has seen the futures it asked for
        self._remembered: Observation | None = None
        # queries of the answer's tokens where these are the future
        self._answer: list[Tensor] | None = None
        # while drafts are tried: what each new token changed, oldest first
        self.record_past = False
        self._undo: list[_Undo] = []

    # what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.lengths = torch.zeros(key_states.shape[0], dtype=torch.int32, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values; what is returned is what attention must read."""
        if self.plan.attached:
            self._refuse_unread()
            self._awaited = True
            return super().update(key_states, value_states)
        self._check_unattached(key_states)
        query_positions = self._append(key_states, value_states, None)
        keys, values = self._slots.keys, self._slots.values
        self.settle(self._observe(None, query_positions, key_states.shape[2], None))
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens seen, which is where the next position starts."""
        self._refuse_unread()
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots attention will read, and the position the first of them stands for in a mask without gaps."""
        kept = self.slots.kept if self.slots is not None else 0
        return kept + int(query_length), self.seen - kept

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether any tokens can be taken back: while nothing was evicted, or drafts are being recorded."""
        return self._fresh == self.seen or self.record_past

    def activate_past_recording(self) -> None:
        """Be ready to take drafts back exactly, evictions included, until `stop_recording`.

        Raises:
            ValueError: where the end of the prompt is not known, so that what greedy decoding would have evicted
                cannot be told.
        """
        # drafts that are taken back are no answer
        self.plan.answering = False
        if self.plan.budget.unlimited:
            return
        if self.plan.expected is None:
            raise ValueError(
                "drafts and eviction are only exact when the end of the prompt is known: use kvkeep.generate(...) "
                "in place of model.generate for prompt-lookup and assisted decoding"
            )
        self.record_past = True

    def stop_recording(self) -> None:
        self.record_past = False
        self._undo.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: `-n` removes n (a positive number is the old absolute form)."""
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        undo, self._undo = self._undo, []
        if remove == 0 or self.slots is None:
            return
        if 0 < remove <= len(undo):
            self._restore(undo[-remove:])
            return
        if remove > self._fresh:
            raise ValueError(
                f"cannot take back {remove} tokens: layer {self.index} has evicted since, and evicted tokens do not "
                "come back; copy the cache before the tokens you may want to undo"
            )
        self._take_back(remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.slots is None or self.lengths is None:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.slots.select(indices)
        self.lengths = self.lengths.index_select(0, indices.to(self.lengths.device))
        if self._answer is not None:
            # the remembered prompt is the same for all rows that one prompt has become
            self._answer = [queries.index_select(0, indices.to(queries.device)) for queries in self._answer]
        self.plan.forget_limits()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            rows = torch.arange(self.slots.batch_size, device=self.slots.positions.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self._clear()
        self.plan.forget_limits()

    def offload(self) -> None:
        if self.slots is not None:
            self.slots.to("cpu")

    def prefetch(self) -> None:
        if self.slots is not None and self.lengths is not None:
            self.slots.to(self.lengths.device)

    # what the attention function calls

    def attend(
        self,
        queries: Float[Tensor, "B HG T D"],
        keys: Float[Tensor, "B H T D"],
        values: Float[Tensor, "B H T Dv"],
        valid: Bool[Tensor, "B T"] | None,
        scale: float,
    ) -> Float[Tensor, "B HG T Dv"]:
        """Append T tokens, attend over everything held, then evict down to the budget."""
        if self.record_past and keys.shape[2] > 1:
            return self._attend_drafts(queries, keys, values, valid, scale)
        if self.record_past:
            self._record()
        seen = self.take(queries, keys, values, valid, scale)
        output = self.read(queries, seen, scale)
        self.settle(seen)
        return output

    def take(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Observation:
        """Append T tokens and say what a policy may know now."""
        self._awaited = False
        self._refuse_unforeseen()
        query_positions = self._append(keys, values, valid)
        return self._observe(queries.detach(), query_positions, keys.shape[2], scale)

    def read(
        self, queries: Float[Tensor, "B HG T D"], seen: Observation, scale: float, *, stock: bool = True
    ) -> Float[Tensor, "B HG T Dv"]:
        """Attention of the new tokens over everything held.

        Args:
            stock: while nothing was evicted, make the stock cache's own call, to the last bit; else always the faster
                kernels.
        """
        slots = seen.slots
        assert seen.query_positions is not None
        return attend(
            queries,
            slots.keys,
            slots.values,
            slots.positions,
            seen.query_positions,
            scale,
            has_empty=self.has_empty,
            whole=stock and slots.length == self.seen,
        )

    def settle(self, seen: Observation, show: Show = show) -> None:
        """Let the policy look, then evict down to the budget."""
        if self.plan.budget.unlimited:
            return
        if self._wants_future(seen):
            self._await_future(seen, show)
            return
        if self._answer is not None:
            self._hear_answer(seen)
            return
        show(self.plan.policy, seen)
        if not self.plan.holding:
            self._evict_surplus(seen)
        elif not seen.ahead:
            self._held_back = seen

    def release(self) -> None:
        """Evict what was held back while the plan was holding, or until the policy has seen the future."""
        seen = self._held_back or self._remembered
        self._held_back = self._remembered = self._answer = None
        if seen is not None:
            self._evict_surplus(seen)

    def worth(self) -> Float[Tensor, "B H N"]:
        """What the policy says of every slot, while eviction is held back."""
        assert self._held_back is not None, "the plan must be holding, and the layer have read something"
        return self._score(self._held_back)

    # the future, for policies that ask for it

    @property
    def awaits_future(self) -> bool:
        """Whether eviction waits for `foresee` and `release`."""
        return self._remembered is not None and self._answer is None

    def foresee(self, futures: Futures) -> None:
        """Show the policy futures of the prompt."""
        assert self._remembered is not None
        # alone, a sequence that has little to lose would not have looked ahead
        futures = futures._replace(weights=futures.weights * self._worth_looking())
        self.plan.policy.track(replace(self._remembered, ahead=True, futures=futures))

    def foresee_as(self, other: "KVLayer") -> None:
        """Know of the future what a layer with the same policy and the same prompt knows."""
        if self.awaits_future:
            self._slots.copy_notes(other._slots.notes)

    def finish_answer(self) -> None:
        """The answer's tokens so far are the future."""
        if self._answer is None:
            return
        assert self._remembered is not None and self._remembered.queries is not None
        queries = torch.cat([self._remembered.queries[:, :, :0], *self._answer], dim=2)
        length = queries.shape[2]
        weights = torch.full((len(queries), length), 1 / max(1, length), device=queries.device)
        first = self._remembered.lengths[:, None] - length
        self.foresee(Futures(queries, weights, first + torch.arange(length, device=first.device)))
        self.release()

    def _wants_future(self, seen: Observation) -> bool:
        return (
            not self.plan.holding
            and self.plan.policy.look is not None
            and self.plan.ends_prompt(seen.lengths, seen.num_new)
            and bool(self._worth_looking().any())
        )

    def _worth_looking(self) -> Bool[Tensor, "B 1"]:
        look = self.plan.policy.look
        assert look is not None
        return self._over_budget(by=look.surplus)

    def _await_future(self, seen: Observation, show: Show) -> None:
        policy = self.plan.policy
        show(policy, replace(seen, held=True))
        self._remembered = policy.remember(seen)
        self._answer = [] if self.plan.answering and policy.look is not None and policy.look.keeps else None

    def _hear_answer(self, seen: Observation) -> None:
        assert self._answer is not None and self._remembered is not None and seen.queries is not None
        self.plan.policy.track(replace(seen, held=True))
        self._remembered = replace(self._remembered, lengths=seen.lengths)
        self._answer.append(seen.queries)
        look = self.plan.policy.look
        if look is not None and len(self._answer) == look.steps:
            self.finish_answer()

    # saving

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Counters and tensors, for saving."""
        if self.slots is None or self.lengths is None:
            return {"seen": 0}, {}
        counters = {"seen": self.seen, "has_empty": self.has_empty, "fresh": self._fresh}
        return counters, {**self.slots.state(), "lengths": self.lengths}

    def restore_state(self, counters: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Become what `state` was taken from."""
        self._clear()
        if not counters["seen"]:
            return
        self.seen, self.has_empty, self._fresh = counters["seen"], counters["has_empty"], counters["fresh"]
        self.lengths = tensors.pop("lengths")
        self.slots = self.storage.from_state(tensors)
        self._set_costs(self.slots.keys, self.slots.values)
        self.is_initialized = True

    # drafts

    def _attend_drafts(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float
    ) -> Tensor:
        """The prompt in one piece, then token by token as greedy decoding would have gone."""
        assert self.plan.expected is not None
        prompt = max(0, int(self.plan.expected[0]) - self.seen)
        sizes = [prompt] * (prompt > 0) + [1] * (keys.shape[2] - prompt)
        parts = zip(*(tensor.split(sizes, dim=2) for tensor in (queries, keys, values)), strict=True)
        masks = [None] * len(sizes) if valid is None else valid.split(sizes, dim=1)
        # a prompt is never taken back, so it is not recorded
        self.record_past = False
        outputs = []
        for size, (query, key, value), mask in zip(sizes, parts, masks, strict=True):
            if size == 1 and self.slots is not None:
                self._record()
            outputs.append(self.attend(query, key, value, mask, scale))
        self.record_past = True
        return torch.cat(outputs, dim=2)

    def _record(self) -> None:
        assert self.lengths is not None
        self._undo.append(_Undo(self._slots.snapshot(), self.lengths, self._fresh))

    def _restore(self, undo: list["_Undo"]) -> None:
        for before in reversed(undo):
            self._slots.restore(before.snapshot)
            self.lengths, self._fresh = before.lengths, before.fresh
        self.seen -= len(undo)
        self.plan.forget_limits()

    # storage

    @property
    def _slots(self) -> Slots:
        assert self.slots is not None
        return self.slots

    @property
    def limit(self) -> tuple[int, Tensor | None]:
        """Slots to keep, and the number for each sequence where they differ."""
        assert self.lengths is not None and self._costs is not None
        return self.plan.limits(self.seen, self.lengths, self._costs)[self.order]

    def holdings(self) -> dict[str, Int[Tensor, "B H _"]]:
        """Positions of the tokens held, by tier, -1 where there is none: here all of them in full precision."""
        return {} if self.slots is None else {"full": self.slots.positions}

    @property
    def num_coded(self) -> float:
        """Tokens that are held as codes alone: mean over KV heads and sequences."""
        return 0.0

    def nbytes(self) -> dict[str, int]:
        """Measured bytes of everything this layer holds, by array."""
        if self.slots is None or self.lengths is None:
            return {}
        return {**self.slots.bytes_by_array(), "lengths": self.lengths.untyped_storage().nbytes()}

    def _append(self, keys: Tensor, values: Tensor, valid: Tensor | None) -> Int[Tensor, "B T"]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        T = keys.shape[2]
        # a cache is no place for gradients: they would keep every evicted token alive
        keys, values = keys.detach(), values.detach()
        query_positions = self._advance(T, valid)
        positions = query_positions[:, None].expand(-1, keys.shape[1], -1)
        self._new = None
        if self.slots is None:
            self.slots = self._first(keys, values, positions)
        elif T == 1 and self.slots.holes is not None and not self.plan.holding and self._remembered is None:
            self._new = self.slots.fill(keys, values, positions)
        else:
            if self.slots.holes is not None:
                self._close_hole()
            self.slots.append(keys, values, positions, room=self._room(T))
        # a token in a hole is not the last slot, which is what is taken back
        self._fresh = 0 if self._new is not None else self._fresh + T
        return query_positions

    def _first(self, keys: Tensor, values: Tensor, positions: Tensor) -> Slots:
        policy = self.plan.policy
        num_rows, H, T, D = keys.shape
        self._set_costs(keys, values)
        side, streams = {}, {}
        if not self.plan.budget.unlimited:
            with torch.inference_mode(False):
                side = {name: keys.new_zeros(num_rows, H, T, dtype=torch.float32) for name in policy.side}
                shapes = policy.streams(H, self.plan.group, D)
                streams = {n: keys.new_zeros(num_rows, *s, dtype=torch.float32) for n, s in shapes.items()}
        if self.limit[0] < T:
            # the prompt's own tensors serve until the survivors are copied out
            return self.storage(keys, values, positions, side, streams)
        nothing = {name: array[:, :, :0] for name, array in side.items()}
        slots = self.storage(keys[:, :, :0], values[:, :, :0], positions[:, :, :0], nothing, streams)
        slots.append(keys, values, positions, room=self._room(T))
        return slots

    def _set_costs(self, keys: Tensor, values: Tensor) -> None:
        shape = (keys.shape[1], self.plan.group, keys.shape[3], values.shape[3])
        self._costs = slot_costs(*shape, keys.element_size(), self.plan.policy)

    def _room(self, num_new: int) -> int:
        """Slots to allocate ahead: an eighth more while growing freely, never past what the budget can use."""
        if self._answer is not None and self.plan.policy.look is not None:
            return self.plan.policy.look.steps
        needed = (self.slots.length if self.slots is not None else 0) + num_new
        limit, growing = self.limit[0], self.plan.budget.share is not None
        most = limit + 1 + (limit // 64 if growing else 0)
        return max(0, min(64 + needed // 8, most - needed))

    def _advance(self, num_new: int, valid: Tensor | None) -> Int[Tensor, "B T"]:
        """True positions of T new tokens, -1 for padding; moves the counters."""
        assert self.lengths is not None
        self.seen += num_new
        if valid is None:
            steps = torch.arange(num_new, dtype=torch.int32, device=self.lengths.device)
            positions = self.lengths[:, None] + steps
            self.lengths = self.lengths + num_new
            return positions
        self.has_empty = self.has_empty or not bool(valid.all())
        counts = valid.int().cumsum(1, dtype=torch.int32)
        positions = (self.lengths[:, None] + counts - 1).masked_fill(~valid, EMPTY)
        self.lengths = self.lengths + counts[:, -1]
        return positions

    def _close_hole(self) -> None:
        """Put the slots in order of position again, without the hole, before several tokens follow."""
        order = self._slots.positions.argsort(dim=-1, stable=True)
        self._slots.keep(order[..., 1:])

    def _take_back(self, remove: int) -> None:
        assert self.lengths is not None
        slots, self._new = self._slots, None
        dropped = slots.positions[:, 0, slots.length - remove :]
        if not self.plan.budget.unlimited:
            self.plan.policy.forget(self._observe(None, dropped, remove, None))
        self.lengths = self.lengths - (dropped != EMPTY).sum(-1).to(self.lengths.dtype)
        slots.truncate(slots.length - remove)
        self.seen -= remove
        self._fresh -= remove
        self.plan.forget_limits()

    # eviction

    def _observe(
        self, queries: Tensor | None, query_positions: Tensor, num_new: int, scale: float | None
    ) -> Observation:
        slots = self._slots
        attention = coded = None
        if queries is not None and scale is not None:
            coded = self._attend_coded(queries, query_positions, scale)
            attention = self._mass(queries, query_positions, scale, None if coded is None else coded.logsum)
        assert self.lengths is not None
        return Observation(
            slots=slots,
            new=self._new,
            num_new=num_new,
            lengths=self.lengths,
            layer=self.index,
            attention=attention,
            queries=queries,
            query_positions=query_positions,
            scale=scale,
            rotary=self.plan.rotary,
            projection=self.plan.projections.get(self.index),
            coded=coded,
            ahead=self.plan.ahead,
        )

    def _mass(
        self, queries: Tensor, query_positions: Tensor, scale: float, beyond: Float[Tensor, "B HG T"] | None
    ) -> AttentionMass:
        """Attention of new queries over the slots."""
        slots = self._slots
        return AttentionMass(
            queries, slots.keys, slots.positions, query_positions, scale, has_empty=self.has_empty, beyond=beyond
        )

    def beyond(self, scale: float) -> Callable[[Float[Tensor, "B H X D"]], Part] | None:
        """Attention over what is held beside the slots; None where that is nothing."""
        return None

    def _attend_coded(self, queries: Tensor, query_positions: Tensor, scale: float) -> WindowAttention | None:
        """Attention of new queries over windows held as codes; None where there are none."""
        return None

    def _evict_surplus(self, seen: Observation) -> None:
        slots = self._slots
        limit, rows = self.limit
        if slots.length <= limit and rows is None:
            return
        over = self._over_budget() if self.has_empty or rows is not None else None
        if over is not None and not bool(over.any()):
            return
        self._fresh = 0
        score = self._score(seen)
        budget = self.plan.budget
        guarded = protected(slots.positions, seen.lengths, sinks=budget.sinks, recent=budget.recent)
        if seen.num_new == 1 and slots.length <= limit + 1:
            slots.clear(victim(score, slots.positions, guarded), over)
            return
        index = survivors(score, slots.positions, guarded, min(limit, slots.length))
        blank = None
        if rows is not None:
            self.has_empty = True
            blank = surplus(score, slots.positions, guarded, rows).gather(2, index)
        slots.keep(index, blank, holes=1)

    def _over_budget(self, by: int = 1) -> Bool[Tensor, "B 1"]:
        """Which sequences hold more than they may, by at least so many tokens."""
        limit, rows = self.limit
        held = self._slots.occupied[:, :1].sum(-1)
        return held >= (limit if rows is None else rows[:, None]) + by

    def _score(self, seen: Observation) -> Float[Tensor, "B H N"]:
        score, fell_back = finite_or_recent(self.plan.policy.score(seen).float(), seen.slots.positions)
        if fell_back:
            warnings.warn(
                f"policy {type(self.plan.policy).__name__} gave NaN in layer {self.index} (are there NaN keys or "
                "values?); the heads concerned keep their most recent tokens instead",
                RuntimeWarning,
                stacklevel=2,
            )
        return score

    # refusals

    def _refuse_unread(self) -> None:
        if self._awaited:
            raise RuntimeError(
                f"layer {self.index} got new tokens but its attention did not run: the model was detached, or its "
                "attention does not go through transformers' AttentionInterface; use a fresh cache"
            )

    def _refuse_unforeseen(self) -> None:
        if self.awaits_future:
            raise RuntimeError(
                f"policy {type(self.plan.policy).__name__} looks ahead after a prompt, for which the whole model must "
                "run: call kvkeep.generate, kvkeep.prefill or the attached model itself, not a part of it"
            )

    def _check_unattached(self, keys: Tensor) -> None:
        name = type(self.plan.policy).__name__
        if "queries" in self.plan.policy.needs and not self.plan.budget.unlimited:
            raise RuntimeError(
                f"policy {name} reads the model's queries: call kvkeep.attach(model) first, or use "
                "kvkeep.generate, which does"
            )
        if self.plan.vouched != self.seen:
            raise RuntimeError(
                "the new tokens may hold padding, which this cache cannot see: make it from the model that is called, "
                "KVCache(model, ...), or call kvkeep.attach(model) first"
            )
        evicted = self.slots is not None and self.slots.kept != self.seen
        if evicted and keys.shape[2] > 1 and self.plan.budget.schedule != "uniform":
            raise RuntimeError(
                "layers of different lengths cannot share one mask: call kvkeep.attach(model) first, or use "
                "kvkeep.generate, which does"
            )


class Costs(NamedTuple):
    """Bytes of one slot (all KV heads), and bytes that do not grow with slots, of one sequence in one layer."""

    slot: int
    fixed: int


def slot_costs(heads: int, group: int, key_size: int, value_size: int, element_size: int, policy: Policy) -> Costs:
    """What a policy's slots cost in a layer of this shape."""
    slot = heads * ((key_size + value_size) * element_size + _POSITION_BYTES + 4 * len(policy.side))
    streams = sum(4 * math.prod(shape) for shape in policy.streams(heads, group, key_size).values())
    # beside the policy's own streams: the hole of each head and the sequence's length
    return Costs(slot, streams + 8 * heads + _POSITION_BYTES)
