"""How much of a cell slots and codes take under a policy with tiers, however many tokens were read.

W numbers of windows that were read.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from ..budget import Budget
from ..policies import Tiers
from ..routing import Room, free_bytes, share_out
from .records import Record


class Held(NamedTuple):
    """Tokens that each KV head holds in full precision, and as codes alone."""

    full: int
    quantized: int


@dataclass(frozen=True)
class TierRoom:
    """What a budget in tokens leaves to each tier.

    Attributes:
        tiers: of the policy.
        budget: in tokens.
        slot_bytes: of one head, as the tiers count them.
        record: of a window of codes.
    """

    tiers: Tiers
    budget: Budget
    slot_bytes: int
    record: Record

    def cell_bytes(self, block_bytes: int, together: int) -> int:
        """The most bytes that blocks of slots and codes ever take beside each other."""
        # from so many windows on nothing changes any more
        least = min(self.record.shape.slot_bytes, self.tiers.window * self.slot_bytes)
        windows = torch.arange(self._free // least + 2)
        room = self._shared_out(windows)
        # those that wait for the others of their window, and the next token
        slots = self._protected + (room.full + 1) * self.tiers.window
        blocks = torch.div(slots + together - 1, together, rounding_mode="floor")
        return int((blocks * block_bytes + self._coded(room, windows) * self.record.num_bytes).amax())

    def held(self, seen: int) -> Held:
        """What is held of so many tokens, where no layer's keys need more bits than were asked for."""
        ranked = max(0, seen - self._protected)
        windows = torch.tensor([ranked // self.tiers.window])
        room = self._shared_out(windows)
        coded = torch.minimum(self._coded(room, windows), windows - room.full)
        waiting = ranked % self.tiers.window
        full = min(seen, self._protected) + waiting + int(room.full) * self.tiers.window
        return Held(full, int(coded) * self.tiers.window)

    @property
    def _protected(self) -> int:
        return self.budget.sinks + self.budget.recent

    @property
    def _free(self) -> int:
        tokens = torch.tensor([self.budget.tokens])
        sizes = {"window": self.tiers.window, "slot_bytes": self.slot_bytes}
        return int(free_bytes(tokens, protected=self._protected, **sizes))

    def _shared_out(self, windows: Int[Tensor, " W"]) -> Room:
        sizes = {
            "full_bytes": self.tiers.window * self.slot_bytes,
            "coded_bytes": self.record.shape.slot_bytes,
        }
        return share_out(windows, torch.full_like(windows, self._free), quantized=self.tiers.quantized, **sizes)

    def _coded(self, room: Room, windows: Int[Tensor, " W"]) -> Int[Tensor, " W"]:
        """Windows with codes: none while all fit in full precision."""
        return torch.minimum(room.coded, windows).masked_fill(room.full == windows, 0)
