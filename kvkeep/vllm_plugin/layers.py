"""One layer of a served model: prompts one by one, and all requests that decode together, on their pages.

R requests that decode, T new tokens of a prompt, H KV heads, G query heads per KV head, S slots that lie together,
D head size.
"""

from dataclasses import asdict

import torch
from jaxtyping import Float
from torch import Tensor
from vllm import _custom_ops as kernels

from ..attention import AttentionMass, Part, WindowAttention
from ..layer import KVLayer, Plan, Show, show
from ..policies import Observation
from ..routing import Room
from ..slots import Slots
from ..tiered_layer import TieredLayer
from ..windows import Codec
from .coded_attention import PagedCodedAttention
from .mass import PagedMass
from .pages import MULTIPLE, UNIT, PagedSlots, Pages, PageShape, rounded_up
from .steps import INSTRUCTIONS, Decoding, Prompt, Sequences, Step, of_heads, of_prompt


class DecodingLayer(KVLayer):
    """A KVLayer whose slots lie in pages: keys and values are read where they are."""

    def __init__(self, plan: Plan, index: int, pages: Pages):
        super().__init__(plan, index, 0)
        self._pages = pages
        self._keys, self._values = (_as_blocks(array, pages) for array in (pages.turned_keys, pages.values))
        self._step: Decoding | None = None

    @property
    def limit(self) -> tuple[int, Tensor | None]:
        assert self.plan.budget.tokens is not None
        return self.plan.budget.tokens, None

    def decode(
        self,
        queries: Float[Tensor, "R HG D"],
        keys: Float[Tensor, "R H D"],
        values: Float[Tensor, "R H D"],
        scale: float,
        step: Decoding,
    ) -> Float[Tensor, "R HG D"]:
        """Take one token of each request, attend, and evict down to the budget."""
        slots = self._held(step)
        self.slots, self.lengths, self.is_initialized = slots, step.seen, True
        self.has_empty = not step.full
        self._step = step
        output = self.attend(queries[:, :, None], keys[:, :, None], values[:, :, None], None, scale)
        slots.store()
        self.slots = None
        return output[:, :, 0]

    def read(self, queries: Tensor, seen: Observation, scale: float, *, stock: bool = True) -> Tensor:
        step = self._step
        assert step is not None and step.heads is not None
        return self._attend_slots(queries, step.table, step.heads, scale)

    def _held(self, step: Decoding) -> PagedSlots:
        return PagedSlots(self._pages, step.pages, self.limit[0] + 1)

    def _attend_slots(
        self, queries: Float[Tensor, "R HG 1 D"], table: Tensor, heads: Sequences, scale: float
    ) -> Float[Tensor, "R HG 1 D"]:
        """Attention over the slots, each head a sequence."""
        flat = queries.reshape(len(table), -1, queries.shape[-1])
        return _attend(flat, self._keys, self._values, table, heads, scale).view(queries.shape)

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
        return PagedMass(queries, self.slots, query_positions, scale, beyond)


