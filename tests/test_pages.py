"""Pages of served requests hold what Slots hold, each request apart from all others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.budget import Budget
from kvkeep.policies import KVpop, make_policy
from kvkeep.slots import Slots
from kvkeep.vllm_plugin.pages import PagedSlots, Pages, PageShape

H, D, N = 2, 8, 6
SHAPE = PageShape(H, 32, D, torch.float32, ("worth", "age"), (("memory", (H, 3)), ("level", (5,))))


def pages(shape: PageShape = SHAPE, count: int = 5) -> Pages:
    return Pages(torch.zeros(count, H, shape.capacity, shape.slot_bytes, dtype=torch.int8), shape)


def content(positions: torch.Tensor) -> torch.Tensor:
    """Keys that tell a position."""
    return positions[..., None] * 10.0 + torch.arange(D)


def prompt(positions: torch.Tensor) -> Slots:
    """One request's slots `[H, n]`, everything in them a function of the position."""
    positions = positions[None].int()
    worth = positions.float()
    streams = {"memory": torch.arange(6.0).view(1, H, 3), "level": torch.arange(5.0)[None]}
    side = {"worth": worth.clone(), "age": -worth}
    return Slots(content(positions), -content(positions), positions, side, streams)


def test_a_page_costs_its_arrays_and_nothing_else():
    # keys and values, position and two numbers a slot; 6 + 5 numbers of streams in two cells of 32 slots
    assert SHAPE.slot_bytes == 2 * D * 4 + 4 + 2 * 4 + 4
    assert SHAPE.page_bytes == H * 32 * SHAPE.slot_bytes
    plain = PageShape.of(make_policy("streaming"), Budget(tokens=1023), heads=3, head_size=64, dtype=torch.bfloat16)
    assert (plain.capacity, plain.slot_bytes) == (1024, 2 * 64 * 2 + 4)


def test_the_next_token_has_room_in_a_page():
    for tokens, capacity in ((31, 32), (32, 64), (100, 128)):
        assert (
            PageShape.of(make_policy("h2o"), Budget(tokens=tokens), heads=1, head_size=D, dtype=torch.float32).capacity
            == capacity
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_prompt_keeps_comes_back_in_order_of_position(dtype):
    shape = PageShape(H, 32, D, dtype, SHAPE.side, SHAPE.streams)
    held = pages(shape)
    before = held.numbers.clone(), held.values.clone()
    slots = prompt(torch.tensor([[0, 3, 4, 9], [1, 2, 7, 9]]))
    slots.keep(torch.arange(4).expand(1, H, 4), holes=1)
    held.store_prompt(2, slots)
    back = held.prompt(2)
    assert back.positions.tolist() == [[[0, 3, 4, 9], [1, 2, 7, 9]]]
    torch.testing.assert_close(back.keys, content(back.positions).to(dtype))
    torch.testing.assert_close(back.values, -content(back.positions).to(dtype))
    for name, array in (("worth", back.positions.float()), ("age", -back.positions.float())):
        assert torch.equal(back.side(name), array)
    assert back.streams["memory"].flatten().tolist() == list(range(6))
    assert back.streams["level"].flatten().tolist() == list(range(5))
    others = [page for page in range(5) if page != 2]
    assert torch.equal(held.numbers[others], before[0][others]) and torch.equal(held.values[others], before[1][others])


def test_a_taken_page_has_nothing_of_the_prompt_before():
    held = pages()
    held.store_prompt(1, prompt(torch.arange(20).expand(H, 20)))
    held.store_prompt(1, prompt(torch.arange(2).expand(H, 2)))
    assert (held.numbers[1, :, 0, 0] >= 0).sum(-1).tolist() == [2, 2]
    assert not held.values[1, :, 0, 2:].any()


def test_streams_of_a_learned_policy_find_their_place():
    policy = KVpop.untrained({"number of layers": 2, "number of KV heads": H, "head size": D})
    shape = PageShape.of(policy, Budget(tokens=40), heads=H, head_size=D, dtype=torch.float32)
    drawn = {name: torch.randn(1, *size) for name, size in policy.streams(H, 1, D).items()}
    slots = prompt(torch.arange(3).expand(H, 3))
    held = pages(shape)
    held.store_prompt(0, Slots(slots.keys, slots.values, slots.positions, {"kvpop": slots.side("worth")}, drawn))
    back = held.prompt(0)
    assert drawn
    for name, stream in drawn.items():
        assert torch.equal(back.streams[name], stream)


@given(
    lengths=st.lists(st.integers(0, N), min_size=1, max_size=4),
    choices=st.lists(st.integers(0, N - 1), min_size=12, max_size=12),
)
def test_programs_of_tokens_on_pages_agree_with_lists(lengths, choices):
    held, plain = pages(), {}
    order = torch.tensor([4, 0, 3, 1][: len(lengths)])
    for page, length in zip(order.tolist(), lengths, strict=True):
        if length:
            held.store_prompt(page, prompt(torch.arange(length).expand(H, length)))
        else:
            held.numbers[page, :, :, 0] = -1
        plain[page] = [list(range(length)) for _ in range(H)]
    at = torch.tensor(lengths)
    for choice in choices:
        slots = PagedSlots(held, order, N + 1)
        positions = at[:, None, None].expand(-1, H, 1).int()
        slots.fill(content(positions), -content(positions), positions)
        assert torch.equal(slots.keys, content(slots.positions).where(slots.occupied[..., None], slots.keys))
        # each head loses a token of its own, where the request is over its budget
        victim = torch.stack([slots.positions[:, head].argsort()[:, (choice + head) % (N + 1)] for head in range(H)], 1)
        over = slots.occupied[:, :1].sum(-1) > N
        gone = slots.positions.gather(2, victim[..., None])[..., 0]
        if bool(over.any()):
            slots.clear(victim, over)
        slots.store()
        for row, page in enumerate(order.tolist()):
            for head in range(H):
                plain[page][head].append(int(at[row]))
                if over[row]:
                    plain[page][head].remove(int(gone[row, head]))
                now = held.numbers[page, head, 0, 0]
                there = now >= 0
                assert sorted(now[there].tolist()) == sorted(plain[page][head])
                assert torch.equal(held.keys[page, head, 0][there], content(now[there]))
                assert torch.equal(held.values[page, head, 0][there], -content(now[there]))
        at += 1
