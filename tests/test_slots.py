"""Slots hold what plain lists would, in storage that is measured, released and written in place."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_programs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from twins import PlainSlots, Token

from kvkeep.slots import EMPTY, Slots

D, DV = 2, 3


def content(marks: Tensor, size: int) -> Tensor:
    """Keys or values that can be told apart by mark and dimension."""
    return marks[..., None] * 10.0 + torch.arange(size)


def empty_slots(num_rows: int, num_heads: int) -> Slots:
    keys, values = torch.zeros(num_rows, num_heads, 0, D), torch.zeros(num_rows, num_heads, 0, DV)
    positions = torch.zeros(num_rows, num_heads, 0, dtype=torch.int32)
    streams = {"sequence": torch.arange(num_rows, dtype=torch.float32)[:, None].clone()}
    return Slots(keys, values, positions, {"worth": torch.zeros(num_rows, num_heads, 0)}, streams)


def append(slots: Slots, count: int, start: int = 0, room: int = 0) -> None:
    """`count` tokens at positions from `start` on, each marked by its position."""
    positions = torch.arange(start, start + count, dtype=torch.int32).expand(*slots.positions.shape[:2], -1)
    slots.append(content(positions, D), content(positions, DV), positions, room=room)


def arrays(slots: Slots) -> dict[str, Tensor]:
    found = {"keys": slots.keys, "values": slots.values, "positions": slots.positions, **slots.streams}
    return found | {name: slots.side(name) for name in slots.side_names}


def places(slots: Slots) -> dict[str, int]:
    return {name: array.data_ptr() for name, array in arrays(slots).items()}


class Programs(RuleBasedStateMachine):
    """One program of operations, run on Slots and on plain lists; after each step they must agree."""

    @initialize(num_rows=st.integers(1, 3), num_heads=st.integers(1, 2))
    def start(self, num_rows, num_heads):
        self.slots, self.plain = empty_slots(num_rows, num_heads), PlainSlots(num_rows, num_heads)
        self.next_position, self.next_mark = 0, 1

    def shape(self) -> tuple[int, int]:
        return len(self.plain.heads), len(self.plain.heads[0])

    def fresh(self, count: int, padded: list[bool]) -> list[list[list[Token]]]:
        """Tokens for every row and head; a padded row gets empty ones."""
        num_rows, num_heads = self.shape()
        at = range(self.next_position, self.next_position + count)
        self.next_position += count
        marks = iter(range(self.next_mark, self.next_mark + num_rows * num_heads * count))
        self.next_mark += num_rows * num_heads * count
        return [
            [[None if padded[r] else Token(position, next(marks)) for position in at] for _ in range(num_heads)]
            for r in range(num_rows)
        ]

    def tensors(self, new: list[list[list[Token | None]]], count: int) -> tuple[Tensor, Tensor, Tensor]:
        marks = torch.tensor([[[t.mark if t else 0 for t in h] for h in r] for r in new]).view(*self.shape(), count)
        at = [[[t.position if t else EMPTY for t in head] for head in row] for row in new]
        positions = torch.tensor(at, dtype=torch.int32).view(*self.shape(), count)
        return content(marks, D), content(marks, DV), positions

    def mark(self) -> None:
        """A policy writes its side array: the mark, which the key carries too."""
        self.slots.side("worth").copy_(self.slots.keys[..., 0] / 10)

    def per_head(self, data, strategy) -> list[list]:
        num_rows, num_heads = self.shape()
        return [[data.draw(strategy) for _ in range(num_heads)] for _ in range(num_rows)]

    @rule(count=st.integers(0, 5), room=st.integers(0, 7), padded=st.lists(st.booleans(), min_size=3, max_size=3))
    def append(self, count, room, padded):
        new = self.fresh(count, padded)
        before = places(self.slots)
        fits = self.plain.length + count <= self.plain.capacity
        self.slots.append(*self.tensors(new, count), room=room)
        self.plain.append(new, room)
        self.mark()
        if fits and self.slots.length > count:
            assert places(self.slots) == before

    @precondition(lambda self: self.plain.holes is not None)
    @rule()
    def fill(self):
        new = self.fresh(1, [False] * 3)
        before = places(self.slots)
        index = self.slots.fill(*self.tensors(new, 1))
        assert index[..., 0].tolist() == self.plain.holes
        assert (self.slots.side("worth").gather(2, index) == 0).all()
        self.plain.fill(new)
        self.mark()
        assert places(self.slots) == before

    @precondition(lambda self: self.plain.length > 0)
    @rule(data=st.data(), holes=st.integers(0, 1), blanked=st.booleans())
    def keep(self, data, holes, blanked):
        count = data.draw(st.integers(1, self.plain.length))
        order = st.permutations(range(self.plain.length))
        index = [[chosen[:count] for chosen in row] for row in self.per_head(data, order)]
        emptied = st.booleans() if blanked else st.just(False)
        blank = self.per_head(data, st.lists(emptied, min_size=count, max_size=count))
        old = [StorageWeakRef(array.untyped_storage()) for array in self.slots._arrays.values()]
        self.slots.keep(torch.tensor(index), torch.tensor(blank) if blanked else None, holes=holes)
        self.plain.keep(index, blank, holes)
        assert all(storage.expired() for storage in old)

    @precondition(lambda self: self.plain.length > 0)
    @rule(data=st.data())
    def clear(self, data):
        index = self.per_head(data, st.integers(0, self.plain.length - 1))
        some = st.lists(st.booleans(), min_size=self.shape()[0], max_size=self.shape()[0])
        where = data.draw(st.none() | some)
        before = places(self.slots)
        self.slots.clear(torch.tensor(index), None if where is None else torch.tensor(where)[:, None])
        self.plain.clear(index, where)
        assert places(self.slots) == before

    @precondition(lambda self: self.plain.holes is None)
    @rule(data=st.data())
    def truncate(self, data):
        length = data.draw(st.integers(0, self.plain.length))
        self.slots.truncate(length)
        self.plain.truncate(length)

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, self.shape()[0] - 1), min_size=1, max_size=3))
        self.slots.select(torch.tensor(rows))
        self.plain.select(rows)

    @rule()
    def to_its_own_device(self):
        self.slots.to("cpu")

    @rule()
    def save_and_load(self):
        self.slots = Slots.from_state({name: array.clone() for name, array in self.slots.state().items()})
        self.plain.capacity = self.plain.length

    @rule(data=st.data())
    def try_a_token_and_take_it_back(self, data):
        snapshot = self.slots.snapshot()
        new = self.fresh(1, [False] * 3)
        if self.plain.holes is None:
            self.slots.append(*self.tensors(new, 1))
        else:
            self.slots.fill(*self.tensors(new, 1))
        self.mark()
        for stream in self.slots.streams.values():
            stream.add_(1)
        victims = self.per_head(data, st.integers(0, self.slots.length - 1))
        self.slots.clear(torch.tensor(victims))
        self.slots.restore(snapshot)

    @invariant()
    def both_hold_the_same(self):
        slots, plain = self.slots, self.plain
        assert (slots.length, slots.capacity, slots.batch_size) == (plain.length, plain.capacity, len(plain.heads))
        assert slots.kept == plain.length - (plain.holes is not None)
        assert (None if slots.holes is None else slots.holes.tolist()) == plain.holes
        assert slots.streams["sequence"][:, 0].tolist() == plain.streams
        expected = [[[t.position if t else EMPTY for t in head] for head in row] for row in plain.heads]
        assert slots.positions.tolist() == expected
        assert slots.occupied.tolist() == [[[t is not None for t in head] for head in row] for row in plain.heads]
        marks = torch.tensor([[[t.mark if t else -1 for t in h] for h in r] for r in plain.heads])
        held = marks >= 0
        assert torch.equal(slots.keys[held], content(marks, D)[held])
        assert torch.equal(slots.values[held], content(marks, DV)[held])
        assert torch.equal(slots.side("worth")[held], marks[held].float())

    @invariant()
    def bytes_are_those_of_what_is_allocated(self):
        num_rows, num_heads = self.shape()
        cells = num_rows * num_heads * self.plain.capacity
        expected = {"keys": 4 * D * cells, "values": 4 * DV * cells, "positions": 4 * cells, "worth": 4 * cells}
        expected["sequence"] = 4 * num_rows
        if self.plain.holes is not None:
            expected["holes"] = 8 * num_rows * num_heads
        assert self.slots.bytes_by_array() == expected


def test_programs_of_appends_evictions_and_moves_leave_what_plain_lists_hold():
    # a busy machine is no reason to fail
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    run_programs(Programs, settings=settings(patient, max_examples=500, stateful_step_count=12))


def test_ten_thousand_single_appends_reallocate_a_few_dozen_times():
    slots = empty_slots(1, 1)
    allocations, copied = 0, 0
    for position in range(10_000):
        before = slots.capacity
        append(slots, 1, position, room=64 + position // 8)
        if slots.capacity != before:
            allocations, copied = allocations + 1, copied + before
    assert slots.positions[0, 0].tolist() == list(range(10_000))
    # each growth is by an eighth at least: log(10,000 / 64) / log(9 / 8) = 43
    assert allocations <= 43
    # and the copies add up to a geometric sum
    assert copied <= 9 * 10_000


def test_growing_without_room_allocates_what_is_needed_and_no_more():
    slots = empty_slots(2, 2)
    append(slots, 3)
    append(slots, 4, 3)
    assert slots.capacity == slots.length == 7


def test_keeping_everything_still_moves_to_fresh_storage():
    slots = empty_slots(1, 2)
    append(slots, 6, room=100)
    old = StorageWeakRef(slots.keys.untyped_storage())
    slots.keep(torch.arange(6).expand(1, 2, -1))
    assert old.expired()
    assert slots.bytes_by_array()["keys"] == 2 * 6 * D * 4


def test_the_prompts_own_tensors_are_released_by_the_first_eviction():
    keys, values = torch.randn(1, 2, 500, D), torch.randn(1, 2, 500, DV)
    slots = Slots(keys, values, torch.arange(500, dtype=torch.int32).expand(1, 2, -1).clone())
    storages = [StorageWeakRef(keys.untyped_storage()), StorageWeakRef(values.untyped_storage())]
    del keys, values
    slots.keep(torch.arange(10).expand(1, 2, -1), holes=1)
    assert all(storage.expired() for storage in storages)


def test_a_hole_in_front_is_empty_and_zero_in_every_array():
    slots = empty_slots(1, 2)
    append(slots, 5, start=1)
    slots.side("worth").fill_(7)
    slots.keep(torch.tensor([[[1, 3], [0, 4]]]), holes=1)
    assert slots.positions.tolist() == [[[EMPTY, 2, 4], [EMPTY, 1, 5]]]
    assert slots.holes.tolist() == [[0, 0]]
    assert slots.kept == 2
    for array in (slots.keys, slots.values, slots.side("worth")):
        assert (array[:, :, 0] == 0).all() and (array[:, :, 1:] != 0).all()


def test_filling_without_a_hole_is_an_error():
    slots = empty_slots(1, 1)
    append(slots, 3)
    with pytest.raises(AssertionError, match="hole"):
        slots.fill(torch.zeros(1, 1, 1, D), torch.zeros(1, 1, 1, DV), torch.zeros(1, 1, 1, dtype=torch.int32))


def test_appended_slots_start_with_zero_in_every_side_array():
    slots = empty_slots(1, 1)
    append(slots, 3, room=10)
    slots.side("worth").fill_(5)
    slots.truncate(1)
    append(slots, 2, 1)
    assert slots.side("worth").tolist() == [[[5, 0, 0]]]


def test_moving_to_a_device_takes_everything_along():
    slots = empty_slots(2, 2)
    append(slots, 5)
    slots.clear(torch.zeros(2, 2, dtype=torch.long))
    slots.to("meta")
    assert {name: array.device.type for name, array in slots.state().items()} == dict.fromkeys(
        ("keys", "values", "positions", "worth", "stream.sequence", "holes"), "meta"
    )


def test_what_inference_mode_made_can_be_written_outside_of_it():
    grown, kept = empty_slots(1, 2), empty_slots(1, 2)
    append(kept, 6)
    with torch.inference_mode():
        append(grown, 6, room=2)
        kept.keep(torch.arange(3).expand(1, 2, -1), holes=1)
    append(grown, 2, 6)
    kept.fill(*(array[:, :, 6:7] for array in (grown.keys, grown.values, grown.positions)))
    assert grown.positions[0, 0].tolist() == list(range(8))
    assert kept.positions[0, 0].tolist() == [6, 0, 1, 2]


def test_several_tokens_are_taken_back_one_by_one():
    slots = empty_slots(1, 2)
    append(slots, 6)
    slots.side("worth").copy_(torch.arange(6.0).expand(1, 2, -1))
    slots.keep(torch.tensor([[[0, 2, 5], [1, 2, 3]]]), holes=1)
    before = {name: array.clone() for name, array in slots.state().items()}
    taken = []
    for position, victims in ((6, [[1, 2]]), (7, [[2, 0]]), (8, [[0, 1]])):
        taken.append(slots.snapshot())
        at = torch.full((1, 2, 1), position, dtype=torch.int32)
        slots.fill(content(at, D), content(at, DV), at)
        slots.side("worth").add_(1)
        slots.streams["sequence"].add_(1)
        slots.clear(torch.tensor(victims))
    for snapshot in reversed(taken):
        slots.restore(snapshot)
    assert all(torch.equal(array, before[name]) for name, array in slots.state().items())


LAYOUTS = {
    "as it is": lambda array: array,
    "tokens before heads": lambda array: array.transpose(1, 2).contiguous().transpose(1, 2),
    "room behind": lambda array: torch.cat([array, array], 2)[:, :, : array.shape[2]],
    "room before": lambda array: torch.cat([array, array], 2)[:, :, array.shape[2] :],
    "part of a wider array": lambda array: torch.cat([array, array], -1)[..., array.shape[-1] :],
    "numbers apart": lambda array: torch.stack([array, array], -1)[..., 1],
    "heads alike": lambda array: array[:, :1].expand_as(array),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_slots", [0, 1, 5])
def test_slots_are_taken_out_of_arrays_in_any_layout(layout, num_slots):
    generator = torch.Generator().manual_seed(0)
    keys = LAYOUTS[layout](torch.randn(2, 3, 7, D, generator=generator))
    values = LAYOUTS[layout](torch.randn(2, 3, 7, DV, generator=generator))
    index = torch.randint(7, (2, 3, num_slots), generator=generator)
    taken = Slots(keys, values, torch.zeros(2, 3, 7, dtype=torch.int32)).tokens(index)
    for found, array in zip(taken, (keys, values), strict=True):
        each = index[..., None].expand(*index.shape, array.shape[-1])
        assert torch.equal(found, array.gather(2, each))
