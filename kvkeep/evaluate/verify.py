"""Is the cache exact on this model? Two measurements that every claim of kvkeep stands on.

S tokens of a prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import KVCache
from ..model import generate, prefill
from ..policies import make_policy
from .dense_twin import dense_logits, witnessed
from .rows import Row, manifest, wilson
from .run import policies_for

Progress = Callable[[str], None]


def same_tokens(
    model: PreTrainedModel,
    prompts: Sequence[Int[Tensor, "1 _"]],
    *,
    model_name: str,
    new_tokens: int = 64,
    command: str | None = None,
    progress: Progress = lambda _: None,
) -> Row:
    """Share of prompts for which the full budget gives DynamicCache's greedy tokens, every one of them."""
    equal = 0
    for number, prompt in enumerate(prompts):
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        options["attention_mask"] = torch.ones_like(prompt)
        stock = model.generate(prompt, **options)  # type: ignore[operator]
        ours = generate(model, prompt, cache=KVCache(model, budget=None), **options)
        equal += torch.equal(stock, ours)
        progress(f"{model_name} {model.dtype}: {equal} of {number + 1} prompts give DynamicCache's tokens")
    bounds = wilson(equal, len(prompts))
    return Row(
        metric="same_tokens_as_dynamic_cache",
        value=equal / len(prompts),
        low=bounds.low,
        high=bounds.high,
        interval=bounds.method,
        n=len(prompts),
        policy="full",
        budget="full",
        length=min(prompt.shape[1] for prompt in prompts),
        extra={"new_tokens": new_tokens},
        **manifest(model_name, dtype=str(model.dtype), command=command),
    )


def dense_differences(
    model: PreTrainedModel,
    prompts: Sequence[Int[Tensor, "1 _"]],
    *,
    model_name: str,
    policies: Sequence[str] | None = None,
    budget: str = "25%",
    new_tokens: int = 8,
    command: str | None = None,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """For every policy, the largest logit difference between the evicting cache and the dense model under its mask.

    Decoding is teacher-forced on the prompt's own last `new_tokens` tokens; an oracle is shown them as its future.
    Without `policies`, all that this model can run are measured, and the oracle.
    """
    rows = []
    for name in policies if policies is not None else [*policies_for(model), "oracle"]:
        worst, kept, held = 0.0, 0.0, 0
        for prompt in prompts:
            difference, cache = _difference(model, prompt, name, budget, new_tokens)
            worst, kept, held = max(worst, difference), cache.report().kept, cache.report().bytes
        progress(f"{model_name} {name}: largest logit difference {worst:.1e}")
        rows.append(
            Row(
                metric="max_logit_difference",
                value=worst,
                n=len(prompts),
                policy=name,
                budget=budget,
                length=min(prompt.shape[1] for prompt in prompts),
                kept=kept,
                cache_bytes=held,
                extra={"new_tokens": new_tokens},
                **manifest(model_name, dtype=str(model.dtype), command=command),
            )
        )
    return rows


def _difference(
    model: PreTrainedModel, prompt: Tensor, name: str, budget: str, new_tokens: int
) -> tuple[float, KVCache]:
    policy, log = witnessed(make_policy(name))
    cache = KVCache(model, policy=policy, budget=budget)
    start = prompt.shape[1] - new_tokens
    future = prompt[:, start:] if "future" in policy.needs else None
    logits = [prefill(model, prompt[:, :start], cache, future=future).logits]
    logits += [prefill(model, prompt[:, at : at + 1], cache).logits for at in range(start, prompt.shape[1])]
    dense = dense_logits(model, prompt, log)[:, start - 1 :]
    return float((torch.cat(logits, 1).float() - dense.float()).abs().max()), cache
