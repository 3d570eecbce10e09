"""Processes that share one piece of work, by Hugging Face accelerate, which is imported only where there are several.

Start them with `accelerate launch --num_processes 2 -m kvkeep ...` or `torchrun --nproc-per-node 2 -m kvkeep ...`.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Team:
    """One process that has no others.

    Attributes:
        rank: number of this process, from 0.
        size: how many processes there are.
        device: where this process computes.
    """

    rank = 0
    size = 1

    def __init__(self, device: torch.device | str | None = None):
        self.device = torch.device(device or "cpu")

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of the items."""
        return items[self.rank :: self.size]

    def sum_(self, tensors: list[Tensor]) -> None:
        """Add up tensors over all processes, in place."""


class Several(Team):
    """This process among others that accelerate or torchrun has started."""

    def __init__(self, device: torch.device | str | None = None):
        from accelerate import Accelerator

        self._accelerator: Any = Accelerator(cpu=device is None or torch.device(device).type == "cpu")
        self.rank, self.size = self._accelerator.process_index, self._accelerator.num_processes
        self.device = self._accelerator.device

    def sum_(self, tensors: list[Tensor]) -> None:
        # one message: many small ones would cost more than their content
        total = self._accelerator.reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), reduction="sum")
        for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def assemble(device: torch.device | str | None = None) -> Team:
    """The processes started together with this one, or this one alone. Without a device the CPU computes."""
    return Several(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Team(device)
