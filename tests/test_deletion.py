"""The closed form of what deleted tokens cost equals deleting them and reading again.

B sequences, H KV heads, G query heads per KV head, N tokens, T queries, D head size, E hidden size.
"""

import pytest
import torch
from torch import Tensor

from kvkeep.policies.deletion import Asked, Projection, deletion_cost
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
