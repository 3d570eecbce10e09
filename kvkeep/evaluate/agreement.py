"""Agreement with the full cache over a long text, token by token, by how far behind the prompt a token lies.

M caches, B texts of equal lengths in each, P prompt tokens, T tokens behind the prompt, V words of the vocabulary.

A text is fed as it is, so that every cache predicts the same tokens and none follows its own mistakes. The prompts are
read once for all policies and budgets; then all of them read on as one batch, evicting after every token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import KVCache
from ..model import attach, cache_argument, next_logits
from ..recorder import Item
from .answers import answer_together, sizes_of
from .masked import MaskedCache, refuse_unmasked
from .rows import Row, bootstrap, write_rows
from .run import FULL, Arm, Progress, arms_of, end_tokens
from .texts import TextSession, begin, fed

ALL = "all"
# tokens behind the prompt whose numbers a sample holds as one
BLOCK = 64
# tokens of one forward where a mask says what each may see: their logits are held for a while
_PIECE = 256


class Metric(NamedTuple):
    """How a row's number comes from what a sample sums up: the mean over tokens, then `of` that."""

    name: str
    summed: str
    of: Callable[[float], float]


METRICS = (
    Metric("top1_agreement", "top1", float),
    Metric("kl_to_full", "kl", float),
    Metric("perplexity_ratio", "excess", math.exp),
    Metric("perplexity", "loss", math.exp),
)


class Strayed(NamedTuple):
    """One prediction of M caches against the full one's.

    `top1`: whether the likeliest token is the same; `kl`: KL(full || theirs) in nats; `loss`: nats that the right token
    costs; `excess`: how much more than with the full cache.
    """

    top1: Float[Tensor, "M B"]
    kl: Float[Tensor, "M B"]
    excess: Float[Tensor, "M B"]
    loss: Float[Tensor, "M B"]


def compare(full: Float[Tensor, "B V"], logits: Float[Tensor, "M B V"], tokens: Int[Tensor, " B"]) -> Strayed:
    """How predictions differ from the full cache's, where `tokens` are what follows in the texts."""
    reference, theirs = full.float().log_softmax(-1), logits.float().log_softmax(-1)
    right = tokens[:, None]
    loss = -theirs.gather(-1, right.expand(*theirs.shape[:2], 1))[..., 0]
    return Strayed(
        top1=(logits.argmax(-1) == full.argmax(-1)).float(),
        # rounding may leave the sum of nearly equal ones below zero
        kl=(reference.exp() * (reference - theirs)).sum(-1).clamp(min=0),
        excess=loss + reference.gather(-1, right)[:, 0],
        loss=loss,
    )


