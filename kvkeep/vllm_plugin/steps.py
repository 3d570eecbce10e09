"""What one forward of the engine reads: prompts, and requests that decode.

R requests, E = R + 1 ends of theirs, H KV heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from vllm import _custom_ops as kernels
from vllm import envs

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
    sequence: Sequences


class Decoding(NamedTuple):
    """The requests of a step that decode; for the kernel each of their KV heads is a sequence, and a page in `table`.

    `full` says that all of them hold as much as they may, and one token more for the moment.
    """

    tokens: Int[Tensor, " R"]
    pages: Int[Tensor, " R"]
    seen: Int[Tensor, " R"]
    heads: Sequences
    table: Int[Tensor, "RH 1"]
    full: bool


class Step(NamedTuple):
    """What one forward reads: prompts, and requests that decode (None where there are none)."""

    prompts: list[Prompt]
    decoding: Decoding | None


@dataclass(frozen=True)
class Steps:
    """Sorts the requests of each forward.

    Attributes:
        tokens: tokens that each KV head keeps.
        heads: KV heads of a layer, on this worker.
        group: query heads for each of them.
        head_size: numbers of a key.
        dtype: of keys and values.
    """

    tokens: int
    heads: int
    group: int
    head_size: int
    dtype: torch.dtype

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
        decodes = (last - first == 1) & (seen > 0)
        others = torch.stack([first, last, pages, seen], dim=1)[~decodes & (last > first)]
        prompts = [self._prompt(*numbers) for numbers in others.tolist()]
        decoding = self._decoding(first[decodes], pages[decodes], seen[decodes]) if bool(decodes.any()) else None
        return Step(prompts, decoding)

    def _prompt(self, first: int, last: int, page: int, seen: int) -> Prompt:
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        holds = torch.tensor([min(seen, self.tokens) + last - first], dtype=torch.int32)
        return Prompt(first, last, page, seen, self._sequences(starts, holds, self.heads))

    def _decoding(self, tokens: Tensor, pages: Tensor, seen: Tensor) -> Decoding:
        holds = (seen.clamp(max=self.tokens) + 1).to(torch.int32).repeat_interleave(self.heads)
        starts = torch.arange(len(holds) + 1, dtype=torch.int32)
        return Decoding(
            tokens=tokens,
            pages=pages,
            seen=seen.to(torch.int32),
            heads=self._sequences(starts, holds, 1),
            table=(pages[:, None] * self.heads + torch.arange(self.heads)).to(torch.int32).view(-1, 1),
            full=bool((seen >= self.tokens).all()),
        )

    def _sequences(self, starts: Tensor, holds: Tensor, heads: int) -> Sequences:
        schedule = kernels.cpu_attn_get_scheduler_metadata(
            num_reqs=len(holds),
            num_heads=heads * self.group,
            num_kv_heads=heads,
            head_dim=self.head_size,
            seq_lens=holds,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=INSTRUCTIONS,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return Sequences(starts, holds, schedule)
