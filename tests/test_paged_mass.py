"""What slots in pages receive from new queries is what they receive elsewhere, with a compiler and without."""

import pytest
import torch

from kvkeep.attention import AttentionMass
from kvkeep.attention.compiled import library
from kvkeep.vllm_plugin import mass
from kvkeep.vllm_plugin.mass import PagedMass, compiled_products
from kvkeep.vllm_plugin.pages import PagedSlots, Pages, PageShape

SCALE = 0.3


def slots_of(heads: int, size: int, length: int, dtype: torch.dtype) -> PagedSlots:
    """Three requests of a layer, the second with empty slots."""
    shape = PageShape(heads, 64, size, dtype, (), ())
    pages = Pages(torch.zeros(6, heads, shape.capacity, shape.slot_bytes, dtype=torch.int8), shape)
    generator = torch.Generator().manual_seed(0)
    pages.turned_keys.copy_(torch.randn(pages.turned_keys.shape, generator=generator))
    pages.numbers[:, :, 0] = torch.arange(64)
    pages.numbers[5, :, 0, 7:] = -1
    return PagedSlots(pages, torch.tensor([2, 5, 0]), length)


@pytest.fixture(params=["compiled", "torch"])
def by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(mass, "_function", lambda: None)
    elif mass._function() is None:
        pytest.skip("no compiler here")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "group", "size", "length"), [(2, 3, 32, 40), (1, 1, 16, 64), (3, 9, 8, 1), (2, 4, 64, 33)]
)
def test_masses_over_pages_are_those_over_slots(by, dtype, heads, group, size, length):
    slots = slots_of(heads, size, length, dtype)
    queries = torch.randn(3, heads * group, 1, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    at = torch.full((3, 1), 80)
    paged = PagedMass(queries, slots, at, SCALE)
    plain = AttentionMass(queries, slots.keys, slots.positions, at, SCALE, has_empty=True)
    for options in ({}, {"last": 1}, {"last": 9}, {"power": 2.0}):
        torch.testing.assert_close(paged.received(**options), plain.received(**options), rtol=1e-4, atol=1e-6)
    assert not paged.received()[~slots.occupied].any()


def test_products_are_exact_to_the_last_bits_of_fp32():
    if mass._function() is None:
        pytest.skip("no compiler here")
    slots = slots_of(2, 64, 50, torch.bfloat16)
    queries = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(1))
    exact = queries.double() @ slots.keys.double().mT
    torch.testing.assert_close(compiled_products(queries, slots).double(), exact, rtol=1e-5, atol=1e-5)


def test_there_is_no_library_without_a_compiler(monkeypatch, tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("int f( {")
    assert library(source) is None
    monkeypatch.setenv("KVKEEP_KERNEL", "0")
    other = tmp_path / "fine.c"
    other.write_text("int f(void) { return 1; }")
    assert library(other) is None
