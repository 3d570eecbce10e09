"""Speed and bytes beside transformers' own caches, measured in turns in the same run (docs/speed.md).

B sequences, T new tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..budget import Budget
from ..cache import KVCache
from ..model import attach, cache_argument
from .rows import Row, manifest
from .stock import DYNAMIC, refuse_unknown, repeated, stock_cache, tensors_of

# larger than any last-level cache, so that the copy measures memory
COPY_BYTES = 2**28
_RESAMPLES = 2000

# called with steps done, steps in all, and what comes next
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One cache of the comparison; without a budget it is one of transformers' on the model's own sdpa attention."""

    policy: str
    budget: str | None = None

    def fresh_cache(self, model: PreTrainedModel) -> Cache:
        if self.budget is None:
            return stock_cache(self.policy, model.config)
        return KVCache(model, policy=self.policy, budget=self.budget)

    def on(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        """What the model must be under while this cache is in use."""
        return nullcontext() if self.budget is None else attach(model)

    @property
    def names(self) -> dict[str, str]:
        """Policy and budget as a row names them; a cache that keeps everything is the full one."""
        if self.budget is None and self != STOCK:
            return {"policy": self.policy, "budget": "full"}
        unlimited = self.budget is None or Budget.parse(self.budget).unlimited
        return (
            {"policy": "full", "budget": "full"} if unlimited else {"policy": self.policy, "budget": str(self.budget)}
        )


STOCK = Arm(policy=DYNAMIC)


class Prompt(NamedTuple):
    """A prompt that was read: its cache, its length, and the token that comes next `[1, 1]`."""

    cache: Cache
    length: int
    token: Tensor


@dataclass
class Measured:
    """One arm in one setting: seconds of each round, and what its cache held after the last."""

    seconds: list[float] = field(default_factory=list)
    held_bytes: int = 0
    read_bytes: int = 0
    kept: float = 0.0


def bench(
    model: PreTrainedModel,
    *,
    model_name: str,
    lengths: Sequence[int],
    batch_sizes: Sequence[int] = (1,),
    policies: Sequence[str] = ("tova",),
    budgets: Sequence[str] = ("25%", "full"),
    beside: Sequence[str] = (),
    new_tokens: int = 32,
    repeats: int = 5,
    threads: int = 1,
    prefill: bool = True,
    command: str = "",
    progress: Progress | None = None,
) -> list[Row]:
    """Measure prefill, decode and cache bytes at each length, batch size and budget, in turns with DynamicCache.

    Args:
        lengths: prompt tokens; prompts are random tokens of the vocabulary.
        policies: as users write them, each at every budget.
        budgets: as users write them, "full" for a KVCache that evicts nothing.
        beside: other caches of transformers to measure too, see `stock.QUANTIZED`.
        new_tokens: decode steps of one timed loop.
        repeats: rounds; each times DynamicCache and every budget once, so ratios are between neighbours.
        threads: threads that torch computes with, put back afterwards.
        prefill: whether prompts are read `repeats` times and timed (at batch size 1); else each is read once.

    Returns:
        Rows of decode_ratio, decode_tokens_per_s, limit_share and cache_bytes, and of prefill_ratio; the batch size
        is their task. Each value is the median of the rounds, its interval a bootstrap of that median.

    Raises:
        ValueError: for counts below 1, a policy that needs a future, a cache of transformers that is not known or
            lacks its library, or a model that is not on sdpa attention.
    """
    counts = {"lengths": lengths, "batch_sizes": batch_sizes, "new_tokens": [new_tokens], "repeats": [repeats]}
    _check(model, policies, budgets, counts | {"threads": [threads]})
    refuse_unknown(tuple(beside))
    arms = _arms(policies, budgets, beside)
    reads = repeats if prefill else 1
    tell = _Counter(len(lengths) * len(arms) * (reads + repeats * len(batch_sizes)), progress)
    rows: list[Row] = []
    with _threads(threads), torch.inference_mode():
        stamp = manifest(model_name, dtype=_dtype(model), device=str(model.device), command=command or None)
        warm_up(model, arms)
        for length in lengths:
            setting = {**stamp, "length": length, "seed": 0}
            prompts, read = _read_prompts(model, arms, length, reads, tell)
            rows += _prefill_rows(setting, read, length) if prefill else []
            for batch_size in batch_sizes:
                measured, bandwidth = _decode_rounds(model, prompts, batch_size, new_tokens, repeats, tell)
                shape = _Shape(batch_size, new_tokens, weight_bytes(model), bandwidth)
                rows += _decode_rows(setting, measured, shape)
    tell("done")
    return rows


def _arms(policies: Sequence[str], budgets: Sequence[str], beside: Sequence[str]) -> list[Arm]:
    """DynamicCache first, and what keeps everything once, whatever the policy."""
    limited = [str(budget) for budget in budgets if not Budget.parse(budget).unlimited]
    whole = [Arm(policy=policies[0], budget=str(budget)) for budget in budgets if str(budget) not in limited][:1]
    ours = [Arm(policy=policy, budget=budget) for policy in policies for budget in limited]
    return [STOCK, *(Arm(policy=name) for name in beside), *ours, *whole]


def warm_up(model: PreTrainedModel, arms: Sequence[Arm]) -> None:
    """Run each arm once on a few tokens: first calls allocate and pick kernels."""
    for arm in arms:
        prompt, _ = read_prompt(model, arm, random_tokens(model, 64))
        decode(model, arm, prompt, 1, 2)


def random_tokens(model: PreTrainedModel, length: int) -> Int[Tensor, "1 T"]:
    """The same random tokens in every run; what they say does not change what reading them costs."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)


def read_prompt(model: PreTrainedModel, arm: Arm, tokens: Int[Tensor, "1 T"]) -> tuple[Prompt, float]:
    """Read a prompt into a fresh cache of the arm; the seconds it took, evictions included."""
    cache = arm.fresh_cache(model)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    step = _stepper(model, cache)
    with arm.on(model):
        start = _now(model)
        token = step(tokens, positions)
        seconds = _now(model) - start
    return Prompt(cache, tokens.shape[1], token), seconds


def decode(model: PreTrainedModel, arm: Arm, prompt: Prompt, batch_size: int, steps: int) -> tuple[Cache, float]:
    """Greedy decoding after a copy of the prompt, repeated to `batch_size`; the cache afterwards and the seconds."""
    cache = repeated(prompt.cache, batch_size)
    token = prompt.token.repeat(batch_size, 1)
    step = _stepper(model, cache)
    with arm.on(model):
        start = _now(model)
        for position in range(prompt.length, prompt.length + steps):
            token = step(token, torch.full_like(token, position))
        seconds = _now(model) - start
    return cache, seconds


def _stepper(model: PreTrainedModel, cache: Cache) -> Callable[[Tensor, Tensor], Tensor]:
    """One forward, as plain as it gets and the same for every arm: tokens and positions in, the next token out."""
    argument = {cache_argument(model): cache}

    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        logits = model(input_ids=tokens, position_ids=positions, logits_to_keep=1, **argument).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    return step


def _read_prompts(
    model: PreTrainedModel, arms: Sequence[Arm], length: int, repeats: int, tell: "_Counter"
) -> tuple[dict[Arm, Prompt], dict[Arm, Measured]]:
    prompts: dict[Arm, Prompt] = {}
    measured = {arm: Measured() for arm in arms}
    tokens = random_tokens(model, length)
    for _ in range(repeats):
        for arm in arms:
            tell(f"reading {length:,} tokens")
            prompts[arm], seconds = read_prompt(model, arm, tokens)
            _note(measured[arm], prompts[arm].cache, seconds)
    return prompts, measured


def _decode_rounds(
    model: PreTrainedModel, prompts: dict[Arm, Prompt], batch_size: int, steps: int, repeats: int, tell: "_Counter"
) -> tuple[dict[Arm, Measured], float]:
    """Rounds of one loop for each arm, and the median copy bandwidth, measured once a round."""
    measured = {arm: Measured() for arm in prompts}
    bandwidths = []
    for _ in range(repeats):
        bandwidths.append(copy_bandwidth(model))
        for arm, prompt in prompts.items():
            tell(f"decoding after {prompt.length:,} tokens, batch {batch_size}")
            cache, seconds = decode(model, arm, prompt, batch_size, steps)
            _note(measured[arm], cache, seconds)
    return measured, median(bandwidths)


def _note(measured: Measured, cache: Cache, seconds: float) -> None:
    measured.seconds.append(seconds)
    # storages only grow while decoding, so the end is the peak
    measured.held_bytes = held_bytes(cache)
    measured.read_bytes = read_bytes(cache)
    measured.kept = held_tokens(cache)


def held_tokens(cache: Cache) -> float:
    """Mean tokens per KV head and layer, in full precision or as codes."""
    return cache.report().held if isinstance(cache, KVCache) else float(cache.get_seq_length())


def held_bytes(cache: Cache) -> int:
    """Measured bytes of the storages of everything a cache holds."""
    if isinstance(cache, KVCache):
        report = cache.report()
        return report.bytes + report.unmanaged_bytes
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(cache))


def read_bytes(cache: Cache) -> int:
    """Bytes of keys and values that one decode step must read: those in use, without side arrays or spare room."""
    if not isinstance(cache, KVCache):
        return sum(tensor.nbytes for tensor in tensors_of(cache))
    # sliding layers are transformers' own
    slots: list[Any] = [getattr(layer, "slots", layer) for layer in cache.layers]
    held = [holder for each in slots for holder in (each, getattr(each, "coded", None)) if holder]
    return sum(holder.keys.nbytes + holder.values.nbytes for holder in held)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one decode step must read: all, but of an untied input embedding only single rows."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding else embedding
    return sum(weight.nbytes for weight in model.parameters() if weight is not looked_up)


def copy_bandwidth(model: PreTrainedModel) -> float:
    """Bytes per second of a large copy on the model's device, each byte counted once read and once written."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=model.device)
    target = torch.zeros_like(source)
    start = _now(model)
    target.copy_(source)
    return 2 * COPY_BYTES / (_now(model) - start)


class _Shape(NamedTuple):
    batch_size: int
    new_tokens: int
    weight_bytes: int
    bandwidth: float

    def tokens_per_s(self, measured: Measured) -> list[float]:
        return [self.batch_size * self.new_tokens / seconds for seconds in measured.seconds]

    def limit_shares(self, measured: Measured) -> list[float]:
        """The least time a step can take at the copy's bandwidth, over the time it took."""
        least = (self.weight_bytes + measured.read_bytes) / self.bandwidth
        return [least * self.new_tokens / seconds for seconds in measured.seconds]


def _prefill_rows(setting: dict[str, Any], read: dict[Arm, Measured], length: int) -> list[Row]:
    stock = read[STOCK]
    rows = []
    for arm, measured in read.items():
        if arm is not STOCK:
            extra = {
                "batch_size": 1,
                "tokens_per_s": length / median(measured.seconds),
                "dynamic_cache_tokens_per_s": length / median(stock.seconds),
            }
            common = {**setting, **arm.names, **_sizes(measured, stock), "task": "batch 1", "extra": extra}
            rows.append(median_row("prefill_ratio", _ratios(stock, measured), common))
    return rows


def _decode_rows(setting: dict[str, Any], measured: dict[Arm, Measured], shape: _Shape) -> list[Row]:
    stock = measured[STOCK]
    rows = []
    for arm, ours in measured.items():
        if arm is not STOCK:
            common = {**setting, **arm.names, **_sizes(ours, stock), "task": f"batch {shape.batch_size}"}
            common["extra"] = _decode_extra(ours, stock, shape)
            rows += [
                median_row("decode_ratio", _ratios(stock, ours), common),
                median_row("decode_tokens_per_s", shape.tokens_per_s(ours), common),
                median_row("limit_share", shape.limit_shares(ours), common),
                median_row("cache_bytes", [ours.held_bytes], common),
            ]
    return rows


def _decode_extra(ours: Measured, stock: Measured, shape: _Shape) -> dict[str, Any]:
    """What only means something on the machine it was measured on, beside the ratios that travel better."""
    return {
        "batch_size": shape.batch_size,
        "new_tokens": shape.new_tokens,
        "machine_dependent": ["decode_tokens_per_s", "limit_share", "copy_bandwidth"],
        "tokens_per_s": median(shape.tokens_per_s(ours)),
        "dynamic_cache_tokens_per_s": median(shape.tokens_per_s(stock)),
        "dynamic_cache_limit_share": median(shape.limit_shares(stock)),
        "step_bytes": shape.weight_bytes + ours.read_bytes,
        "copy_bandwidth": shape.bandwidth,
    }


def _sizes(ours: Measured, stock: Measured) -> dict[str, float]:
    return {"kept": ours.kept, "cache_bytes": ours.held_bytes, "full_bytes": stock.held_bytes}


def _ratios(stock: Measured, ours: Measured) -> list[float]:
    """How many times as fast as DynamicCache, round by round."""
    return [theirs / mine for theirs, mine in zip(stock.seconds, ours.seconds, strict=True)]


def median_row(metric: str, rounds: Sequence[float | int], common: dict[str, Any]) -> Row:
    """The median of rounds with its interval, if there is more than one; `common` holds the row's other fields."""
    bounds: dict[str, Any] = {}
    if len(rounds) > 1:
        low, high = median_interval(rounds)
        bounds = {"low": low, "high": high, "interval": "bootstrap"}
    return Row(**common, **bounds, metric=metric, value=float(median(rounds)), n=len(rounds))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% percentile bootstrap interval of the median; a few slow rounds on a busy machine do not move it far."""
    data = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(values), (_RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
    medians = data[draws].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


class _Counter:
    """Tells the caller's `progress` how far the bench is."""

    def __init__(self, total: int, progress: Progress | None):
        self._total, self._progress, self._done = total, progress, 0

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, what)
        self._done += 1


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _now(model: PreTrainedModel) -> float:
    """Seconds, once everything the device was given is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _check(
    model: PreTrainedModel, policies: Sequence[str], budgets: Sequence[str], counts: dict[str, Sequence[int]]
) -> None:
    for name, values in counts.items():
        if len(values) == 0 or min(values) < 1:
            raise ValueError(f"{name} is {list(values)}; give at least one, each at least 1")
    if not budgets or not policies:
        raise ValueError("no budgets or no policies to measure; give some, such as ['25%', 'full'] and ['tova']")
    for policy, budget in product(policies, budgets):
        if "future" in KVCache(model, policy=policy, budget=str(budget)).policy.needs:
            raise ValueError(f"policy {policy!r} needs a future, which random prompts do not have; choose another")
    if model.config._attn_implementation != "sdpa":
        raise ValueError(
            f"the model is on {model.config._attn_implementation!r} attention, but DynamicCache is measured on 'sdpa': "
            "load with attn_implementation='sdpa', and detach the model"
        )
