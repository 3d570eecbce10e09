"""Budget: how many slots each layer may keep, given as tokens, as a share of what was seen, or as bytes."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

SCHEDULES = ("uniform", "pyramid")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FORMS = "tokens (512), a share of what was seen (0.25 or '25%'), bytes ('64MiB') or 'full'"

# PyramidKV's beta: the top layer keeps 1/20 of the mean, the bottom layer the rest of twice the mean
_PYRAMID_STEEPNESS = 20


@dataclass(frozen=True, kw_only=True)
class Budget:
    """At most one of `tokens`, `share` and `bytes`; none of them keeps everything.

    Attributes:
        tokens: slots per KV head and layer (the mean over layers under a pyramid).
        share: share in (0, 1] of the tokens seen so far, rounded up.
        bytes: bytes of the whole cache: all layers and sequences, positions and side arrays included.
        sinks: first tokens that are always kept, inside the budget.
        recent: last tokens that are always kept, inside the budget.
        schedule: "uniform", or "pyramid" (PyramidKV, arXiv 2406.02069: lower layers keep more).

    Raises:
        ValueError: for a budget that cannot hold its sinks and recent tokens, with the smallest that can.
    """

    tokens: int | None = None
    share: float | None = None
    bytes: int | None = None
    sinks: int = 4
    recent: int = 16
    schedule: str = "uniform"

    def __post_init__(self) -> None:
        if sum(limit is not None for limit in (self.tokens, self.share, self.bytes)) > 1:
            raise ValueError(f"a budget is one of tokens, share or bytes, got several: {self!r}")
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent cannot be negative, got sinks={self.sinks}, recent={self.recent}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if self.tokens is not None and self.tokens < self.floor:
            raise ValueError(
                f"a budget of {self.tokens} tokens cannot hold {self.sinks} sinks and {self.recent} recent tokens; "
                f"the smallest possible is {self.floor}, or lower sinks= and recent="
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"a share must lie in (0, 1], got {self.share}; tokens are given as a whole number")
        if self.bytes is not None and self.bytes <= 0:
            raise ValueError(f"a budget of {self.bytes} bytes holds nothing; give a positive size such as '64MiB'")

    @classmethod
    def parse(cls, value: "Budget | int | float | str | None", **options: Any) -> "Budget":
        """A Budget from what a user writes.

        >>> Budget.parse("25%").share, Budget.parse(512).tokens, Budget.parse("1.5KiB").bytes
        (0.25, 512, 1536)

        Args:
            value: tokens (512), a share (0.25, "25%"), bytes ("64MiB"), or None / "full" to keep everything.
            options: sinks, recent, schedule.
        """
        if isinstance(value, Budget):
            return replace(value, **options)
        if value is None or value == "full":
            return cls(**options)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"a budget is {_FORMS}, got {value!r}")
        if isinstance(value, int):
            return cls(tokens=value, **options)
        if isinstance(value, float):
            return cls(share=value, **options)
        return cls(**_parse_text(value), **options)

    def reserving(self, num_tokens: int) -> "Budget":
        """The same budget, where so many further recent tokens must have room."""
        return replace(self, recent=self.recent + num_tokens) if num_tokens and not self.unlimited else self

    @property
    def floor(self) -> int:
        """The fewest slots a layer can have: sinks and recent tokens, and at least one."""
        return max(1, self.sinks + self.recent)

    @property
    def unlimited(self) -> bool:
        return (self.tokens is None and self.share is None and self.bytes is None) or self.share == 1

    def __str__(self) -> str:
        if self.unlimited:
            return "full"
        if self.share is not None:
            return f"{self.share * 100:g}%"
        return str(self.tokens) if self.tokens is not None else f"{self.bytes}B"

    def slots(self, lengths: Int[Tensor, " B"], num_layers: int) -> Int[Tensor, "L B"]:
        """Slots each layer may keep for sequences that have seen `lengths` tokens (not for a budget in bytes)."""
        assert self.bytes is None and not self.unlimited
        if self.tokens is not None:
            return self._spread(torch.full_like(lengths, self.tokens), lengths, num_layers)
        # float64: 0.1 * 30 must round up to 3, not to 4, whatever the model's dtype
        mean = torch.ceil(lengths.double() * self.share - 1e-9).to(lengths.dtype)  # type: ignore[operator]
        return self._spread(mean.clamp(min=self.floor), lengths, num_layers)

    def slots_for_bytes(
        self, lengths: Int[Tensor, " B"], num_layers: int, *, slot_bytes: int, fixed_bytes: int
    ) -> Int[Tensor, "L B"]:
        """Slots each layer may keep so that the whole cache stays within `bytes`.

        Args:
            lengths: tokens seen by each of the sequences that share the bytes.
            slot_bytes: bytes of one slot in one layer of one sequence, all KV heads and side arrays included.
            fixed_bytes: bytes of one layer of one sequence that do not grow with slots.

        Raises:
            ValueError: if not even sinks and recent tokens fit, with the smallest possible size.
        """
        assert self.bytes is not None
        batch_size = lengths.shape[0]
        step, fixed = batch_size * num_layers * slot_bytes, batch_size * num_layers * fixed_bytes
        # one slot beyond the kept ones takes the next token in place, and it is memory too
        mean = (self.bytes - fixed) // step - 1
        if mean < self.floor:
            raise ValueError(
                f"{self.bytes} bytes cannot hold {self.sinks} sinks and {self.recent} recent tokens of {batch_size} "
                f"sequence(s) in {num_layers} layers; the smallest possible is {(self.floor + 1) * step + fixed} bytes"
            )
        return self._spread(torch.full_like(lengths, mean), lengths, num_layers)

    def _spread(self, mean: Int[Tensor, " B"], lengths: Int[Tensor, " B"], num_layers: int) -> Int[Tensor, "L B"]:
        if self.schedule == "uniform" or num_layers == 1:
            return mean.expand(num_layers, -1)
        lowest = (mean // _PYRAMID_STEEPNESS).clamp(min=self.floor)
        highest = 2 * mean - lowest
        fall = torch.arange(num_layers)[:, None] / (num_layers - 1)
        # rounding down keeps the sum within num_layers * mean
        pyramid = torch.floor(highest - (highest - lowest) * fall).to(mean.dtype).clamp(min=self.floor)
        # while everything fits nothing goes, in any layer
        return torch.where(lengths <= mean, mean, pyramid)


def _parse_text(text: str) -> dict[str, Any]:
    compact = text.strip().replace(" ", "").replace("_", "")
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(%|[A-Za-z]+)?", compact)
    if number is None:
        raise ValueError(f"cannot read the budget {text!r}; give {_FORMS}")
    amount, unit = float(number[1]), (number[2] or "").upper()
    if unit == "%":
        return {"share": amount / 100}
    if unit in _UNITS:
        return {"bytes": int(amount * _UNITS[unit])}
    if unit:
        raise ValueError(f"unknown unit {number[2]!r} in the budget {text!r}; use %, or one of KB MB GB KiB MiB GiB")
    return {"share": amount} if "." in compact else {"tokens": int(compact)}
