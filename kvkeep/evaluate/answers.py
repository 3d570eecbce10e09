"""One prompt, read once and answered under many policies and budgets as one batch.

M members, P prompt tokens, F tokens that follow it, L tokens looked ahead at.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import KVCache
from ..group import CacheGroup, sequences_of
from ..model import attach, expecting, next_logits


class Answer(NamedTuple):
    """One member's greedy answer, and what its cache held right after the prompt (see `sizes_of`)."""

    tokens: list[int]
    kept: float
    cache_bytes: int
    full_bytes: int


@torch.inference_mode()
def answer_together(
    model: PreTrainedModel,
    members: Sequence[KVCache],
    prompt: Int[Tensor, "1 P"],
    follow_up: Int[Tensor, "1 F"],
    *,
    future: Int[Tensor, "1 L"] | None = None,
    chunk: int | None = None,
    max_new_tokens: int,
    ends: Collection[int] = (),
) -> list[Answer]:
    """What each member answers: each is what it would be if that cache were used alone.

    Args:
        members: fresh caches; each compresses the prompt, then reads `follow_up`, then decodes.
        follow_up: tokens behind the compressed prompt, such as the question about it; may be none.
        future: tokens that the oracle is shown before it evicts.
        chunk: tokens of the prompt read at once; every budget holds after each. None reads it in one piece.
        max_new_tokens: longest answer.
        ends: tokens that end an answer; they are no part of it.

    Raises:
        ValueError: for an oracle without a future.
    """
    with attach(model):
        group = CacheGroup(members)
        logits = read_prompt(model, group, prompt, future, chunk)
        held = [sizes_of(member) for member in members]
        rows = len(members)
        if follow_up.shape[1]:
            logits = next_logits(model, group, input_ids=follow_up.expand(rows, -1))
        answers = _decode(model, group, logits.expand(rows, -1), max_new_tokens, ends)
    return [Answer(tokens, **sizes) for tokens, sizes in zip(answers, held, strict=True)]


def read_prompt(
    model: PreTrainedModel,
    group: CacheGroup,
    prompt: Int[Tensor, "B P"],
    future: Int[Tensor, "B L"] | None,
    chunk: int | None = None,
) -> Float[Tensor, "R V"]:
    """Logits after the prompts, which every member has compressed; what `kvkeep.prefill` does, for all at once.

    There is a row for each prompt, or one for each member and prompt where the members read on by themselves.
    """
    oracles = [row for row, member in enumerate(group.members) if _needs_future(member)]
    with ExitStack() as reading:
        for member in group.members:
            reading.enter_context(expecting(member, torch.ones_like(prompt)))
        if not oracles:
            return _read_chunks(model, group, prompt, chunk)
        if future is None:
            raise ValueError("the oracle needs the future: pass future=, the tokens that will follow")
        _hold(group, oracles, True)
        logits = _read_chunks(model, group, prompt, chunk)
        _look_ahead(model, group.select(oracles), future)
        _hold(group, oracles, False)
        return logits


def _read_chunks(
    model: PreTrainedModel, group: CacheGroup, prompt: Int[Tensor, "B P"], chunk: int | None
) -> Float[Tensor, "R V"]:
    """Logits behind a prompt read in chunks: for all members at once until one has evicted."""
    for part in prompt.split(chunk or prompt.shape[1], dim=1):
        rows = len(group.members) if group.apart else 1
        logits = next_logits(model, group, input_ids=part.repeat(rows, 1))
    return logits


def _needs_future(member: KVCache) -> bool:
    return "future" in member.policy.needs and not member.budget.unlimited


def _hold(group: CacheGroup, rows: Sequence[int], holding: bool) -> None:
    """Hold back what these members would evict, or let it go."""
    for row in rows:
        group.members[row].plan.holding = holding
        for layer in group.members[row].managed if not holding else ():
            layer.release()


def _look_ahead(model: PreTrainedModel, group: CacheGroup, future: Int[Tensor, "B L"]) -> None:
    """Show the members tokens that are taken back afterwards; sliding windows are the group's own and go with it."""
    plans = [member.plan for member in group.members]
    for plan in plans:
        plan.ahead = True
    next_logits(model, group, input_ids=future)
    for plan in plans:
        plan.ahead = False
    for layer in (layer for member in group.members for layer in member.managed):
        layer.crop(-future.shape[1])


def _decode(
    model: PreTrainedModel,
    group: CacheGroup,
    logits: Float[Tensor, "M V"],
    max_new_tokens: int,
    ends: Collection[int],
) -> list[list[int]]:
    """Greedy tokens of every member; whoever has finished leaves the batch."""
    answers: list[list[int]] = [[] for _ in group.members]
    rows = list(range(len(answers)))
    for step in range(1, max_new_tokens + 1):
        tokens = logits.argmax(-1)
        going = [place for place, token in enumerate(tokens.tolist()) if token not in ends]
        if not going:
            break
        if len(going) < len(rows):
            rows, tokens, group = [rows[place] for place in going], tokens[going], group.select(going)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            answers[row].append(token)
        if step == max_new_tokens:
            break
        logits = next_logits(model, group, input_ids=tokens[:, None])
    return answers


def sizes_of(member: KVCache) -> dict[str, Any]:
    """What a cache holds now, as samples and rows call it.

    `kept` is tokens per KV head, in full precision or as codes, `cache_bytes` are measured, `full_bytes` is what
    transformers' own cache would hold; bytes are of one sequence, where a cache holds several.
    """
    report, each = member.report(), sequences_of(member)
    return {"kept": report.held, "cache_bytes": report.bytes // each, "full_bytes": _stock_bytes(member)}


def _stock_bytes(member: KVCache) -> int:
    """Bytes of the keys and values of all that one sequence has seen: transformers' own cache holds as much for it."""
    slots = [(layer.seen, layer.slots) for layer in member.managed if layer.slots is not None]
    return sum(seen * (held.keys[0, :, 0].nbytes + held.values[0, :, 0].nbytes) for seen, held in slots)


def until_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens before the first one that ends an answer."""
    return list(takewhile(lambda token: token not in ends, tokens))
