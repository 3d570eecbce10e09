"""Which windows are held in full precision, which as codes, and which go.

B sequences, H KV heads, C windows to choose from.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .selection import by_worth
from .slots import EMPTY


class Room(NamedTuple):
    """How many windows a head of each sequence may hold in full precision, and how many as codes."""

    full: Int[Tensor, " B"]
    coded: Int[Tensor, " B"]


class Route(NamedTuple):
    """Marks the windows to hold in full precision, and those to hold codes of (a window may be both)."""

    full: Bool[Tensor, "B H C"]
    coded: Bool[Tensor, "B H C"]


def free_bytes(slots: Int[Tensor, " B"], *, protected: int, window: int, slot_bytes: int) -> Int[Tensor, " B"]:
    """Bytes for windows where a layer may keep so many slots, `protected` of them sinks and recent tokens."""
    # the slot more is the one that takes the next token where nothing is coded
    return (slots + 1 - protected - window) * slot_bytes


def share_out(
    num_windows: Int[Tensor, " B"], free: Int[Tensor, " B"], *, full_bytes: int, coded_bytes: int, quantized: float
) -> Room:
    """Divide bytes between the tiers.

    While all windows fit in full precision they stay so. Once they do not, full precision gets what is left when
    codes of every window are paid for, but at least `1 - quantized` of the bytes; what remains is for codes.

    Args:
        num_windows: windows that the sequence has read so far.
        free: bytes for windows, in one layer.
        full_bytes, coded_bytes: of one window, all KV heads.
        quantized: share of the bytes that codes get when not all windows can stay (q).
    """
    # floats as exact as integers are here, and 1 - 0.7 of 10 is 3
    least = torch.floor(free.double() * (1 - quantized) / full_bytes + 1e-9).to(free.dtype)
    filling = torch.div(free - num_windows * coded_bytes, full_bytes, rounding_mode="floor")
    full = torch.where(num_windows * full_bytes <= free, num_windows, torch.maximum(least, filling))
    full = torch.minimum(full, num_windows).clamp(min=0)
    return Room(full, torch.div(free - full * full_bytes, coded_bytes, rounding_mode="floor"))


def side_by_side(
    room: Room, num_windows: Int[Tensor, " B"], free: Int[Tensor, " B"], *, full_bytes: int, coded_bytes: int
) -> Room:
    """`room`, where sequences lie in one array of each tier, as wide as the widest of them.

    A short sequence that could stay in full precision as a whole may then have to hold codes beside a long one.
    """
    some_coded = room.full < num_windows
    widest = torch.where(some_coded, torch.minimum(room.coded, num_windows), 0).amax()
    most = torch.div(free.amax() - widest * coded_bytes, full_bytes, rounding_mode="floor").clamp(min=0)
    wide = room.full > most
    return Room(room.full.clamp(max=most), torch.where(wide, widest, room.coded))


def route(
    worth: Float[Tensor, "B H C"],
    starts: Int[Tensor, "B H C"],
    has_codes: Bool[Tensor, "B H C"],
    room: Room,
    stays: Bool[Tensor, "B H C"] | None = None,
) -> Route:
    """The windows of greatest worth in full precision, the next as codes; equal worths keep the newest.

    Codes that exist already are kept with the window, also where it is held in full precision: they are what it
    returns to.

    Args:
        starts: position at which each window begins, -1 where there is none.
        stays: windows that stay codes whatever they are worth.
    """
    exists = starts != EMPTY
    order = by_worth(worth, starts, torch.zeros_like(exists))
    full = _first(exists if stays is None else exists & ~stays, order, room.full)
    return Route(full, _first(exists & (has_codes | ~full), order, room.coded))


def _first(
    wanted: Bool[Tensor, "B H C"], order: Int[Tensor, "B H C"], room: Int[Tensor, " B"]
) -> Bool[Tensor, "B H C"]:
    """Marks as many of the wanted windows as there is room for, in that order."""
    ranked = wanted.gather(-1, order)
    within = ranked & (ranked.cumsum(-1) <= room[:, None, None])
    return torch.zeros_like(within).scatter_(-1, order, within)
