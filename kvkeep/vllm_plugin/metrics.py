"""What vLLM's Prometheus endpoint says of pages: tokens seen, kept and evicted, and bytes of a request."""

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from .pages import PageShape
from .room import Held
from .settings import Settings

_LABELS = ("model_name", "engine", "policy", "budget")


class Metrics(StatLoggerBase):
    """Counts the tokens of requests that are through; nothing where no policy is set.

    How many tokens a KV head keeps follows from how many it has seen; with tiers, where its layer's keys need no more
    bits than were asked for.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        self._settings = Settings.read()
        if self._settings is None:
            return
        labels = (vllm_config.model_config.served_model_name, engine_index, self._settings.name, self._settings.tokens)
        self._counters = {name: metric.labels(*map(str, labels)) for name, metric in _counters().items()}
        self._page = _page(vllm_config, self._settings)
        _request_bytes().labels(*map(str, labels)).set(request_bytes(vllm_config, self._settings))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        *others: Any,
        **further: Any,
    ) -> None:
        """Count what one step of the engine has finished."""
        if self._settings is None or iteration_stats is None:
            return
        for request in iteration_stats.finished_requests:
            # the last token that was written was not read again
            seen = request.num_prompt_tokens + max(0, request.num_generation_tokens - 1)
            held = _held(self._page, self._settings, seen)
            kept = held.full + held.quantized
            counts = {"seen": seen, "kept": kept, "quantized": held.quantized, "evicted": seen - kept}
            for name, counter in self._counters.items():
                counter.inc(counts[name])

    def log_engine_initialized(self) -> None:
        """Nothing: vLLM says how many pages there are."""


def request_bytes(config: VllmConfig, settings: Settings) -> int:
    """Bytes that one request holds in all layers, on all workers."""
    model, parallel = config.model_config, config.parallel_config
    layers = model.hf_text_config.num_hidden_layers
    return _page(config, settings).page_bytes * layers * parallel.tensor_parallel_size


def _page(config: VllmConfig, settings: Settings) -> PageShape:
    model, heads = config.model_config, config.model_config.get_num_kv_heads(config.parallel_config)
    return settings.page(heads=heads, head_size=model.get_head_size(), dtype=model.dtype)


def _held(page: PageShape, settings: Settings, seen: int) -> Held:
    """What each KV head holds of so many tokens."""
    tiers = settings.policy.tiers
    if tiers is None or page.record is None:
        return Held(min(seen, settings.tokens), 0)
    return page.tier_room(tiers, settings.budget, page.record).held(seen)


# once a process, however many engines there are
@cache
def _counters() -> dict[str, Counter]:
    said = {
        "seen": "Tokens that finished requests have read, their own answers included.",
        "kept": "Tokens that each KV head of each layer held when a request finished.",
        "quantized": "Of those, tokens that it held as codes.",
        "evicted": "Tokens that each KV head of each layer had evicted when a request finished.",
    }
    return {name: Counter(f"kvkeep:tokens_{name}", text, _LABELS) for name, text in said.items()}


@cache
def _request_bytes() -> Gauge:
    return Gauge("kvkeep:request_bytes", "Bytes that one request holds in all layers and workers.", _LABELS)