def agreement(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    model_name: str,
    policies: Sequence[str],
    budgets: Sequence[int | float | str],
    out: Path,
    chunk: int = 1,
    masked: bool = False,
    batch: int = 8,
    seed: int = 0,
    by_source: bool = False,
    progress: Progress = lambda done, total, source: None,
    command: str | None = None,
) -> list[Row]:
    """Read texts under every policy at every budget and compare each prediction with the full cache's.

    The first prediction compared is that of the first token behind the prompt: all but the last token of the prompt
    are read and compressed, so that it too comes from the compressed cache. Finished texts are on disk, in
    `out`/samples.jsonl, before the next ones begin, and the same call goes on after them; `out`/rows.jsonl is written
    at the end.

    The row of the full cache compares the full cache with itself, read in another way (token by token against many at
    once): what rounding alone does in this dtype, and so the most that any policy can reach.

    Args:
        items: prompts with a future each (see `kvkeep.corpus.harvest`): the future's tokens are the text behind the
            prompt; what the model is to add is its greedy answer under the full cache.
        policies, budgets: as for `kvkeep.evaluate.run.evaluate`.
        chunk: tokens read at once behind the prompt. More than one is faster and not what decoding does: the budget
            holds after each chunk only. Rows say so in `extra`.
        masked: read each text in few forwards under a mask instead, for policies that can tell it (`MaskedCache`).
        batch: most texts of equal lengths to read at once, which is faster and takes as much more memory.
        seed: for policies that draw at random.
        by_source: rows for each source of texts too.
        command: how to run this again, for the rows; None takes this process's command line.

    Returns:
        For each policy and budget one row of top1_agreement (share of tokens with the same likeliest prediction),
        kl_to_full (nats), perplexity_ratio and perplexity: each a mean over tokens, then over texts, with a bootstrap
        interval over texts; `extra["by_position"]` holds the same by position behind the prompt.

    Raises:
        ValueError: before any work, for what cannot be measured, and an `out` with samples under other settings.
    """
    if not items:
        raise ValueError("there are no texts to read; give some")
    if chunk < 1 or (masked and chunk > 1):
        raise ValueError(f"chunk must be at least 1, and 1 for masked reading, got {chunk}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    session = _Session(
        model=model,
        tokenizer=tokenizer,
        arms=arms_of(policies, budgets),
        chunk=chunk,
        masked=masked,
        seed=seed,
        batch=batch,
    )
    session.check()
    measured = session.run(items, out, model_name=model_name, progress=progress, command=command)
    rows = rows_of(measured.records, stamp=measured.stamp, by_source=by_source)
    write_rows(out / "rows.jsonl", rows)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Session(TextSession):
    chunk: int
    masked: bool

    def check(self) -> None:
        for arm in self.arms:
            cache = arm.fresh_cache(self.model, self.seed)
            if self.masked:
                refuse_unmasked(cache)

    @property
    def how(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "masked": self.masked}

    @torch.inference_mode()
    def read(
        self, items: Sequence[Item], arms: Sequence[Arm], place: int
    ) -> Iterator[tuple[Item, Arm, dict[str, Any]]]:
        prompt = torch.cat([item.token_ids for item in items]).to(self.model.device)
        text = torch.cat([self._text(item) for item in items])
        caches = {arm: arm.fresh_cache(self.model, self.seed) for arm in arms if arm.policy != FULL}
        full = KVCache(self.model)
        if self.masked:
            readings = [self._at_once(cache, prompt, text) for cache in (full, *caches.values())]
        else:
            readings = [predictions(self.model, [full, *caches.values()], prompt, text, self.chunk)]
        held = {**caches}
        if len(caches) < len(arms):
            readings.append(self._at_once(KVCache(self.model), prompt, text))
            held[Arm(FULL, FULL)] = full
        with attach(self.model):
            blocks = _summed(readings, text)
        for (arm, cache), of_arm in zip(held.items(), blocks, strict=True):
            sizes = {**self._sizes(cache), "prompt_tokens": prompt.shape[1], "extra": {"tokens": text.shape[1]}}
            for item, sums in zip(items, of_arm, strict=True):
                yield item, arm, {"score": _mean(sums, "top1"), **sizes, "blocks": sums}

    def _sizes(self, cache: KVCache) -> dict[str, Any]:
        # under a mask nothing is evicted
        return {} if self.masked else sizes_of(cache)

    def _text(self, item: Item) -> Int[Tensor, "1 T"]:
        """The tokens behind the prompt, the model's own where they are to be its answer."""
        given, num_new = item.branches[0]
        given = given.to(self.model.device)
        if not num_new:
            return given
        [answer] = answer_together(
            self.model,
            [KVCache(self.model)],
            item.token_ids.to(self.model.device),
            given,
            max_new_tokens=num_new,
            ends=end_tokens(self.model, self.tokenizer),
        )
        if not answer.tokens and not given.shape[1]:
            raise ValueError(f"the model answers nothing to {item.source} {item.name}; leave it out, or give a text")
        return torch.cat([given, given.new_tensor([answer.tokens])], dim=1)

    def _at_once(
        self, like: KVCache, prompt: Int[Tensor, "B P"], text: Int[Tensor, "B T"]
    ) -> Iterator[Float[Tensor, "1 B V"]]:
        """What `like` would predict before each token of the texts, read in few forwards under a mask."""
        cache = MaskedCache(self.model, like, prompt.shape[1] - 1)
        next_logits(self.model, cache, input_ids=prompt[:, :-1])
        for part in fed(prompt, text).split(_PIECE, dim=1):
            yield from _logits(self.model, cache, part)[None].unbind(2)


def predictions(
    model: PreTrainedModel, members: Sequence[KVCache], prompt: Int[Tensor, "B P"], text: Int[Tensor, "B T"], chunk: int
) -> Iterator[Float[Tensor, "M B V"]]:
    """What each member predicts before each token of the texts; all read them as one batch, `chunk` tokens at once."""
    group, tokens = begin(model, members, prompt, text)
    for part in tokens.split(chunk, dim=1):
        logits = _logits(model, group, part.repeat(len(members), 1))
        yield from logits.unflatten(0, (len(members), -1)).unbind(2)


