"""Codes are really packed, give back what they were made of within half a step, and refuse what they cannot hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.quant import BITS, dequantize, guarded_bits, pack, packed_size, quantize, unpack
from kvkeep.rotation import RotaryTable, rotate, unrotate

finite = st.floats(-60000, 60000, width=16)
sizes = st.integers(1, 17)


def numbers(shape: tuple[int, ...], seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from(BITS), size=sizes, seed=st.integers(0, 999))
def test_what_was_packed_is_unpacked_and_takes_no_more_bytes_than_its_bits(bits, size, seed):
    codes = torch.randint(2**bits, (3, 2, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 2, math.ceil(size * bits / 8)) and packed.dtype == torch.uint8
    assert packed.shape[-1] == packed_size(size, bits)
    assert torch.equal(unpack(packed, bits, size), codes)


def test_a_byte_holds_four_codes_from_its_lowest_bits_up():
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack(torch.tensor([1, 2, 3, 0, 2, 2, 2, 2], dtype=torch.uint8), 2).tolist() == [0b10_10_11_01, 0b10_10_00_10]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(finite, min_size=5, max_size=5), min_size=2, max_size=9),
    bits=st.sampled_from(BITS),
    over=st.sampled_from((-1, -2)),
)
def test_a_round_trip_errs_by_half_a_step_and_the_rounding_of_the_scales(rows, bits, over):
    x = torch.tensor(rows)
    codes = quantize(x, bits, over=over)
    error = (dequantize(codes, bits, 5, over=over) - x).abs()
    low, high = x.amin(over).double(), x.amax(over).double()
    step, levels = (high - low) / (2**bits - 1), 2**bits - 1
    # fp16 has 11 bits, and below 2^-14 a spacing of 2^-24
    rounding = 2**-11 * (low.abs() + step * levels) + 2**-25 * (levels + 1)
    bound = step * (0.5 + 2**-11) + rounding
    assert (error.double() <= bound.unsqueeze(over) * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_stored_scale_is_the_one_that_was_used(bits):
    x = numbers((4, 8, 16), 0, 3.0)
    codes = quantize(x, bits, over=-2)
    assert codes.scale.dtype == codes.zero.dtype == torch.float16
    again = quantize(dequantize(codes, bits, 16, over=-2), bits, over=-2)
    # the extremes of a channel are codes 0 and the last, so the same scale comes out, and the same codes
    assert torch.equal(unpack(again.packed, bits, 16), unpack(codes.packed, bits, 16))


@settings(max_examples=50, deadline=None)
@given(value=st.floats(-60000, 60000, width=16), bits=st.sampled_from(BITS))
def test_equal_numbers_come_back_as_they_were(value, bits):
    x = torch.full((8, 3), value)
    codes = quantize(x, bits, over=-2)
    assert torch.equal(dequantize(codes, bits, 3, over=-2), x)
    assert (codes.scale == 1).all()


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf, 70000.0))
def test_what_fp16_cannot_hold_is_refused(bad):
    x = numbers((2, 8, 4), 0)
    x[1, 3, 2] = bad
    with pytest.raises(ValueError, match="only finite numbers"):
        quantize(x, 2, over=-1)


def test_more_bits_err_less():
    x = numbers((6, 8, 32), 1)
    errors = [(dequantize(quantize(x, bits, over=-2), bits, 32, over=-2) - x).square().mean() for bits in BITS]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_a_large_constant_channel_costs_the_other_channels_nothing():
    plain = numbers((1, 8, 16), 2)
    biased = plain.clone()
    biased[..., 3] += 512
    error = (dequantize(quantize(biased, 2, over=-2), 2, 16, over=-2) - biased).abs()
    expected = (dequantize(quantize(plain, 2, over=-2), 2, 16, over=-2) - plain).abs()
    others = [channel for channel in range(16) if channel != 3]
    assert torch.equal(error[..., others], expected[..., others])
    # one scale over all channels would lose them altogether
    together = (dequantize(quantize(biased, 2, over=-1), 2, 16, over=-1) - biased).abs()
    assert together[..., others].mean() > 2 * expected[..., others].mean()


def test_the_guard_raises_bits_until_no_head_errs_too_much():
    """As in the first layers of Qwen2: channels whose products with queries are so large that two bits lose them."""
    keys, queries = numbers((2, 8, 16), 3), numbers((2, 5, 16), 4)
    keys[1, :, 5] = 300 + 6 * keys[1, :, 5]
    queries[1, :, 5] += 8

    def error(bits):
        lost = dequantize(quantize(keys, bits, over=-2), bits, 16, over=-2) - keys
        return (queries @ lost.mT / 4).square().mean((1, 2)).sqrt()

    assert error(2)[0] < 1 < error(2)[1]
    assert guarded_bits(2, math.inf, error) == 2
    assert guarded_bits(2, 1.0, error) == 4
    assert guarded_bits(4, 1.0, error) == 4
    assert guarded_bits(2, 0.0, error) == 8


def rotary(positions):
    angle = positions[..., None] * torch.tensor([1.0, 0.1, 0.01])
    return torch.cat([angle, angle], -1).cos() * 1.2, torch.cat([angle, angle], -1).sin() * 1.2


def test_turning_back_undoes_turning_even_where_the_tables_scale():
    x, positions = numbers((2, 7, 8), 5), torch.arange(90, 97)
    cos, sin = rotary(positions)
    assert (unrotate(rotate(x, cos, sin), cos, sin) - x).abs().max() < 1e-5


def test_the_table_says_what_the_rotation_says_and_grows():
    table = RotaryTable(rotary)
    for positions in (torch.tensor([[3, 0], [7, 5]]), torch.tensor([2000, 1])):
        for looked_up, computed in zip(table.at(positions), rotary(positions), strict=True):
            assert torch.equal(looked_up, computed)
