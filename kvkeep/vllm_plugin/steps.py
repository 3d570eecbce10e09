"""What one forward of the engine reads: prompts, and requests that decode.

R requests, E = R + 1 ends of theirs, H KV heads, C blocks of slots that a page may have.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from vllm import _custom_ops as kernels
from vllm import envs

from ..budget import Budget
from ..policies import Policy
from .pages import UNIT, PageShape

# the layout of pages: vLLM's kernel has others for other instructions
INSTRUCTIONS = "vec"


class Sequences(NamedTuple):
    """What vLLM's kernel wants to know of sequences: where their queries start, the keys of each, who does what."""

    starts: Int[Tensor, " E"]
    holds: Int[Tensor, " R"]
    schedule: Tensor


class Prompt(NamedTuple):
    """Tokens `first` to `last` of a step: the next ones of a request that has seen `seen`."""

    first: int
    last: int
    page: int
    seen: int


class Decoding(NamedTuple):
    """The requests of a step that decode, for the kernel each of their KV heads a sequence with its blocks in `table`.

    `heads` is None where layers differ in what they hold. `full` says that all hold as much as they may, and one token
    more for the moment.
    """

    tokens: Int[Tensor, " R"]
    pages: Int[Tensor, " R"]
    seen: Int[Tensor, " R"]
    heads: Sequences | None
    table: Int[Tensor, "RH C"]
    full: bool


class Step(NamedTuple):
    """What one forward reads: prompts, and requests that decode (None where there are none)."""

    prompts: list[Prompt]
    decoding: Decoding | None


@dataclass(frozen=True)
class Steps:
    """Sorts the requests of each forward.

    Attributes:
        policy, budget: of all requests, the budget in tokens.
        shape: of a page.
        group: query heads for each KV head.
    """

    policy: Policy
    budget: Budget
    shape: PageShape
    group: int

    def step(self, starts: Int[Tensor, " E"], lengths: Int[Tensor, " R"], pages: Int[Tensor, " R"]) -> Step:
        """One forward.

        Args:
            starts: where the new tokens of each request start, and where the last ones end.
            lengths: tokens of each request, the new ones included.
            pages: the page of each request.
        """
        first, last = starts[:-1].long(), starts[1:].long()
        seen = lengths.long() - (last - first)
        # a prompt's last piece may be a single token, which is read as decoding reads it
        decodes = (last - first == 1) & (seen > 0) & ~self._routes(lengths.long())
        others = torch.stack([first, last, pages, seen], dim=1)[~decodes & (last > first)]
        prompts = [Prompt(*numbers) for numbers in others.tolist()]
        decoding = self._decoding(first[decodes], pages[decodes], seen[decodes]) if bool(decodes.any()) else None
        return Step(prompts, decoding)

    @property
    def tokens(self) -> int:
        """Tokens that each KV head keeps."""
        assert self.budget.tokens is not None
        return self.budget.tokens

    def _routes(self, lengths: Int[Tensor, " R"]) -> Bool[Tensor, " R"]:
        """Requests in which windows compete once they have seen so many tokens: each is then read alone."""
        tiers, budget = self.policy.tiers, self.budget
        if tiers is None:
            return torch.zeros_like(lengths, dtype=torch.bool)
        ranked = lengths - budget.sinks - budget.recent
        # below that all windows fit
        return (ranked > 0) & (ranked % tiers.window == 0) & (lengths > self.tokens - tiers.window)

    def _decoding(self, tokens: Tensor, pages: Tensor, seen: Tensor) -> Decoding:
        heads = None
        if self.policy.tiers is None:
            holds = (seen.clamp(max=self.tokens) + 1).to(torch.int32).repeat_interleave(self.shape.heads)
            heads = of_heads(holds, self.group, self.shape)
        return Decoding(
            tokens=tokens,
            pages=pages,
            seen=seen.to(torch.int32),
            heads=heads,
            table=self._table(pages),
            full=bool((seen >= self.tokens).all()),
        )

    def _table(self, pages: Int[Tensor, " R"]) -> Int[Tensor, "RH C"]:
        """Where the blocks of each head begin, in units."""
        shape = self.shape
        heads = torch.arange(shape.heads) * shape.cell_bytes
        blocks = torch.arange(shape.num_blocks) * shape.block_bytes + shape.front_bytes
        table = (pages[:, None] * shape.page_bytes + heads)[..., None] + blocks
        return torch.div(table, UNIT, rounding_mode="floor").to(torch.int32).flatten(0, 1)


def of_heads(holds: Int[Tensor, " S"], group: int, shape: PageShape) -> Sequences:
    """Heads as sequences that hold so many tokens, with one query token each."""
    starts = torch.arange(len(holds) + 1, dtype=torch.int32)
    return _sequences(starts, holds, 1, group, shape)


def of_prompt(length: int, holds: int, group: int, shape: PageShape) -> Sequences:
    """One sequence with the newest `length` tokens of the `holds` that it holds."""
    starts, held = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, length], [holds]))
    return _sequences(starts, held, shape.heads, group, shape)


def _sequences(starts: Tensor, holds: Tensor, heads: int, group: int, shape: PageShape) -> Sequences:
    schedule = kernels.cpu_attn_get_scheduler_metadata(
        num_reqs=len(holds),
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=shape.head_size,
        seq_lens=holds,
        dtype=shape.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=INSTRUCTIONS,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )
    return Sequences(starts, holds, schedule)
