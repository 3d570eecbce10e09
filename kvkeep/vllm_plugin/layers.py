"""One layer of a served model: prompts one by one, and all requests that decode together, on their pages.

R requests that decode, T new tokens of a prompt, H KV heads, G query heads per KV head, D head size.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from vllm import _custom_ops as kernels

from ..attention import AttentionMass
from ..layer import KVLayer, Plan
from ..policies import Observation
from ..slots import Slots
from .mass import PagedMass
from .pages import MULTIPLE, PagedSlots, Pages, rounded_up
from .steps import INSTRUCTIONS, Decoding, Prompt, Sequences, Step


class DecodingLayer(KVLayer):
    """A KVLayer whose slots lie in pages: keys and values are read where they are."""

    def __init__(self, plan: Plan, index: int, pages: Pages, tokens: int):
        super().__init__(plan, index, 0)
        self._pages, self._tokens = pages, tokens
        self._keys, self._values = (_as_sequences(array, pages) for array in (pages.turned_keys, pages.values))
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
        step = self._step
        assert step is not None
        flat = queries.reshape(len(step.table), -1, queries.shape[-1])
        return _attend(flat, self._keys, self._values, step.table, step.heads, scale).view(queries.shape)

    def _observe(
        self, queries: Tensor | None, query_positions: Tensor, num_new: int, scale: float | None
    ) -> Observation:
        # attention masses need the keys outside of the kernel: only for those who ask
        wanted = queries if "queries" in self.plan.policy.needs else None
        return super()._observe(wanted, query_positions, num_new, scale)

    def _mass(
        self, queries: Tensor, query_positions: Tensor, scale: float, beyond: Float[Tensor, "B HG T"] | None
    ) -> AttentionMass:
        assert isinstance(self.slots, PagedSlots)
        return PagedMass(queries, self.slots, query_positions, scale)


class PromptLayer(KVLayer):
    """A KVLayer that reads several new tokens of one sequence by vLLM's kernel."""

    def __init__(self, plan: Plan, index: int, sequence: Sequences):
        super().__init__(plan, index, 0)
        self._sequence = sequence

    def read(self, queries: Tensor, seen: Observation, scale: float, *, stock: bool = True) -> Tensor:
        slots, sequence = seen.slots, self._sequence
        keys, values = (array[0].transpose(0, 1) for array in (slots.keys, slots.values))
        length, heads, size = keys.shape
        capacity = rounded_up(length, MULTIPLE)
        # the kernel multiplies what is behind the last slot by zero, so it must be finite
        block = keys.new_zeros(2, 1, heads, capacity, size)
        table = torch.zeros(1, 1, dtype=torch.int32)
        kernels.cpu_attn_reshape_and_cache(keys, values, block[0], block[1], torch.arange(length), INSTRUCTIONS)
        output = _attend(queries[0].transpose(0, 1).contiguous(), block[0], block[1], table, sequence, scale)
        return output.transpose(0, 1)[None]


class ServedLayer:
    """One layer of the model: what its prompts and its decoding requests keep lies in `pages`."""

    def __init__(self, plan: Plan, index: int, pages: Pages, tokens: int):
        self._plan, self._index, self.pages = plan, index, pages
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
        if step.decoding is not None:
            at = step.decoding.tokens
            output[at] = self._decoding.decode(queries[at], keys[at], values[at], scale, step.decoding)
        for prompt in step.prompts:
            part = slice(prompt.first, prompt.last)
            q, k, v = (array[part].transpose(0, 1)[None] for array in (queries, keys, values))
            output[part] = self._read_prompt(q, k, v, scale, prompt)[0].transpose(0, 1)

    def _read_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, prompt: Prompt
    ) -> Float[Tensor, "1 HG T D"]:
        layer = PromptLayer(self._plan, self._index, prompt.sequence)
        held = self.pages.prompt(prompt.page, min(prompt.seen, self._tokens))
        if held is not None:
            lengths = torch.tensor([prompt.seen], dtype=torch.int32, device=keys.device)
            counters = {"seen": prompt.seen, "has_empty": False, "fresh": 0}
            layer.restore_state(counters, {**held.state(), "lengths": lengths})
        output = layer.attend(queries, keys, values, None, scale)
        assert isinstance(layer.slots, Slots)
        self.pages.store_prompt(prompt.page, layer.slots)
        return output


def _as_sequences(array: Tensor, pages: Pages) -> Float[Tensor, "PH 1 N D"]:
    """Every head of every page as a block of its own, in the shape in which vLLM's kernel takes blocks."""
    shape = pages.shape
    size = (pages.num_pages * shape.heads, 1, shape.capacity, shape.head_size)
    # of a single head the stride may be anything
    cell = array.stride(0) // shape.heads
    return array.as_strided(size, (cell, cell, shape.head_size, 1))


def _attend(
    queries: Float[Tensor, "T HG D"], keys: Tensor, values: Tensor, table: Tensor, sequences: Sequences, scale: float
) -> Float[Tensor, "T HG D"]:
    """Causal attention by vLLM's kernel, over blocks `[P, H, N, D]` of its own layout that `table` names."""
    output = torch.empty_like(queries)
    kernels.cpu_attention_with_kv_cache(
        query=queries,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=sequences.starts,
        seq_lens=sequences.holds,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0,
        scheduler_metadata=sequences.schedule,
        s_aux=None,
    )
    return output