def _logits(model: PreTrainedModel, cache: Cache, tokens: Int[Tensor, "R t"]) -> Float[Tensor, "R t V"]:
    return model(input_ids=tokens, **{cache_argument(model): cache}).logits


def _summed(
    readings: Sequence[Iterator[Float[Tensor, "m B V"]]], text: Int[Tensor, "B T"]
) -> list[list[dict[str, list[float]]]]:
    """What each but the first cache's predictions sum up to, for each text by blocks of tokens."""
    found = [
        compare(logits[0], logits[1:], tokens)
        for tokens, logits in zip(text.unbind(1), map(torch.cat, zip(*readings, strict=True)), strict=True)
    ]
    # [M, B, T] each
    sums = {name: torch.stack([getattr(one, name) for one in found], -1).double() for name in Strayed._fields}
    sums["tokens"] = torch.ones_like(sums["top1"])
    # [M, B, blocks] each
    blocks = {
        name: torch.stack([part.sum(-1) for part in values.split(BLOCK, -1)], -1).tolist()
        for name, values in sums.items()
    }
    M, B, _ = sums["top1"].shape
    return [[{name: values[m][b] for name, values in blocks.items()} for b in range(B)] for m in range(M)]


def _mean(sums: Mapping[str, Sequence[float]], name: str, blocks: slice = slice(None)) -> float:
    """Mean over the tokens of some blocks."""
    return sum(sums[name][blocks]) / sum(sums["tokens"][blocks])


def rows_of(
    records: Sequence[Mapping[str, Any]], *, stamp: Mapping[str, Any] | None = None, by_source: bool = False
) -> list[Row]:
    """Rows of all samples, and of each source of texts if `by_source`; the full cache's come first."""
    sources = list(dict.fromkeys(record["task"] for record in records))
    rows = []
    for task in [ALL, *sources] if by_source and len(sources) > 1 else [ALL]:
        groups: dict[Arm, list[Mapping[str, Any]]] = {}
        for record in records:
            if task in (ALL, record["task"]):
                groups.setdefault(Arm(record["policy"], record["budget"]), []).append(record)
        for arm in sorted(groups, key=lambda arm: arm.policy != FULL):
            rows += [_row(metric, groups[arm], {**(stamp or {}), **arm._asdict(), "task": task}) for metric in METRICS]
    return rows


def _row(metric: Metric, group: Sequence[Mapping[str, Any]], naming: Mapping[str, Any]) -> Row:
    first = group[0]
    splits = {record["split"] for record in group}
    sizes: dict[str, Any] = {
        name: fmean(record[name] for record in group) for name in ("kept", "cache_bytes", "full_bytes") if name in first
    }
    tokens = [record["extra"]["tokens"] for record in group]
    return Row(
        **naming,
        **sizes,
        **_number(metric, [record["blocks"] for record in group]),
        metric=metric.name,
        interval="bootstrap",
        split=splits.pop() if len(splits) == 1 else "",
        seed=first["seed"],
        length=round(fmean(record["prompt_tokens"] for record in group) + fmean(tokens)),
        extra={
            "prompt_tokens": fmean(record["prompt_tokens"] for record in group),
            "tokens": sum(tokens),
            "reading": _reading(first["settings"]),
            "by_position": list(_by_position(metric, group)),
        },
    )


def _reading(settings: Mapping[str, Any]) -> str:
    if settings["masked"]:
        return "at once, under a mask"
    return "token by token" if settings["chunk"] == 1 else f"{settings['chunk']} tokens at once"


def _by_position(metric: Metric, group: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The metric over the 1st to 64th token behind the prompt, then up to twice as far each time."""
    longest = max(len(record["blocks"]["tokens"]) for record in group)
    start, stop = 0, 1
    while start < longest:
        blocks = slice(start, stop)
        reached = [record["blocks"] for record in group if len(record["blocks"]["tokens"]) > start]
        yield {"first": start * BLOCK, "until": stop * BLOCK, **_number(metric, reached, blocks)}
        start, stop = stop, 2 * stop


def _number(
    metric: Metric, texts: Sequence[Mapping[str, Sequence[float]]], blocks: slice = slice(None)
) -> dict[str, Any]:
    values = [_mean(sums, metric.summed, blocks) for sums in texts]
    bounds = bootstrap(values)
    value, low, high = (metric.of(number) for number in (fmean(values), bounds.low, bounds.high))
    return {"value": value, "low": low, "high": high, "n": len(values)}