class DecodingTiers(DecodingLayer):
    """The same under a policy with tiers, where nothing is evicted: requests whose windows compete are read alone."""

    def __init__(self, plan: Plan, index: int, pages: Pages):
        super().__init__(plan, index, pages)
        record, tiers = pages.shape.record, plan.policy.tiers
        assert record is not None and tiers is not None and plan.table is not None
        self._codec = Codec(**asdict(record.shape), table=plan.table, shared=tiers.share_heads)

    def read(self, queries: Tensor, seen: Observation, scale: float, *, stock: bool = True) -> Tensor:
        assert self._step is not None and seen.attention is not None
        holds = seen.slots.occupied.sum(-1).to(torch.int32).flatten()
        heads = of_heads(holds, queries.shape[1] // self._pages.shape.heads, self._pages.shape)
        output = self._attend_slots(queries, self._step.table, heads, scale)
        if seen.coded is None:
            return output
        logits = seen.attention.logits
        assert logits is not None
        near = Part(output.view(*logits.shape[:3], -1).float(), logits.logsumexp(-1, keepdim=True))
        return seen.coded.with_part(near).to(queries.dtype)

    def settle(self, seen: Observation, show: Show = show) -> None:
        if isinstance(seen.coded, PagedCodedAttention):
            codes = seen.coded.codes
            codes.worth = self.plan.policy.revise(codes.worth, seen)
        show(self.plan.policy, seen)

    def _held(self, step: Decoding) -> PagedSlots:
        return PagedSlots(self._pages, step.pages)

    def _attend_coded(self, queries: Tensor, query_positions: Tensor, scale: float) -> WindowAttention | None:
        assert isinstance(self.slots, PagedSlots) and self.slots.codes is not None
        codes = self.slots.codes
        return PagedCodedAttention(queries, query_positions, codes, self._codec, scale) if codes.length else None


class _Reading(KVLayer):
    """A KVLayer that reads several new tokens of one sequence by vLLM's kernel."""

    def __init__(self, plan: Plan, index: int, shape: PageShape):
        super().__init__(plan, index, 0)
        self._shape = shape

    def read(self, queries: Tensor, seen: Observation, scale: float, *, stock: bool = True) -> Tensor:
        if self.has_empty or seen.coded is not None:
            return super().read(queries, seen, scale, stock=stock)
        slots = seen.slots
        keys, values = (array[0].transpose(0, 1) for array in (slots.keys, slots.values))
        length, heads, size = keys.shape
        capacity = rounded_up(length, MULTIPLE)
        # the kernel multiplies what is behind the last slot by zero, so it must be finite
        block = keys.new_zeros(2, 1, heads, capacity, size)
        table = torch.zeros(1, 1, dtype=torch.int32)
        kernels.cpu_attn_reshape_and_cache(keys, values, block[0], block[1], torch.arange(length), INSTRUCTIONS)
        sequence = of_prompt(queries.shape[2], length, queries.shape[1] // heads, self._shape)
        output = _attend(queries[0].transpose(0, 1).contiguous(), block[0], block[1], table, sequence, scale)
        return output.transpose(0, 1)[None]


class PromptLayer(_Reading):
    """One request's slots."""


class PromptTiers(_Reading, TieredLayer):
    """One request's slots and windows of codes."""

    def _room(self, num_new: int) -> int:
        # pages have the room
        return 0

    def _room_behind(self, room: Room, length: int) -> int:
        return 0


class ServedLayer:
    """One layer of the model: what its prompts and its decoding requests keep lies in `pages`."""

    def __init__(self, plan: Plan, index: int, pages: Pages):
        self._plan, self._index, self.pages = plan, index, pages
        tiered = plan.policy.tiers is not None
        self._decoding = (DecodingTiers if tiered else DecodingLayer)(plan, index, pages)
        self._prompt_layer: type[_Reading] = PromptTiers if tiered else PromptLayer

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
        layer = self._prompt_layer(self._plan, self._index, self.pages.shape)
        if prompt.seen:
            held = self.pages.prompt(prompt.page)
            lengths = torch.tensor([prompt.seen], dtype=torch.int32, device=keys.device)
            has_empty = not bool(held.occupied.all())
            counters = {"seen": prompt.seen, "has_empty": has_empty, "fresh": 0, "first_at": 0}
            layer.restore_state(counters, {**held.state(), "lengths": lengths})
        output = layer.attend(queries, keys, values, None, scale)
        assert isinstance(layer.slots, Slots)
        self.pages.store_prompt(prompt.page, layer.slots)
        return output


def _as_blocks(array: Tensor, pages: Pages) -> Float[Tensor, "U 1 S D"]:
    """Every unit of memory as if a block of slots of one head began there, for vLLM's kernel to find them by number."""
    shape, item = pages.shape, array.element_size()
    # the last one ends where memory ends
    units = (len(pages.cells) * shape.page_bytes - shape.block_bytes) // UNIT + 1
    first = array.storage_offset() - shape.front_bytes // item
    size, step = (units, 1, shape.together, shape.head_size), UNIT // item
    return array.as_strided(size, (step, step, shape.head_size, 1), first)


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
