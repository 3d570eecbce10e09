"""Windows of codes of many requests, at the end of their pages' cells.

P pages, R requests, H KV heads, W windows of the request that has most, D head size.
"""

from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ..attention.kernel import Cells
from ..slots import Slots
from ..windows import key_bits
from .records import Record


class PagedCodes:
    """The windows of R requests, as records that end where their cells end.

    Args:
        cells: bytes of each KV head's cell of each page, `[P, H, C]`; the first numbers of a cell say how many windows
            there are and how many bits their keys take.
        record: of a window whose keys take as many bits as were asked for.
        rows: the page of each request, `[R]`.
    """

    # numbers that a cell begins with
    HEADER: ClassVar[int] = 2

    def __init__(self, cells: UInt8[Tensor, "P H C"], record: Record, rows: Int[Tensor, " R"]):
        self._cells, self._record, self.rows = cells, record, rows
        self._words: Int[Tensor, "P H C4"] = cells.view(torch.int32)
        self.windows, self.bits = self._words[rows, 0, : self.HEADER].long().unbind(1)

    @cached_property
    def length(self) -> int:
        """W."""
        return int(self.windows.amax())

    @property
    def num_heads(self) -> int:
        return self._cells.shape[1]

    @property
    def num_bytes(self) -> Int[Tensor, " R"]:
        """Bytes of the codes in a cell of each request."""
        return self.windows * self._record_bytes

    def of(self, row: int) -> Slots | None:
        """A copy of one request's windows; None where there are none."""
        if not self.windows[row]:
            return None
        return self.record(row).slots(self._records(row))

    def record(self, row: int) -> Record:
        """How the windows of one request are laid out."""
        return self._record.by_bits[int(self.bits[row])]

    def replaced(self, coded: Slots | None) -> "PagedCodes":
        """Write other windows in place of the only request's, or none."""
        windows, bits = (0, 0) if coded is None else (coded.length, key_bits(coded, self._record.shape.key_size))
        self._words[self.rows, :, : self.HEADER] = torch.tensor([windows, bits], dtype=torch.int32)
        new = PagedCodes(self._cells, self._record, self.rows)
        if coded is not None:
            new.record(0).write(new._records(0), coded)
        return new

    @property
    def worth(self) -> Float[Tensor, "R H W"]:
        """What each window is worth; 0 behind the last of a request."""
        heads = torch.arange(self._words.shape[1])[:, None]
        found = self._words[self.rows[:, None, None], heads, self._worth_at[:, None]].view(torch.float32)
        return found.masked_fill(~self._exist[:, None], 0)

    @worth.setter
    def worth(self, worth: Float[Tensor, "R H W"]) -> None:
        row, window = self._exist.nonzero(as_tuple=True)
        self._words[self.rows[row], :, self._worth_at[row, window]] = worth[row, :, window].view(torch.int32)

    def for_kernel(self) -> Cells:
        """Where the compiled attention finds the windows."""
        page_bytes, cell_bytes = self._cells.stride()[:2]
        sizes = (self.windows, self.bits, self._record_bytes)
        return Cells(self._cells, page_bytes, cell_bytes, self.rows, *sizes, self._record.offsets)

    def _records(self, row: int) -> UInt8[Tensor, "1 H W B"]:
        """The records of one request, as a view."""
        size = self.record(row).num_bytes
        number = int(self.windows[row])
        records = self._cells[self.rows[row], :, self._cells.shape[-1] - number * size :]
        return records.unflatten(-1, (number, size))[None]

    @cached_property
    def _record_bytes(self) -> Int[Tensor, " R"]:
        return self._record.bytes_by_bits[self.bits]

    @cached_property
    def _exist(self) -> Bool[Tensor, "R W"]:
        return torch.arange(self.length) < self.windows[:, None]

    @cached_property
    def _worth_at(self) -> Int[Tensor, "R W"]:
        """Where in a cell the worth of each window lies, in words; 0 where there is none."""
        behind = self.windows[:, None] - torch.arange(self.length)
        first = self._cells.shape[-1] - behind * self._record_bytes[:, None] + self._record.fields["worth"].start
        return torch.div(first, 4, rounding_mode="floor").where(self._exist, 0)
