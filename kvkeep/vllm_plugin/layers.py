"""One layer of a served model: prompts one by one, and all requests that decode together, on their pages.

R requests that decode, T new tokens of a prompt, H KV heads, G query heads per KV head, D head size.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm import _custom_ops as kernels

from ..layer import KVLayer, Observation, Plan
from ..slots import Slots
from .pages import PagedSlots, Pages

# the layout of pages: vLLM's kernel has others for other instructions
INSTRUCTIONS = "vec"


class Prompt(NamedTuple):
    """Tokens `first` to `last` of a step: the next ones of a request that has seen `seen`."""

    first: int
    last: int
    page: int
    seen: int


class Decoding(NamedTuple):
    """The requests of a step that decode, and what vLLM's kernel wants to know of them, each KV head a sequence.

    `full` says that all of them hold as much as they may, and one token more for the moment.
    """

    tokens: Int[Tensor, " R"]
    pages: Int[Tensor, " R"]
    seen: Int[Tensor, " R"]
    holds: Int[Tensor, " RH"]
    starts: Int[Tensor, " RH+1"]
    table: Int[Tensor, "RH 1"]
    schedule: Tensor
    full: bool


class Step(NamedTuple):
    """What one forward reads: prompts, and requests that decode (None where there are none)."""

    prompts: list[Prompt]
    decoding: Decoding | None


class DecodingLayer(KVLayer):
    """A KVLayer whose slots lie in pages: keys and values are read where they are."""

    def __init__(self, plan: Plan, index: int, pages: Pages, tokens: int):
        super().__init__(plan, index, 0)
        self._pages, self._tokens = pages, tokens
        self._step: Decoding | None = None

    @property
    def limit(self) -> tuple[int, Tensor | None]:
        return self._tokens, None

    def decode(
        self,
        queries: Float[Tensor, "R HG D"],
        keys: Float[Tensor, "R H D"],
        values: Float[Tensor, "R H D"],
        scale: float,
        step: Decoding,
    ) -> Float[Tensor, "R HG D"]:
        """Take one token of each request, attend, and evict down to the budget."""
        slots = PagedSlots(self._pages, step.pages, self._tokens + 1)
        self.slots, self.lengths, self.is_initialized = slots, step.seen, True
        self.has_empty = not step.full
        self._step = step
        output = self.attend(queries[:, :, None], keys[:, :, None], values[:, :, None], None, scale)
        slots.store()
        self.slots = None
        return output[:, :, 0]

    def read(self, queries: Tensor, seen: Observation, scale: float, *, stock: bool = True) -> Tensor:
        step, shape = self._step, self._pages.shape
        assert step is not None
        flat = queries.reshape(len(step.holds), -1, shape.head_size)
        output = torch.empty_like(flat)
        kernels.cpu_attention_with_kv_cache(
            query=flat,
            key_cache=self._as_sequences(self._pages.turned_keys),
            value_cache=self._as_sequences(self._pages.values),
            output=output,
            query_start_loc=step.starts,
            seq_lens=step.holds,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=step.table,
            softcap=0,
            scheduler_metadata=step.schedule,
            s_aux=None,
        )
        return output.view(queries.shape)

    def _observe(
        self, queries: Tensor | None, query_positions: Tensor, num_new: int, scale: float | None
    ) -> Observation:
        # attention masses need the keys outside of the kernel: only for those who ask
        wanted = queries if "queries" in self.plan.policy.needs else None
        return super()._observe(wanted, query_positions, num_new, scale)

    def _as_sequences(self, array: Tensor) -> Float[Tensor, "PH 1 N D"]:
        shape = self._pages.shape
        rows = self._pages.num_pages * shape.heads
        size = (rows, 1, shape.capacity, shape.head_size)
        cell = array.stride(1)
        return array.as_strided(size, (cell, cell, shape.head_size, 1))


class ServedLayer:
    """One layer of the model: what its prompts and its decoding requests keep lies in `pages`."""

    def __init__(self, plan: Plan, index: int, pages: Pages, tokens: int):
        self._plan, self._index, self._pages = plan, index, pages
        self._tokens = tokens
        self._decoding = DecodingLayer(plan, index, pages, tokens)

    def attend(
        self,
        queries: Float[Tensor, "T HG D"],
        keys: Float[Tensor, "T H D"],
        values: Float[Tensor, "T H D"],
        scale: float,
        step: Step,
        output: Float[Tensor, "T HG D"],
    ) -> None:
        """Attention of one forward's tokens, written into `output`; the pages are within their budget behind it."""
        arrays = (queries, keys, values)
        if step.decoding is not None:
            at = step.decoding.tokens
            output[at] = self._decoding.decode(*(array[at] for array in arrays), scale, step.decoding)
        for prompt in step.prompts:
            part = slice(prompt.first, prompt.last)
            new = (array[part].transpose(0, 1)[None] for array in arrays)
            output[part] = self._read_prompt(*new, scale, prompt)[0].transpose(0, 1)

    def _read_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, prompt: Prompt
    ) -> Float[Tensor, "1 HG T D"]:
        layer = KVLayer(self._plan, self._index, 0)
        held = self._pages.prompt(prompt.page, min(prompt.seen, self._tokens))
        if held is not None:
            lengths = torch.tensor([prompt.seen], dtype=torch.int32, device=keys.device)
            counters = {"seen": prompt.seen, "has_empty": False, "fresh": 0}
            layer.restore_state(counters, {**held.state(), "lengths": lengths})
        output = layer.attend(queries, keys, values, None, scale)
        assert isinstance(layer.slots, Slots)
        self._pages.store_prompt(prompt.page, layer.slots)
        return output
