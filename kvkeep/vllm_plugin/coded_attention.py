"""Attention over windows of codes that lie in pages, without copying them.

R requests, H KV heads, G query heads per KV head, W windows of w tokens each, D head size.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..attention import CodedPart, Part, WindowAttention, coded_part, kernel, read_blocks
from ..windows import Codec
from .codes import PagedCodes


class PagedCodedAttention(WindowAttention):
    """Attention of one new query a request over its windows, of which some requests may have none."""

    def __init__(
        self,
        queries: Float[Tensor, "R HG 1 D"],
        query_positions: Int[Tensor, "R 1"],
        codes: PagedCodes,
        codec: Codec,
        scale: float,
    ):
        self.codes, self._codec, self._scale = codes, codec, scale
        super().__init__(queries, query_positions, codes.num_heads, codec.window)

    def _read(self) -> CodedPart:
        if kernel.serves(self._packed):
            last = int(self._query_positions.amax())
            cells = self.codes.for_kernel()
            return coded_part(kernel.run_cells(self._packed, cells, self._codec, self._scale, last))
        return self.in_torch()

    def in_torch(self) -> CodedPart:
        """The same without a compiler, one request after the other."""
        rows = [self._row(row) for row in range(len(self.codes.rows))]
        output, logsum, logits = (torch.cat(of_rows) for of_rows in zip(*rows, strict=True))
        return CodedPart(Part(output, logsum), logits)

    def _again(self) -> Iterator[Tensor]:
        raise AssertionError("there are few enough queries for their logits to be kept")

    def _row(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum and logits of one request."""
        queries, coded = self._packed[row : row + 1], self.codes.of(row)
        size = self.codes.length * self._codec.window
        if coded is None:
            nothing = queries.new_zeros(queries.shape, dtype=torch.float32)
            hidden = nothing.new_full((*nothing.shape[:3], size), kernel.HIDDEN)
            return nothing, hidden[..., :1], hidden
        codec = replace(self._codec, key_bits=self.codes.record(row).shape.key_bits)
        few = [read_blocks(some, coded, codec, self._scale) for some in queries.split(kernel.MOST_QUERIES, dim=2)]
        output, logsum = (torch.cat(arrays, dim=2) for arrays in zip(*(found.part for found in few), strict=True))
        logits = torch.cat([found.logits for found in few if found.logits is not None], dim=2)
        return output, logsum, pad(logits, (0, size - logits.shape[-1]), value=kernel.HIDDEN)
