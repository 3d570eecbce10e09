"""Pages hold codes beside slots: the same windows, the same attention, never more than a cell has room for."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxtyping import Int
from torch import Tensor
from transformers import LlamaConfig

from kvkeep.attention import CodedAttention
from kvkeep.budget import Budget
from kvkeep.fingerprint import fingerprint
from kvkeep.frequencies import rotation_frequencies
from kvkeep.layer import Plan
from kvkeep.policies import make_policy
from kvkeep.policies.tiered import Tiered, TieredPolicy
from kvkeep.rotation import rotary_of
from kvkeep.slots import Slots
from kvkeep.tiered_layer import TieredLayer
from kvkeep.vllm_plugin.coded_attention import PagedCodedAttention
from kvkeep.vllm_plugin.pages import PagedSlots, Pages, PageShape
from kvkeep.windows import Codec, TieredSlots

H, G, D, SCALE = 2, 2, 16, 0.25
CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=H * G, num_key_value_heads=H, head_dim=D, hidden_size=H * G * D
)
ROTARY = rotary_of(rotation_frequencies(fingerprint(CONFIG)))


class Arena:
    """Requests in TieredLayers, and pages to store them in."""

    def __init__(self, policy: TieredPolicy, tokens: int, dtype: torch.dtype = torch.float32, count: int = 4):
        budget = Budget(tokens=tokens, sinks=2, recent=4)
        self.plan = Plan(CONFIG, policy, budget, 2, ROTARY)
        self.shape = PageShape.of(policy, budget, heads=H, head_size=D, dtype=dtype)
        self.generator = torch.Generator().manual_seed(tokens)
        memory = torch.empty(count, H, self.shape.capacity, self.shape.slot_bytes, dtype=torch.int8)
        # what was there before is anything
        self.pages = Pages(memory.random_(generator=self.generator), self.shape)
        self.dtype = dtype

    def draw(self, heads: int, count: int) -> Tensor:
        return torch.randn(1, heads, count, D, generator=self.generator).to(self.dtype)

    def read(self, layer: TieredLayer, count: int) -> TieredSlots:
        """The layer's slots after so many more tokens."""
        layer.attend(self.draw(H * G, count), self.draw(H, count), self.draw(H, count), None, SCALE)
        assert isinstance(layer.slots, TieredSlots)
        return layer.slots

    def request(self, page: int, length: int) -> TieredSlots:
        """One request of so many tokens, stored in a page."""
        slots = self.read(TieredLayer(self.plan, 1, 0), length)
        self.pages.store_prompt(page, slots)
        return slots

    @property
    def codec(self) -> Codec:
        assert self.shape.record is not None and self.plan.table is not None
        return Codec(**asdict(self.shape.record.shape), table=self.plan.table)


def assert_same(ours: Slots, theirs: Slots) -> None:
    """The same tokens, wherever empty slots lie."""
    order = theirs.positions.argsort(dim=-1, stable=True)[..., theirs.length - ours.length :]
    expected = theirs.taken(order, torch.zeros_like(order, dtype=torch.bool))
    assert torch.equal(ours.positions, expected.positions)
    for one, other in zip((ours.keys, ours.values), (expected.keys, expected.values), strict=True):
        assert torch.equal(one[ours.occupied], other[ours.occupied])
    for name in ours.side_names:
        assert torch.equal(ours.side(name)[ours.occupied], expected.side(name)[ours.occupied])


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(24, 100),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    omega=st.sampled_from([1, 3, 4, 8]),
    bits=st.sampled_from([2, 4, 8]),
    q=st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9, 1.0]),
    guard=st.sampled_from([1e-6, 2.0]),
    promote=st.booleans(),
    neighbours=st.booleans(),
    halves=st.booleans(),
)
@example(tokens=24, lengths=[1], omega=1, bits=2, q=0.1, guard=1e-6, promote=False, neighbours=False, halves=True)
@example(tokens=64, lengths=[60] * 3, omega=8, bits=2, q=0.7, guard=1e-6, promote=True, neighbours=True, halves=True)
def test_whatever_tiers_hold_finds_room_in_its_page_and_comes_back(
    tokens, lengths, omega, bits, q, guard, promote, neighbours, halves
):
    tokens = max(tokens, 6 + 2 * omega)
    policy = Tiered(omega=omega, bits=bits, q=q, guard=guard, promote=promote, neighbours=neighbours)
    arena = Arena(policy, tokens, torch.bfloat16 if halves else torch.float32)
    layer = TieredLayer(arena.plan, 1, 0)
    # long enough for all that the tiers ever hold
    for length in [*lengths, 2 * tokens, *[1] * (omega + 1)]:
        slots = arena.read(layer, length)
        arena.pages.store_prompt(1, slots)
        back = arena.pages.prompt(1)
        assert isinstance(back, TieredSlots)
        assert_same(back, slots)
        assert (back.readable is None) == (slots.readable is None)
        if back.coded is not None and slots.coded is not None:
            assert_same(back.coded, slots.coded)


