"""The closed form of what deleted tokens cost equals deleting them and reading again.

B sequences, H KV heads, G query heads per KV head, N tokens, T queries, D head size, E hidden size.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvkeep.policies import deletion
from kvkeep.policies.deletion import Asked, Projection, attention_mass, deletion_cost, own_loss
from kvkeep.selection import protected, survivors
from kvkeep.slots import EMPTY, Slots

B, H, G, T, D, DV, E = 2, 2, 3, 5, 8, 6, 11
SCALE = 0.4
EXACT = torch.float64


class Case:
    """Random tokens at `positions` `[B, H, N]` and queries of which some look back from before the last token."""

    def __init__(self, positions: Tensor, seed: int = 0, sharp: float = 1.0, dtype: torch.dtype = EXACT):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=EXACT)

        rows, _, N = positions.shape
        self.slots = Slots(draw(rows, H, N, D).to(dtype), draw(rows, H, N, DV).to(dtype), positions)
        last = positions.amax((1, 2))
        at = torch.stack([torch.linspace(int(end) - 3, int(end), T).long() for end in last])
        weights = torch.rand(rows, T, generator=generator, dtype=EXACT)
        self.asked = Asked((draw(rows, H * G, T, D) * sharp).to(dtype), at, weights)
        self.weight = draw(E, H * G * DV)
        self.reserve = (positions == 0) | (positions >= (last - 2)[:, None, None])

    def cost(self, chunk: int, *, joint: bool = False, plain: bool = False, guard: float = 0.0, epsilon: float = 0.0):
        dtype = EXACT if joint else self.slots.keys.dtype
        gram = None if plain else Projection(self.weight, H, G).gram(joint=joint, dtype=dtype)
        return deletion_cost(
            self.slots,
            self.asked,
            SCALE,
            chunk=chunk,
            gram=gram,
            guard=guard,
            reserve=self.reserve,
            epsilon=epsilon,
        )

    def read(self, row: int, head: int, member: int, query: int, gone: Tensor) -> Tensor:
        """What the query reads in full precision when the slots `gone` are not there."""
        positions = self.slots.positions[row, head]
        hidden = (positions == EMPTY) | (positions > self.asked.positions[row, query]) | gone
        q = self.asked.queries[row, head * G + member, query].to(EXACT)
        logits = self.slots.keys[row, head].to(EXACT) @ q * SCALE
        return logits.masked_fill(hidden, -torch.inf).softmax(0) @ self.slots.values[row, head].to(EXACT)

    def part(self, head: int, member: int) -> Tensor:
        """The query head's columns of the output projection."""
        return self.weight.view(E, H, G, DV)[:, head, member]

    def missed(self, row: int, head: int, member: int, gone: Tensor) -> Tensor:
        """What each query reads less without `gone`, before the projection: `[T, DV]`."""
        nothing = torch.zeros_like(gone)
        return torch.stack(
            [self.read(row, head, member, t, gone) - self.read(row, head, member, t, nothing) for t in range(T)]
        )

    def brute_force(self, chunk: int, *, joint: bool = False, plain: bool = False) -> Tensor:
        """Every chunk deleted for real."""
        worth = torch.zeros_like(self.slots.positions, dtype=EXACT)
        for row, head in torch.cartesian_prod(torch.arange(len(worth)), torch.arange(H)).tolist():
            positions = self.slots.positions[row, head]
            for part in {int(at) // chunk for at in positions if at != EMPTY}:
                gone = (positions != EMPTY) & (positions // chunk == part)
                missed = [self.missed(row, head, member, gone) for member in range(G)]
                if not plain:
                    missed = [lost @ self.part(head, member).T for member, lost in enumerate(missed)]
                together = sum(missed).square() if joint else sum(lost.square() for lost in missed)
                worth[row, head, gone] = (together.sum(1) * self.asked.weights[row]).sum() / gone.sum()
        return worth


def whole(length: int = 14) -> Tensor:
    return torch.arange(length).expand(1, H, -1)


def gaps(length: int = 13) -> Tensor:
    """What evictions and padding leave: other tokens in each head, in any order, with empty slots."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randperm(31, generator=generator)[:length] for _ in range(B * H)]
    positions = torch.stack(rows).view(B, H, length)
    # the newest token is held everywhere
    positions[..., 2] = 31
    positions[0, :, :3] = EMPTY
    positions[0, :, 4] = 31
    return positions


@pytest.mark.parametrize("positions", [whole(), gaps()], ids=["whole", "gaps"])
@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("form", [{}, {"joint": True}, {"plain": True}], ids=["projected", "joint", "unprojected"])
def test_the_closed_form_is_deleting_and_reading_again(positions, chunk, form):
    case = Case(positions)
    expected = case.brute_force(chunk, **form)
    held = positions != EMPTY
    assert torch.allclose(case.cost(chunk, **form)[held], expected[held], rtol=1e-10, atol=0)


@pytest.mark.parametrize("chunk", [1, 4])
def test_epsilon_is_added_to_what_is_left(chunk):
    # one token a head is nearly all that is read
    case = Case(whole(), sharp=6.0)
    without, least = case.cost(chunk), case.cost(chunk, epsilon=0.5)
    assert (least < without).all() and (least > without / 100).any()


@pytest.mark.parametrize("sharp", [1.0, 10.0, 40.0])
def test_fp32_finds_the_cost_also_of_tokens_that_are_nearly_all_that_is_read(sharp):
    exact = Case(whole(60), sharp=sharp)
    single = Case(whole(60), sharp=sharp, dtype=torch.float32)
    expected = exact.cost(4, epsilon=1e-6)
    assert torch.allclose(
        single.cost(4, epsilon=1e-6).double(), expected, rtol=0.05, atol=1e-5 * float(expected.amax())
    )


def test_no_chunk_of_all_that_a_query_sees_is_worth_noise():
    case = Case(torch.arange(4).expand(1, H, -1), dtype=torch.float32)
    assert (case.cost(4, epsilon=1e-6) == 0).all()


@pytest.mark.parametrize("form", [{}, {"joint": True}, {"plain": True}, {"guard": 1.0}])
def test_tiles_change_nothing(form, monkeypatch):
    case = Case(gaps())
    in_one = case.cost(4, **form)
    monkeypatch.setattr(deletion, "_QUERY_TILE", 160)
    monkeypatch.setattr(deletion, "_LEAST_QUERIES", 1)
    monkeypatch.setattr(deletion, "_SLOT_TILE", 200)
    assert torch.allclose(case.cost(4, **form), in_one, rtol=1e-12)


def test_attention_of_chunks_is_the_attention_summed():
    case, expected = Case(gaps()), torch.zeros(B, H, 13, dtype=EXACT)
    for row, head, member in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(G)).tolist():
        positions = case.slots.positions[row, head]
        q = case.asked.queries[row, head * G + member]
        hidden = (positions == EMPTY) | (positions > case.asked.positions[row, :, None])
        weights = (q @ case.slots.keys[row, head].T * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
        mass = (weights * case.asked.weights[row, :, None]).sum(0)
        for slot, at in enumerate(positions):
            chunk = (positions != EMPTY) & (positions // 3 == at // 3)
            expected[row, head, slot] += mass[chunk].sum() / max(1, int(chunk.sum()))
    held = case.slots.occupied
    assert torch.allclose(attention_mass(case.slots, case.asked, SCALE, chunk=3)[held], expected[held])


def test_what_the_newest_token_costs_its_own_query_is_deleting_it():
    case = Case(gaps())
    newest = case.slots.positions == 31
    at = torch.full((B, H, 1), 31)
    queries = case.asked.queries[:, :, -1:]
    value = case.slots.values[newest].view(B, H, 1, DV)
    _, lost = own_loss(case.slots, queries, at, value, SCALE, 0.0)
    for row, head, member in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(G)).tolist():
        missed = case.missed(row, head, member, newest[row, head])[-1]
        assert torch.allclose(lost[row, head, member, 0], missed)


# several copies of what is asked for


def twins(copies: list[int], length: int = 64) -> Case:
    """Most queries read the same four tokens wherever `copies` starts them, the others read what they like."""
    case, dim = Case(whole(length), seed=3), 0
    # one number of a key is for the needle alone
    case.slots.keys[..., dim] = 0
    case.asked.queries[..., dim] = 0
    case.asked.queries[:, :, : T - 2, dim] = 10
    case.asked.weights.fill_(1 / T)
    needle = torch.randn(H, 4, DV, generator=torch.Generator().manual_seed(1), dtype=EXACT)
    for start in copies:
        case.slots.keys[0, :, start : start + 4] = torch.eye(D, dtype=EXACT)[dim] * 4
        case.slots.values[0, :, start : start + 4] = needle
    return case


@pytest.mark.parametrize("copies", [[20], [20, 40], [12, 24, 36]])
@pytest.mark.parametrize("form", [{}, {"joint": True}, {"plain": True}])
def test_of_several_copies_one_survives_every_budget_that_holds_it(copies, form):
    case = twins(copies)
    worth = case.cost(4, guard=1.0, epsilon=1e-6, **form)
    positions = case.slots.positions
    guarded = protected(positions, torch.tensor([64]), sinks=4, recent=4)
    for budget in range(8 + 4, 64):
        kept = positions.gather(-1, survivors(worth, positions, guarded, budget))[0]
        for head in kept.tolist():
            assert any(set(range(start, start + 4)) <= set(head) for start in copies)


def test_without_a_guard_both_copies_go():
    # each is missed little while the other is there
    case = twins([20, 40])
    worth = case.cost(4, epsilon=1e-6)
    positions = case.slots.positions
    kept = positions.gather(-1, survivors(worth, positions, positions < 4, 32))[0]
    assert not any(set(range(start, start + 4)) <= set(head) for head in kept.tolist() for start in (20, 40))


def test_a_guard_leaves_what_is_said_once_to_its_cost():
    case = twins([20])
    assert torch.equal(case.cost(4, guard=0.5)[0, :, 20:24], case.cost(4)[0, :, 20:24])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything under it makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


def test_no_array_holds_queries_times_tokens_times_head_size():
    generator, N, size, asked = torch.Generator().manual_seed(0), 256, 32, 32
    keys, values = torch.randn(2, 1, 1, N, size, generator=generator)
    slots = Slots(keys, values, torch.arange(N).view(1, 1, -1))
    queries = torch.randn(1, 2, asked, size, generator=generator)
    question = Asked(queries, torch.full((1, asked), N - 1), torch.ones(1, asked))
    gram = Projection(torch.randn(64, 2 * size), 1, 2).gram(joint=False, dtype=torch.float32)
    with Largest() as largest:
        deletion_cost(slots, question, 0.2, chunk=4, gram=gram, guard=1.0, reserve=slots.positions < 4, epsilon=1e-6)
    # twice: for both query heads
    assert largest.elements <= 2 * N * max(asked, size) < asked * N * size // 8
