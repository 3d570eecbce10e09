"""lm-evaluation-harness on an evicting cache: `--model kvkeep` (docs/evaluation.md).

The harness has no plugins: importing this file registers the model, and running it is the harness's own command with
the model known: `python -m kvkeep.evaluate.lm_eval_model --model kvkeep --model_args ...`.
"""

import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm  # type: ignore[import-untyped]

from ..budget import Budget
from ..cache import KVCache
from ..model import attach, cache_argument, prefill
from ..models import load
from ..policies import POLICIES, Policy, make_policy

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    message = "this needs lm-evaluation-harness: pip install 'kvkeep[eval]'"
    raise ModuleNotFoundError(message, name=error.name) from error

# arguments of the harness's own model that mean the same here
_HARNESS = (
    "batch_size",
    "max_batch_size",
    "max_length",
    "truncation",
    "add_bos_token",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)


class Scored(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding would have written it."""

    logprob: float
    is_greedy: bool


@register_model("kvkeep")
class EvictingLM(HFLM):
    """The harness's transformers model, with every prompt read through a `KVCache`.

    A prompt is compressed up to its last token, which is read afterwards: so even the first new token comes from the
    compressed cache. Continuations of one context share one compressed prompt.

    Args:
        pretrained: whatever `kvkeep.load` takes.
        policy: name of a policy, or a `Policy`; not the oracle, whose future the harness does not tell.
        budget: as for `KVCache`; None keeps everything.
        sinks: first tokens always kept.
        recent: last tokens always kept.
        schedule: layer schedule; None takes the policy's own.
        chunk: tokens of a continuation scored in one forward. The budget holds after each, so 1 is decoding itself
            and more is faster.
        dtype: as for `kvkeep.load`.
        device: as for `kvkeep.load`.
        options: arguments of the harness's own model (batch_size, max_length, ...) and options of the policy.

    Raises:
        ValueError: for unknown names, impossible budgets and the oracle.
    """

    def __init__(
        self,
        pretrained: str = "smollm2",
        *,
        policy: str | Policy = "streaming",
        budget: Budget | int | float | str | None = None,
        sinks: int = 4,
        recent: int = 16,
        schedule: str | None = None,
        chunk: int = 16,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        **options: Any,
    ):
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        harness = {name: options.pop(name) for name in _HARNESS if name in options}
        chosen = _causal_policy(policy, options)
        # the harness asks for cuda unless told otherwise, and its own model falls back as well
        device = "cpu" if str(device).startswith("cuda") and not torch.cuda.is_available() else device
        model, tokenizer = load(pretrained, dtype=dtype, device=device)
        super().__init__(pretrained=model, tokenizer=tokenizer, **harness)
        options = {"policy": chosen, "budget": budget, "sinks": sinks, "recent": recent, "schedule": schedule}
        self._cache_options: dict[str, Any] = options
        self._chunk = chunk
        # refused before the first request, not at it
        self._fresh_cache()

    def _fresh_cache(self) -> KVCache:
        return KVCache(self.model, **self._cache_options)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores in the order of the requests, each (names or None, context tokens, continuation tokens)."""
        scores: list[Scored] = [Scored(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for context, places in _by_context(requests, self.max_length).items():
                continuations = [requests[place][2] for place in places]
                for place, score in zip(places, self._score(context, continuations), strict=True):
                    scores[place] = score
                    if requests[place][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[place][0], tuple(score))
                    bar.update()
        return [tuple(score) for score in scores]  # type: ignore[misc]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        cache, mask = self._fresh_cache(), kwargs["attention_mask"]
        if context.shape[1] > 1:
            prefill(self.model, context[:, :-1], cache, attention_mask=mask[:, :-1])
        with attach(self.model):
            return super()._model_generate(context, max_length, stop, **kwargs, **{cache_argument(self.model): cache})

    @torch.no_grad()
    def _score(self, context: tuple[int, ...], continuations: Sequence[list[int]]) -> list[Scored]:
        prompt = self._fresh_cache()
        with attach(self.model):
            if len(context) > 1:
                prefill(self.model, self._row(context[:-1]), prompt)
            read = [self._read([context[-1], *tokens[:-1]], deepcopy(prompt)) for tokens in continuations]
        return [self._judge(logits, tokens) for logits, tokens in zip(read, continuations, strict=True)]

    def _judge(self, logits: Float[Tensor, "T V"], continuation: list[int]) -> Scored:
        target = torch.tensor(continuation, device=logits.device)
        logprobs = log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return Scored(float(logprobs.gather(1, target[:, None]).sum()), bool((logits.argmax(-1) == target).all()))

    def _read(self, tokens: Sequence[int], cache: KVCache) -> Float[Tensor, "T V"]:
        """Logits after each token."""
        size = len(tokens) if cache.budget.unlimited else self._chunk
        parts = self._row(tokens).split(size, dim=1)
        return torch.cat(
            [self.model(input_ids=part, **{cache_argument(self.model): cache}).logits[0] for part in parts]
        )

    def _row(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)


def _causal_policy(policy: str | Policy, options: dict[str, Any]) -> Policy:
    known = [field.name for field in fields(POLICIES[policy])] if policy in POLICIES else []
    unknown = sorted(options.keys() - set(known))
    if unknown and isinstance(policy, str) and policy in POLICIES:
        raise ValueError(
            f"unknown arguments {', '.join(unknown)}; policy {policy} takes {', '.join(known) or 'no options'}, and of "
            f"the harness's own are taken {', '.join(_HARNESS)}"
        )
    chosen = make_policy(policy, **options)
    if "future" in chosen.needs:
        raise ValueError(f"{policy} needs the future, which the harness does not tell; measure it with `kvkeep eval`")
    return chosen


def _by_context(
    requests: Sequence[tuple[Any, list[int], list[int]]], max_length: int
) -> dict[tuple[int, ...], list[int]]:
    """Places of the requests that share a context, cut from the left to what the model can read."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, (_, context, continuation) in enumerate(requests):
        room = max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit into the model's {max_length}; raise "
                "max_length= if the model can read more"
            )
        places.setdefault(tuple(context[-room:]), []).append(place)
    return places


def main(arguments: Sequence[str] | None = None) -> None:
    """The harness's own command line; `arguments` in place of this process's."""
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv = ["lm_eval", *arguments]
    cli_evaluate()


if __name__ == "__main__":
    main()
