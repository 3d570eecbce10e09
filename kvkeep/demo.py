"""The demo: facts planted in a real chapter, asked under plain transformers and under policies that keep a part.

B sequences, S prompt tokens, T answer tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .cache import KVCache
from .chat import prompt_ids
from .evaluate.answers import until_end
from .evaluate.rows import Row, summarise
from .evaluate.run import serves
from .evaluate.speed import STOCK, Arm, Prompt, decode, held_bytes, held_tokens, median_interval
from .evaluate.tasks import Fact, demo_document
from .group import CacheGroup
from .model import attach, cache_argument, end_tokens

ARMS = tuple(
    Arm(policy=policy, budget=budget)
    for budget in ("25%", "10%")
    for policy in ("streaming", "knorm", "tova", "snapkv", "kvp", "tiered(kvp)")
)
ANSWER_TOKENS = 24
BRIEFLY = "Answer with a few words from the document."


class Asked(NamedTuple):
    """One question under every arm: a sample record each (see `SampleLog`), and where their answers stopped."""

    records: list[dict[str, Any]]
    prompts: dict[Arm, Prompt]


def plant(tokenizer: Any, num_tokens: int, seed: int) -> tuple[str, list[Fact]]:
    """A real chapter of at most `num_tokens` tokens with six invented facts in it, and the facts."""
    return demo_document(num_tokens, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]), seed)


def arms_for(model: PreTrainedModel) -> list[Arm]:
    """The arms of the demo without those whose policy was trained for another model."""
    return [arm for arm in ARMS if serves(arm.policy, model)]


def ask(
    model: PreTrainedModel,
    tokenizer: Any,
    document: str,
    fact: Fact,
    *,
    arms: Sequence[Arm] | None = None,
    naming: Mapping[str, Any],
) -> Asked:
    """Ask one question: with transformers' own cache and attention first, then under `arms`.

    The arms read the prompt together and decode as one batch, each into its own cache (`CacheGroup`). Every answer
    is `ANSWER_TOKENS` greedy tokens, cut where the model ends it.

    Args:
        arms: None takes those of `ARMS` that this model can run (see `arms_for`).
        naming: further fields for every record, such as model, index and seed.
    """
    input_ids = prompt_ids(tokenizer, document, f"{fact.question} {BRIEFLY}")
    stock = STOCK.fresh_cache(model)
    arms = arms_for(model) if arms is None else arms
    members = [KVCache(model, policy=arm.policy, budget=arm.budget) for arm in arms]
    answers = _greedy(model, input_ids, stock, num_rows=1)
    with attach(model):
        answers = torch.cat([answers, _greedy(model, input_ids, CacheGroup(members), num_rows=len(arms))])
    records, prompts = [], {}
    for arm, cache, answer in zip([STOCK, *arms], [stock, *members], answers, strict=True):
        prompts[arm] = Prompt(cache, cache.get_seq_length(), answer[None, -1:])
        output = tokenizer.decode(until_end(answer.tolist(), end_tokens(model)), skip_special_tokens=True).strip()
        sizes = {"kept": held_tokens(cache), "cache_bytes": held_bytes(cache), "full_bytes": held_bytes(stock)}
        records.append({**naming, **arm.names, **sizes, "prompt_tokens": input_ids.shape[1], **_judged(output, fact)})
    return Asked(records, prompts)


@torch.no_grad()
def _greedy(
    model: PreTrainedModel, input_ids: Int[Tensor, "1 S"], cache: Cache, *, num_rows: int
) -> Int[Tensor, "B T"]:
    """`ANSWER_TOKENS` tokens after one prompt, for each of the `num_rows` sequences that `cache` decodes."""
    argument = {cache_argument(model): cache}
    logits = model(input_ids, logits_to_keep=1, **argument).logits
    tokens = [logits[:, -1].argmax(-1, keepdim=True).expand(num_rows, 1)]
    for _ in range(ANSWER_TOKENS - 1):
        logits = model(tokens[-1], **argument).logits
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def _judged(output: str, fact: Fact) -> dict[str, Any]:
    """Right is an answer that contains the planted one, whatever the case."""
    return {
        "task": "demo",
        "question": "inside",
        "prompt": fact.question,
        "answers": [fact.answer],
        "output": output,
        "score": float(fact.answer.casefold() in output.casefold()),
    }


@torch.inference_mode()
def time_decoding(
    model: PreTrainedModel,
    prompts: Mapping[Arm, Prompt],
    *,
    rounds: int = 5,
    steps: int = 16,
    each_round: Callable[[], None] = lambda: None,
) -> dict[Arm, list[float]]:
    """Tokens per second of every arm alone, with a batch of one: `rounds` loops of `steps` tokens, arms in turn.

    Taking turns spreads what else the machine does over all arms.
    """
    speeds: dict[Arm, list[float]] = {arm: [] for arm in prompts}
    for _ in range(rounds):
        for arm, prompt in prompts.items():
            speeds[arm].append(steps / decode(model, arm, prompt, 1, steps)[1])
        each_round()
    return speeds


def rows_of(
    records: Iterable[Mapping[str, Any]], speeds: Mapping[Arm, Sequence[float]], stamp: Mapping[str, Any]
) -> list[Row]:
    """Rows of accuracy with Wilson intervals, then of decode speed and of its ratio to the full cache.

    Args:
        speeds: of `time_decoding`.
        stamp: the `manifest` of the run.
    """
    records = list(records)
    stamp = {**stamp, "length": round(fmean(record["prompt_tokens"] for record in records))}
    rows = summarise([{**record, "length": stamp["length"]} for record in records], stamp=stamp)
    for arm, rounds in speeds.items():
        ratios = [ours / full for ours, full in zip(rounds, speeds[STOCK], strict=True)]
        fields = {**stamp, **arm.names}
        rows += [_median_row("tokens_per_s", rounds, fields), _median_row("decode_ratio", ratios, fields)]
    return rows


def _median_row(metric: str, values: Sequence[float], fields: Mapping[str, Any]) -> Row:
    low, high = median_interval(values)
    return Row(**fields, metric=metric, value=median(values), low=low, high=high, interval="bootstrap", n=len(values))
