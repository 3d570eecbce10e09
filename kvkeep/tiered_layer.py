"""One layer whose policy holds windows of tokens as codes before they go.

B sequences, H KV heads, G query heads per KV head, N slots, F windows in slots and W as codes, of w tokens each,
C = F + W, X queries of a KV head, T new tokens, D head size.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .attention import CodedAttention, Part, read_coded
from .layer import KVLayer, Show, show
from .policies import Observation, Tiers
from .routing import Room, Route, free_bytes, route, share_out, side_by_side
from .selection import by_worth, protected
from .slots import EMPTY, Slots
from .windows import Codec, TieredSlots, guarded_codec, key_bits


class _InSlots(NamedTuple):
    """Windows whose tokens lie in slots: the slot and the position of each token, -1 in windows that are none."""

    slot: Int[Tensor, "B H F w"]
    positions: Int[Tensor, "B H F w"]

    @property
    def starts(self) -> Int[Tensor, "B H F"]:
        """Position of each window's first token."""
        return self.positions.amin(-1)


class _Candidates(NamedTuple):
    """All windows that compete: those in slots, then those held as codes alone; the rest of `starts` is -1.

    `place` says for each window with codes where among the candidates it stands.
    """

    worth: Float[Tensor, "B H C"]
    starts: Int[Tensor, "B H C"]
    has_codes: Bool[Tensor, "B H C"]
    place: Int[Tensor, "B H W"]


