"""What vLLM's Prometheus endpoint says of pages: tokens seen, kept and evicted, and bytes of a request."""

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from .settings import Settings

_LABELS = ("model_name", "engine", "policy", "budget")


class Metrics(StatLoggerBase):
    """Counts the tokens of requests that are through; nothing where no policy is set.

    Every KV head keeps as many tokens as the budget says, so what was kept follows from what was seen.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        self._settings = Settings.read()
        if self._settings is None:
            return
        labels = (vllm_config.model_config.served_model_name, engine_index, self._settings.name, self._settings.tokens)
        self._seen, self._kept, self._evicted = (metric.labels(*map(str, labels)) for metric in _counters())
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
            kept = min(seen, self._settings.tokens)
            self._seen.inc(seen)
            self._kept.inc(kept)
            self._evicted.inc(seen - kept)

    def log_engine_initialized(self) -> None:
        """Nothing: vLLM says how many pages there are."""


def request_bytes(config: VllmConfig, settings: Settings) -> int:
    """Bytes that one request holds in all layers, on all workers."""
    model, parallel = config.model_config, config.parallel_config
    shape = settings.page(heads=model.get_num_kv_heads(parallel), head_size=model.get_head_size(), dtype=model.dtype)
    return shape.page_bytes * model.hf_text_config.num_hidden_layers * parallel.tensor_parallel_size


# once a process, however many engines there are
@cache
def _counters() -> tuple[Counter, Counter, Counter]:
    said = {
        "seen": "Tokens that finished requests have read, their own answers included.",
        "kept": "Tokens that each KV head of each layer held when a request finished.",
        "evicted": "Tokens that each KV head of each layer had evicted when a request finished.",
    }
    seen, kept, evicted = (Counter(f"kvkeep:tokens_{name}", text, _LABELS) for name, text in said.items())
    return seen, kept, evicted


@cache
def _request_bytes() -> Gauge:
    return Gauge("kvkeep:request_bytes", "Bytes that one request holds in all layers and workers.", _LABELS)