def test_tokens_that_come_do_not_touch_codes():
    arena = Arena(make_policy("tiered(h2o)"), 64)
    held = [arena.request(page, length) for page, length in ((2, 150), (0, 40))]
    slots = PagedSlots(arena.pages, torch.tensor([2, 0]))
    assert slots.codes is not None
    assert slots.codes.windows.tolist() == [held[0].coded.length if held[0].coded else 0, 0]
    new = torch.full((2, H, 1, D), 7.0)
    slots.fill(new, -new, torch.tensor([150, 40])[:, None, None].expand(2, H, 1).int())
    slots.codes.worth = slots.codes.worth + 1
    slots.store()
    back = arena.pages.prompt(2)
    assert isinstance(back, TieredSlots) and back.coded is not None and held[0].coded is not None
    held[0].coded.side("worth").add_(1)
    assert_same(back.coded, held[0].coded)
    assert torch.equal(back.keys[:, :, -1:], new[:1]) and (back.positions[..., -1] == 150).all()


def test_codes_are_never_taken_for_keys():
    arena = Arena(make_policy("tiered(h2o)"), 128)
    for page, length in ((0, 600), (1, 120)):
        arena.request(page, length)
    codes = arena.pages.codes(torch.tensor([0]))
    assert codes is not None
    # all bits set is no number
    arena.pages.cells[0, :, -int(codes.num_bytes) :] = 255
    slots = PagedSlots(arena.pages, torch.tensor([0, 1]))
    for array in (slots.keys, slots.values):
        assert array.isfinite().all() and not array[~slots.occupied].any()


@pytest.mark.parametrize("group", [G, 40])
@pytest.mark.parametrize("policy", ["tiered(h2o)", "qevict(bits=4)", "tiered(h2o, guard=.000001)"])
def test_attention_over_pages_is_that_of_each_request(policy, group):
    arena = Arena(make_policy(policy), 64)
    held = [arena.request(page, length) for page, length in ((3, 200), (1, 20), (0, 90))]
    rows, codec = torch.tensor([3, 1, 0]), arena.codec
    codes = arena.pages.codes(rows)
    assert codes is not None
    queries, at = torch.randn(3, H * group, 1, D), torch.tensor([[200], [20], [90]])
    paged = PagedCodedAttention(queries, at, codes, codec, SCALE)
    found = [paged.in_torch(), paged._read()]
    for row, slots in enumerate(held):
        for part, logits in found:
            if slots.coded is None:
                assert (part.logsum[row] < -1e38).all()
                continue
            one = slice(row, row + 1)
            alone = CodedAttention(queries[one], at[one], slots.coded, of_bits(codec, codes.bits[row]), SCALE)
            torch.testing.assert_close(part.output[row], alone._part.output[0])
            torch.testing.assert_close(part.logsum[row], alone._part.logsum[0])
            size = slots.coded.length * codec.window
            assert logits is not None and (logits[row, :, :, size:] < -1e38).all()
            torch.testing.assert_close(paged.received()[row, :, : slots.coded.length], alone.received()[0])


def of_bits(codec: Codec, bits: Int[Tensor, ""]) -> Codec:
    return Codec(**{**vars(codec), "key_bits": int(bits)})


@pytest.mark.parametrize("policy", ["tiered(h2o)", "qevict"])
def test_metrics_know_how_much_tiers_hold(policy):
    arena = Arena(make_policy(policy), 96)
    record, tiers = arena.shape.record, arena.plan.policy.tiers
    assert record is not None and tiers is not None
    room = arena.shape.tier_room(tiers, arena.plan.budget, record)
    layer = TieredLayer(arena.plan, 1, 0)
    for length in (5, 80, 1, 40, 200, 3):
        slots = arena.read(layer, length)
        full = int(slots.occupied.sum(-1).amax())
        assert room.held(layer.seen) == (full, round(layer.num_coded))