class TieredLayer(KVLayer):
    """Slots for sinks, the best windows and the recent tokens; codes for the next best windows.

    Windows are `w` neighbouring tokens, counted from behind the sinks, or without `Tiers.neighbours` any `w` tokens of
    like worth. They compete anew whenever slots hold a window more than they may, which is once in w tokens.
    """

    storage = TieredSlots

    def _clear(self) -> None:
        super()._clear()
        # tokens seen before which no window can be due
        self._due_from = 0
        # tokens seen before which windows do not compete for the first time
        self._first_at = 0
        self._codec: Codec | None = None

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        counters, tensors = super().state()
        return {**counters, "first_at": self._first_at}, tensors

    def restore_state(self, counters: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().restore_state(counters, tensors)
        self._first_at = counters["first_at"]

    # reading

    def beyond(self, scale: float) -> Callable[[Float[Tensor, "B H X D"]], Part] | None:
        coded = self._tiered.readable
        if coded is None:
            return None
        codec = self._known_codec
        return lambda queries: read_coded(queries, coded, codec, scale).part

    def _attend_coded(self, queries: Tensor, query_positions: Tensor, scale: float) -> CodedAttention | None:
        coded = self._tiered.readable
        return None if coded is None else CodedAttention(queries, query_positions, coded, self._known_codec, scale)

    def read(
        self, queries: Float[Tensor, "B HG T D"], seen: Observation, scale: float, *, stock: bool = True
    ) -> Float[Tensor, "B HG T Dv"]:
        if seen.coded is None:
            return super().read(queries, seen, scale, stock=stock)
        assert seen.attention is not None and isinstance(seen.coded, CodedAttention)
        slots = seen.slots
        return seen.coded.with_slots(queries, slots.keys, slots.values, slots.positions, seen.attention.logits)

    def settle(self, seen: Observation, show: Show = show) -> None:
        if seen.coded is not None and not seen.ahead:
            coded = self._tiered.readable
            assert coded is not None
            coded.side("worth").copy_(self.plan.policy.revise(coded.side("worth"), seen))
        super().settle(seen, show)

    # what changes the rows or what is held

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._due_from = 0

    def _restore(self, undo: list) -> None:
        super()._restore(undo)
        self._due_from = 0

    def holdings(self) -> dict[str, Int[Tensor, "B H _"]]:
        held = super().holdings()
        coded = self._tiered.readable if held else None
        if coded is None:
            return held
        positions = self._known_codec.positions(coded).masked_fill(coded.side("dormant")[..., None], EMPTY)
        return {**held, "quantized": positions.flatten(2)}

    @property
    def num_coded(self) -> float:
        quantized = self.holdings().get("quantized")
        return 0.0 if quantized is None else float((quantized != EMPTY).sum(-1).float().mean())

    # routing

    def _evict_surplus(self, seen: Observation) -> None:
        if self._tiers.first_after and seen.num_new > 1 and self._tiered.coded is None:
            self._first_at = self.seen + self._tiers.first_after
        if self.seen < max(self._due_from, self._first_at):
            return
        count = self._num_in_slots()
        if int(count.amax()) == 0:
            return
        if bool(self._due(count, self._room_for_windows(self._codec_now)).any()):
            self._fresh = 0
            score = self._score(seen)
            held = self._windows_in_slots(score)
            codec = self._codec_for(held, seen)
            room = self._room_for_windows(codec)
            choice = self._candidates(held, score)
            new = route(choice.worth, choice.starts, choice.has_codes, room, self._staying(held, choice))
            self._move(held, choice, _of_due(self._due(count, room), held, choice, new), codec, room)
        # the row in which most tokens wait for the others of their window has a whole one first
        self._due_from = self.seen + self._tiers.window - int(self._num_waiting().amax())

    def _due(self, count: Int[Tensor, " B"], room: Room) -> Bool[Tensor, " B"]:
        """Which sequences hold more windows, `count` of them in slots, than there is room for."""
        due = count > room.full
        if self._tiered.coded is None:
            return due
        # a growing budget may have turned room for codes into room for slots
        return due | (self._tiered.coded.occupied.sum(-1).amax(1) > room.coded)

    def _staying(self, held: _InSlots, choice: _Candidates) -> Bool[Tensor, "B H C"] | None:
        """The windows that may not come back into full precision; None where all may."""
        if self._tiers.promote:
            return None
        stays = choice.has_codes.clone()
        stays[..., : held.starts.shape[2]] = False
        return stays

    def _candidates(self, held: _InSlots, score: Float[Tensor, "B H N"]) -> _Candidates:
        """The windows that compete, with what each is worth."""
        largest, size = torch.finfo(score.dtype).max, held.slot.shape[-1]
        tokens = score.clamp(-largest, largest).gather(2, held.slot.flatten(2)).unflatten(2, held.slot.shape[2:])
        worth = (tokens / size).sum(-1)
        coded = self._tiered.coded
        starts, has_codes = held.starts, torch.zeros_like(held.starts, dtype=torch.bool)
        place = held.starts.new_zeros(*starts.shape[:2], 0, dtype=torch.long)
        if coded is not None:
            found, has_codes = _find(coded.positions, held.starts)
            F, W = starts.shape[2], coded.length
            order = torch.arange(F + W, device=starts.device).expand(*starts.shape[:2], -1)
            # windows without codes of their own write behind the end
            place = torch.cat([order[..., F:], order[..., :1]], -1).scatter(
                2, torch.where(has_codes, found, W), order[..., :F]
            )[..., :W]
            dormant = place < F
            starts = torch.cat([starts, coded.positions.masked_fill(dormant, EMPTY)], -1)
            worth = torch.cat([worth, coded.side("worth")], -1)
            has_codes = torch.cat([has_codes, ~dormant], -1)
        if self._tiers.share_heads:
            worth = _over_heads(worth)
        return _Candidates(worth, starts, has_codes, place)

    def _move(self, held: _InSlots, choice: _Candidates, route: Route, codec: Codec, room: Room) -> None:
        """Code what falls, rebuild what rises, drop the rest."""
        F = held.starts.shape[2]
        slots = self._tiered
        fresh = route.coded[..., :F] & ~choice.has_codes[..., :F]
        new = self._encoded(held, fresh, choice.worth, codec)
        risen = self._decoded(route.full[..., F:], codec)
        if slots.coded is not None:
            slots.coded.side("dormant").copy_(route.full.gather(2, choice.place))
            slots.coded.side("worth").copy_(choice.worth.gather(2, choice.place))
        stays = route.coded.gather(2, choice.place)
        if new is not None:
            stays = torch.cat([stays, new.positions != EMPTY], -1)
            slots.coded = _joined(slots.coded, new)
        if slots.coded is not None:
            slots.coded.keep(*_in_order(slots.coded.positions, stays))
        tokens = self._kept_tokens(held, route.full[..., :F])
        if risen is not None:
            slots.extend(risen)
            tokens = torch.cat([tokens, risen.occupied], -1)
        index, blank = _in_order(slots.positions, tokens)
        self.has_empty = self.has_empty or blank is not None
        slots.keep(index, blank, room=self._room_behind(room, index.shape[-1]))

    def _encoded(
        self, held: _InSlots, fresh: Bool[Tensor, "B H F"], worth: Float[Tensor, "B H C"], codec: Codec
    ) -> Slots | None:
        """Codes of the windows in slots that have none yet."""
        chosen = _marked(fresh)
        if chosen is None:
            return None
        index = held.slot.gather(2, chosen[..., None].expand(*chosen.shape, held.slot.shape[-1]))
        others = ~fresh.gather(2, chosen)[..., None]
        positions = held.positions.gather(2, chosen[..., None].expand_as(index)).masked_fill(others, EMPTY)
        keys, values = self._slots.tokens(index)
        return codec.encode(keys, values, positions, worth.gather(2, chosen))

    def _decoded(self, risen: Bool[Tensor, "B H W"], codec: Codec) -> Slots | None:
        """Tokens in full precision of windows that were held as codes alone."""
        chosen = _marked(risen)
        if chosen is None:
            return None
        slots = self._tiered
        assert slots.coded is not None
        coded = slots.coded.taken(chosen, ~risen.gather(2, chosen))
        dtype = slots.keys.dtype
        worth = coded.side("worth").repeat_interleave(codec.window, -1)
        # the first is what ranks; whatever else the policy notes of a token was not kept, and begins anew
        side = dict.fromkeys(self.plan.policy.side, torch.zeros_like(worth))
        side |= dict.fromkeys(self.plan.policy.side[:1], worth)
        return Slots(
            codec.keys(coded).flatten(2, 3).to(dtype),
            codec.values(coded).flatten(2, 3).to(dtype),
            codec.positions(coded).flatten(2),
            side,
        )

    def _kept_tokens(self, held: _InSlots, full: Bool[Tensor, "B H F"]) -> Bool[Tensor, "B H N"]:
        """Marks slots of windows in full precision, and of all that is in no window."""
        return _marks(self._slots.occupied, held, full[..., None].expand_as(held.slot))

    # how much

    @property
    def _tiered(self) -> TieredSlots:
        assert isinstance(self.slots, TieredSlots)
        return self.slots

    @property
    def _tiers(self) -> Tiers:
        tiers = self.plan.policy.tiers
        assert tiers is not None
        return tiers

    @property
    def _lengths(self) -> Int[Tensor, " B"]:
        assert self.lengths is not None
        return self.lengths

    def _num_windows(self) -> Int[Tensor, " B"]:
        """Windows that are whole and not recent."""
        return torch.div(self._num_ranked, self._tiers.window, rounding_mode="floor")

    def _num_waiting(self) -> Int[Tensor, " B"]:
        """Tokens that are not recent and too few for one more window."""
        return self._num_ranked % self._tiers.window

    @property
    def _num_ranked(self) -> Int[Tensor, " B"]:
        """Tokens seen that are neither sinks nor recent."""
        budget = self.plan.budget
        return (self._lengths - budget.sinks - budget.recent).clamp(min=0)

    def _num_in_slots(self) -> Int[Tensor, " B"]:
        """Windows in slots, of the head that has most."""
        return torch.div(self._unprotected.sum(-1).amax(1), self._tiers.window, rounding_mode="floor")

    @property
    def _unprotected(self) -> Bool[Tensor, "B H N"]:
        """Marks slots of tokens that are neither sinks nor recent."""
        budget, slots = self.plan.budget, self._slots
        return slots.occupied & ~protected(slots.positions, self._lengths, sinks=budget.sinks, recent=budget.recent)

    def _room_for_windows(self, codec: Codec) -> Room:
        """What the budget's bytes hold: as many as its slots would take without tiers."""
        slot_bytes = self._slot_bytes
        limit, rows = self.limit
        budget = self.plan.budget
        slots = torch.full_like(self._lengths, limit, dtype=torch.long) if rows is None else rows.long()
        free = free_bytes(slots, protected=budget.sinks + budget.recent, window=codec.window, slot_bytes=slot_bytes)
        windows = self._num_windows().long()
        if budget.bytes is not None:
            # sequences share the bytes, so they divide them in the same way
            windows = windows.amax().expand_as(windows)
        sizes = {
            "full_bytes": codec.window * slot_bytes,
            "coded_bytes": self._slots.positions.shape[1] * codec.slot_bytes,
        }
        room = share_out(windows, free, quantized=self._tiers.quantized, **sizes)
        return side_by_side(room, windows, free, **sizes)

    @property
    def _slot_bytes(self) -> int:
        """Bytes of one slot of all KV heads."""
        assert self._costs is not None
        keys, values = self._slots.keys, self._slots.values
        element = keys.element_size()
        spared = element - min(element, self._tiers.element_bytes or element)
        return self._costs.slot - spared * keys.shape[1] * (keys.shape[3] + values.shape[3])

    def _room_behind(self, room: Room, length: int) -> int:
        """Slots to allocate for the tokens that come before windows compete again."""
        budget, size = self.plan.budget, self._tiers.window
        most = budget.sinks + budget.recent + size + int(room.full.amax()) * size
        return max(0, most - length)

    def _room(self, num_new: int) -> int:
        if self._answer is not None:
            return super()._room(num_new)
        if self.slots is None or self.slots.length + num_new <= self.slots.capacity:
            return 0
        return self._room_behind(self._room_for_windows(self._codec_now), self._slots.length + num_new)

    def _over_budget(self, by: int = 1) -> Bool[Tensor, "B 1"]:
        room = self._room_for_windows(self._plain_codec)
        return ((self._num_windows() - room.full) * self._tiers.window >= by)[:, None]

    @property
    def _plain_codec(self) -> Codec:
        slots, tiers = self._slots, self._tiers
        assert self.plan.table is not None
        shape = tiers.window_shape(slots.keys.shape[-1], slots.values.shape[-1])
        return Codec(**asdict(shape), table=self.plan.table, shared=tiers.share_heads)

    @property
    def _codec_now(self) -> Codec:
        return self._plain_codec if self._tiered.coded is None else self._known_codec

    @property
    def _known_codec(self) -> Codec:
        """The codec that the codes held were made with."""
        coded = self._tiered.coded
        assert coded is not None
        if self._codec is None:
            plain = self._plain_codec
            self._codec = replace(plain, key_bits=key_bits(coded, plain.key_size))
        return self._codec

    def _codec_for(self, held: _InSlots, seen: Observation) -> Codec:
        """The codec of this layer, chosen when the first windows must be coded."""
        if self._tiered.coded is not None:
            return self._known_codec
        self._codec = None
        plain = self._plain_codec
        if seen.queries is None or seen.scale is None:
            return plain
        keys, _ = self._slots.tokens(held.slot)
        queries = seen.queries[:, :, -_GUARD_QUERIES:]
        return guarded_codec(plain, keys, held.positions, queries, seen.scale, self._tiers.guard)

    def _windows_in_slots(self, score: Float[Tensor, "B H N"]) -> _InSlots:
        """The windows in slots: neighbours, or those that came back and the other tokens from the worthiest on."""
        if self._tiers.neighbours:
            return self._neighbours()
        back = self._back_in_slots()
        loose = self._unprotected
        if back is not None:
            loose = _marks(loose, back, torch.zeros_like(back.slot, dtype=torch.bool))
        if self._tiers.share_heads:
            score = _over_heads(score)
        apart = self._slots.positions.masked_fill(~loose, EMPTY)
        found = _in_windows(
            by_worth(score, apart, torch.zeros_like(loose)), apart, self._num_waiting(), self._tiers.window
        )
        return found if back is None else _InSlots(*(torch.cat(pair, 2) for pair in zip(back, found, strict=True)))

    def _neighbours(self) -> _InSlots:
        """Windows of the grid, oldest first."""
        positions, size, sinks = self._slots.positions, self._tiers.window, self.plan.budget.sinks
        length, tail = positions.shape[-1], (self._lengths - sinks - self._num_windows() * size).clamp(min=0)
        most = (length - int(tail.amin())) // size
        # in order of position, what is empty first and the tail last
        order = positions.argsort(dim=-1, stable=True)
        place = (length - tail)[:, None] + torch.arange(-most * size, 0, device=tail.device)
        index = order.gather(2, place.clamp(min=0)[:, None].expand(-1, positions.shape[1], -1))
        at = positions.gather(2, index).masked_fill((place < 0)[:, None], EMPTY).unflatten(2, (most, size))
        return _InSlots(index.unflatten(2, (most, size)), at.masked_fill(at[..., :1] < sinks, EMPTY))

    def _back_in_slots(self) -> _InSlots | None:
        """The windows that came back from codes; None where there is none."""
        coded = self._tiered.coded
        chosen = None if coded is None else _marked(coded.side("dormant"))
        if coded is None or chosen is None:
            return None
        each = chosen[..., None].expand(*chosen.shape, self._tiers.window)
        gone = ~coded.side("dormant").gather(2, chosen)[..., None]
        at = self._known_codec.positions(coded).gather(2, each).masked_fill(gone, EMPTY)
        order = self._slots.positions.argsort(dim=-1, stable=True)
        found, _ = _find(self._slots.positions.gather(2, order), at.flatten(2))
        return _InSlots(order.gather(2, found).view_as(at), at)


# newest queries by which the error of coded keys is judged
_GUARD_QUERIES = 16


def _of_due(due: Bool[Tensor, " B"], held: _InSlots, choice: _Candidates, new: Route) -> Route:
    """Where the windows go in sequences that are due; in the others they stay where they are."""
    in_slots = torch.zeros_like(choice.has_codes)
    in_slots[..., : held.starts.shape[2]] = held.starts != EMPTY
    rows = due[:, None, None]
    coded = choice.has_codes & (choice.starts != EMPTY)
    return Route(torch.where(rows, new.full, in_slots), torch.where(rows, new.coded, coded))


def _over_heads(score: Float[Tensor, "B H N"]) -> Float[Tensor, "B H N"]:
    """The mean over heads, in each."""
    return (score / score.shape[1]).sum(1, keepdim=True).expand_as(score)


def _marks(marked: Bool[Tensor, "B H N"], held: _InSlots, anew: Bool[Tensor, "B H F w"]) -> Bool[Tensor, "B H N"]:
    """`marked`, with other marks on the slots of windows."""
    # what is no window writes behind the end
    index = torch.where(held.positions == EMPTY, marked.shape[-1], held.slot)
    return torch.cat([marked, marked[..., :1]], -1).scatter(2, index.flatten(2), anew.flatten(2))[..., :-1]


def _in_windows(
    order: Int[Tensor, "B H N"], positions: Int[Tensor, "B H N"], first: Int[Tensor, " B"], size: int
) -> _InSlots:
    """Windows of `size` slots in an order that puts the empty ones last, behind the `first` ones of each sequence."""
    number = (positions != EMPTY).sum(-1)
    most = int(torch.div(number - first[:, None], size, rounding_mode="floor").amax().clamp(min=0))
    place = (first[:, None] + torch.arange(most * size, device=first.device))[:, None]
    index = order.gather(2, place.clamp(max=order.shape[-1] - 1).expand(*order.shape[:2], -1))
    at = positions.gather(2, index).masked_fill(place >= number[..., None], EMPTY)
    return _InSlots(index.unflatten(2, (most, size)), at.unflatten(2, (most, size)))


def _find(sorted_positions: Tensor, wanted: Tensor) -> tuple[Int[Tensor, "B H F"], Bool[Tensor, "B H F"]]:
    """Where positions stand among others in order, and whether they are there."""
    if sorted_positions.shape[-1] == 0:
        return torch.zeros_like(wanted, dtype=torch.long), torch.zeros_like(wanted, dtype=torch.bool)
    found = torch.searchsorted(sorted_positions.contiguous(), wanted).clamp(max=sorted_positions.shape[-1] - 1)
    return found, (sorted_positions.gather(2, found) == wanted) & (wanted != EMPTY)


def _marked(marks: Bool[Tensor, "B H C"]) -> Int[Tensor, "B H M"] | None:
    """Indices of the marked ones, as many as the head with most has; heads with fewer get others behind theirs."""
    most = int(marks.sum(-1).amax()) if marks.numel() else 0
    return marks.int().argsort(dim=-1, descending=True, stable=True)[..., :most] if most else None


def _in_order(positions: Int[Tensor, "B H N"], kept: Bool[Tensor, "B H N"]) -> tuple[Tensor, Tensor | None]:
    """Indices of what is kept in order of position, and marks of empty ones before them where a head keeps fewer."""
    at = torch.where(kept & (positions != EMPTY), positions, EMPTY)
    most = int((at != EMPTY).sum(-1).amax())
    index = at.argsort(dim=-1, stable=True)[..., at.shape[-1] - most :]
    blank = at.gather(2, index) == EMPTY
    return index, blank if bool(blank.any()) else None


def _joined(coded: Slots | None, new: Slots) -> Slots:
    if coded is None:
        return new
    coded.extend(new)
    return coded
