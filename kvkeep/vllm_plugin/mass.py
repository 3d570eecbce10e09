"""Attention that slots in pages receive from one new query each, without copying their keys.

R requests, H KV heads, G query heads per KV head, N slots, D head size.
"""

import ctypes
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import AttentionMass
from ..attention.compiled import TYPES, function
from .pages import PagedSlots

_SIZES = "rows heads queries size slots together type page_bytes cell_bytes block_bytes"
_ARRAYS = "keys pages queries logits"


class PagedMass(AttentionMass):
    """An AttentionMass of one query a request, over keys that stay where they are."""

    def __init__(
        self,
        queries: Float[Tensor, "R HG 1 D"],
        slots: PagedSlots,
        positions: Tensor,
        scale: float,
        beyond: Float[Tensor, "R HG 1"] | None = None,
    ):
        # in place of keys: they are read for the logits alone, by which everything is known
        nothing = queries.new_empty(1).expand(*slots.positions.shape, queries.shape[-1])
        super().__init__(queries, nothing, slots.positions, positions, scale, has_empty=False, beyond=beyond)
        self._slots = slots

    @cached_property
    def logits(self) -> Float[Tensor, "R H G N"]:
        """Scaled products of each query with its slots, in fp32; minus infinity where a slot is empty."""
        slots = self._slots
        grouped = self._queries.unflatten(1, (slots.positions.shape[1], -1))[:, :, :, 0]
        queries = grouped.float() * self._scale
        products = compiled_products(queries, slots) if _function() else queries @ slots.keys.float().mT
        return products.masked_fill_(~slots.occupied[:, :, None], -torch.inf)


def compiled_products(queries: Float[Tensor, "R H G D"], slots: PagedSlots) -> Float[Tensor, "R H G N"]:
    """Products of queries with the keys of their requests, read in their pages."""
    products, keys = _function(), slots.pages.turned_keys
    assert products is not None
    R, H, G, D = queries.shape
    logits = queries.new_empty(R, H, G, slots.length)
    steps = (stride * keys.element_size() for stride in keys.stride()[:3])
    sizes = (R, H, G, D, slots.length, keys.shape[-1], TYPES[keys.dtype], *steps)
    arrays = (keys, slots.rows.contiguous(), queries.contiguous(), logits)
    products(_Sizes(*sizes), _Arrays(*(array.data_ptr() for array in arrays)))
    return logits


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _SIZES.split()]


class _Arrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _ARRAYS.split()]


@cache
def _function() -> Callable[..., None] | None:
    return function(Path(__file__).with_name("mass.c"), "products", _Sizes, _Arrays)
