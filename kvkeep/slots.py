"""Slots: the keys and values one layer keeps, with the true position of each.

B sequences, H KV heads, N slots, T new tokens, D head size.

Every KV head has the same number of slots but may hold different tokens. A slot whose position is -1 is empty.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

EMPTY = -1


class Snapshot(NamedTuple):
    """What one appended or filled token and its eviction may change; see `Slots.snapshot`."""

    length: int
    holes: Tensor | None
    arrays: dict[str, Tensor]
    small: dict[str, Tensor]
    streams: dict[str, Tensor]
    overwritten: dict[str, Tensor]
    coded: "Snapshot | None" = None


class Slots:
    """Keys and values `[B, H, N, D]`, positions `[B, H, N]` and named side arrays `[B, H, N]`, all moved together.

    `streams` are arrays `[B, ...]` that belong to a sequence, not to a slot; they follow the sequences. The arrays may
    have room for more slots than are in use; `length` is N. After an eviction in place, `holes` `[B, H]` names the
    empty slot of each head that the next token takes.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        side: dict[str, Tensor] | None = None,
        streams: dict[str, Tensor] | None = None,
    ):
        self._arrays = {"keys": keys, "values": values, "positions": positions, **(side or {})}
        self.streams = streams or {}
        self.length = positions.shape[-1]
        self.holes: Tensor | None = None

    @property
    def keys(self) -> Float[Tensor, "B H N D"] | UInt8[Tensor, "B H N w P"]:
        return self._arrays["keys"][:, :, : self.length]

    @property
    def values(self) -> Float[Tensor, "B H N Dv"] | UInt8[Tensor, "B H N w P"]:
        return self._arrays["values"][:, :, : self.length]

    @property
    def positions(self) -> Int[Tensor, "B H N"]:
        return self._arrays["positions"][:, :, : self.length]

    @property
    def side_names(self) -> tuple[str, ...]:
        return tuple(name for name in self._arrays if name not in ("keys", "values", "positions"))

    @property
    def notes(self) -> dict[str, Tensor]:
        """What a policy has written down: side arrays and streams, as views that may be written."""
        return {**{name: self.side(name) for name in self.side_names}, **self.streams}

    def copy_notes(self, notes: Mapping[str, Tensor]) -> None:
        """Take over what an equal policy has written down of the same tokens."""
        for name, array in self.notes.items():
            array.copy_(notes[name])

    def tokens(self, index: Int[Tensor, "B H ..."]) -> tuple[Tensor, Tensor]:
        """Keys and values at slots `index`: its shape, and behind it the numbers of one slot."""
        return self._gather("keys", index), self._gather("values", index)

    def lying(self, index: Int[Tensor, "B H M"]) -> tuple[Tensor, Tensor, Int[Tensor, "B H M"]]:
        """Keys and values among which the tokens at slots `index` lie, uncopied where that can be, and where."""
        return self.keys, self.values, index

    def side(self, name: str) -> Shaped[Tensor, "B H N ..."]:
        """The side array `name`, as a view that may be written."""
        return self._arrays[name][:, :, : self.length]

    @property
    def occupied(self) -> Bool[Tensor, "B H N"]:
        return self.positions != EMPTY

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._arrays["keys"].dtype

    @property
    def batch_size(self) -> int:
        return self._arrays["positions"].shape[0]

    @property
    def capacity(self) -> int:
        return self._arrays["positions"].shape[-1]

    @property
    def kept(self) -> int:
        """Slots in use, without the hole that waits for the next token."""
        return self.length - (self.holes is not None)

    def bytes_by_array(self) -> dict[str, int]:
        """Measured bytes of each array's storage, unused room included."""
        held = {**self._arrays, **self.streams}
        if self.holes is not None:
            held["holes"] = self.holes
        return {name: array.untyped_storage().nbytes() for name, array in held.items()}

    def append(self, keys: Tensor, values: Tensor, positions: Int[Tensor, "B H T"], *, room: int = 0) -> None:
        """Write T new tokens behind the slots in use.

        Args:
            keys, values: `[B, H, T, D]`.
            positions: true positions, -1 for padding.
            room: slots to allocate beyond what is needed if the arrays must grow.
        """
        start, stop = self.length, self.length + positions.shape[-1]
        if stop > self.capacity:
            self._grow(stop + room)
        self.length = stop
        self._arrays["keys"][:, :, start:stop] = keys
        self._arrays["values"][:, :, start:stop] = values
        self._arrays["positions"][:, :, start:stop] = positions
        for name in self.side_names:
            self._arrays[name][:, :, start:stop] = 0

    def extend(self, other: "Slots") -> None:
        """Write what `other` holds behind the slots in use, side arrays included."""
        self.append(other.keys, other.values, other.positions)
        for name in self.side_names:
            self.side(name)[:, :, self.length - other.length :] = other.side(name)

    def fill(self, keys: Tensor, values: Tensor, positions: Int[Tensor, "B H 1"]) -> Int[Tensor, "B H 1"]:
        """Write one token a head into its hole, in place; returns the slot index of each."""
        assert self.holes is not None, "fill needs a hole in every head"
        index = self.holes[..., None]
        self.holes = None
        self._write(index, {"keys": keys, "values": values})
        self._arrays["positions"].scatter_(2, index, positions)
        for name in self.side_names:
            self._arrays[name].scatter_(2, index, 0.0)
        return index

    def keep(
        self,
        index: Int[Tensor, "B H M"],
        blank: Bool[Tensor, "B H M"] | None = None,
        *,
        holes: int = 0,
        room: int = 0,
    ) -> None:
        """Keep only the slots `index`, in that order, in fresh storage; the old storage is released.

        Args:
            index: slots to keep.
            blank: survivors to empty all the same (rows that may hold fewer than M).
            holes: 0, or 1 to put one empty slot before the survivors for the next token.
            room: slots to allocate for later tokens.
        """
        positions = self.positions.gather(2, index)
        if blank is not None:
            positions = positions.masked_fill(blank, EMPTY)
        # ordinary tensors even under inference_mode: they are written in place later, perhaps outside of it
        with torch.inference_mode(False):
            self._arrays = {
                name: _with_room(self._gather(name, index) if name != "positions" else positions, holes, room)
                for name in self._arrays
            }
        self.length = index.shape[-1] + holes
        self.holes = self._last_empty() if holes else None

    def taken(self, index: Int[Tensor, "B H M"], blank: Bool[Tensor, "B H M"]) -> "Slots":
        """A copy of the slots `index`, those marked `blank` empty."""
        arrays = {name: self._gather(name, index) for name in self._arrays}
        positions = arrays.pop("positions").masked_fill(blank, EMPTY)
        return Slots(arrays.pop("keys"), arrays.pop("values"), positions, arrays)

    def clear(self, index: Int[Tensor, "B H"], where: Bool[Tensor, "B 1"] | None = None) -> None:
        """Empty one slot a head in place (only in rows `where`) and make it the hole for the next token."""
        emptied = index[..., None]
        if where is not None:
            old = self.positions.gather(2, emptied)
            self._arrays["positions"].scatter_(2, emptied, old.masked_fill(where[..., None], EMPTY))
            holes = self._last_empty()
            self.holes = holes if bool((holes >= 0).all()) else None
        else:
            self._arrays["positions"].scatter_(2, emptied, EMPTY)
            self.holes = index

    def truncate(self, length: int) -> None:
        """Take back the slots behind `length`. Only exact while nothing was evicted since they were appended."""
        assert self.holes is None and length <= self.length
        self.length = length

    def state(self) -> dict[str, Tensor]:
        """Everything in use, by name, for saving; `Slots.from_state` is its inverse."""
        arrays = {name: array[:, :, : self.length] for name, array in self._arrays.items()}
        streams = {f"stream.{name}": stream for name, stream in self.streams.items()}
        holes = {} if self.holes is None else {"holes": self.holes}
        return {**arrays, **streams, **holes}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "Slots":
        holes = state.pop("holes", None)
        streams = {name: state.pop(name) for name in list(state) if name.startswith("stream.")}
        side = {name: array for name, array in state.items() if name not in ("keys", "values", "positions")}
        named = {name.removeprefix("stream."): stream for name, stream in streams.items()}
        slots = cls(state["keys"], state["values"], state["positions"], side, named)
        slots.holes = holes
        return slots

    def snapshot(self) -> Snapshot:
        """Enough to undo the next token: everything small, and the keys and values its hole still holds."""
        numbers = [name for name, array in self._arrays.items() if array.ndim == 3]
        small = {name: self._arrays[name][:, :, : self.length].clone() for name in numbers}
        overwritten = {}
        if self.holes is not None:
            overwritten = {name: self._gather(name, self.holes[..., None]) for name in ("keys", "values")}
        streams = {name: stream.clone() for name, stream in self.streams.items()}
        return Snapshot(self.length, self.holes, dict(self._arrays), small, streams, overwritten)

    def restore(self, snapshot: Snapshot) -> None:
        """Undo the one token that came after `snapshot` (and, going back step by step, any number)."""
        self.length, self.holes = snapshot.length, snapshot.holes
        # storage that was left behind since holds what it held
        self._arrays = dict(snapshot.arrays)
        for name, array in snapshot.small.items():
            self._arrays[name][:, :, : self.length] = array
        for name, stream in snapshot.streams.items():
            self.streams[name].copy_(stream)
        if self.holes is not None:
            self._write(self.holes[..., None], snapshot.overwritten)

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep the sequences `rows`, in that order (beam search, batch selection)."""
        self._move(lambda array: array.index_select(0, rows.to(array.device)))

    def to(self, device: torch.device | str) -> None:
        self._move(lambda array: array.to(device, non_blocking=True))

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Apply `move` to everything there is."""
        self._arrays = {name: move(array) for name, array in self._arrays.items()}
        self.streams = {name: move(stream) for name, stream in self.streams.items()}
        self.holes = None if self.holes is None else move(self.holes)

    def _gather(self, name: str, index: Int[Tensor, "B H ..."]) -> Tensor:
        array = self._arrays[name]
        if array.ndim == 3:
            return array.gather(2, index)
        if index.shape[2:] == (1,):
            # one slot a head: here an index for every number is the fastest
            return array.gather(2, _each_number(index, array.shape[3:]))
        return _slots_of(array, index)

    def _write(self, index: Int[Tensor, "B H M"], arrays: dict[str, Tensor]) -> None:
        """Overwrite whole slots of keys and values, in place."""
        for name, new in arrays.items():
            # few slots, as in _gather
            self._arrays[name].scatter_(2, _each_number(index, new.shape[3:]), new)

    def _grow(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            with torch.inference_mode(False):
                grown = array.new_empty(*array.shape[:2], capacity, *array.shape[3:])
            grown[:, :, : self.length] = array[:, :, : self.length]
            self._arrays[name] = grown

    def _last_empty(self) -> Int[Tensor, "B H"]:
        """The last empty slot of each head, -1 where there is none."""
        order = torch.arange(self.length, device=self.positions.device)
        return torch.where(self.occupied, -1, order).amax(-1)


def _slots_of(array: Tensor, index: Int[Tensor, "B H ..."]) -> Tensor:
    """Slots `index` of an array of whole slots, copied row by row, far faster on a CPU than number by number."""
    if not index.numel():
        return array.new_empty(*index.shape, *array.shape[3:])
    size = array.shape[3:].numel()
    if not array[0, 0, 0].is_contiguous() or any(step % size for step in array.stride()[:3]):
        array = array.contiguous()
    # sequences, heads and slots may lie in any order, and with room between them
    row, head, slot = (step // size for step in array.stride()[:3])
    reach = sum((length - 1) * step for length, step in zip(array.shape[:3], (row, head, slot), strict=True))
    slots = array.as_strided((reach + 1, *array.shape[3:]), (size, *array.stride()[3:]))
    last = [1] * (index.ndim - 2)
    rows, heads = (torch.arange(count, device=index.device) for count in index.shape[:2])
    places = (rows * row).view(-1, 1, *last) + (heads * head).view(-1, *last) + index * slot
    return slots.index_select(0, places.flatten()).view(*index.shape, *array.shape[3:])


def _each_number(index: Int[Tensor, "B H M"], size: torch.Size) -> Int[Tensor, "B H M ..."]:
    return index.view(*index.shape, *[1] * len(size)).expand(*index.shape, *size)


def _with_room(array: Tensor, holes: int, room: int) -> Tensor:
    """`array` in storage of its own, with `holes` empty slots before it and unused ones behind."""
    if not holes and not room:
        return array
    count = array.shape[2]
    roomy = array.new_empty(*array.shape[:2], holes + count + room, *array.shape[3:])
    roomy[:, :, :holes] = 0 if array.is_floating_point() else EMPTY
    roomy[:, :, holes : holes + count] = array
    return roomy
