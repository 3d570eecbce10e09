"""A vLLM engine in a process of its own, so that engines with and without a policy can be measured side by side."""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .settings import BUDGET, POLICY, Settings

# one process an engine, and no pinning of threads: several share the machine
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


class Answers(NamedTuple):
    """What an engine wrote behind each prompt, and how long it took for all of them, in seconds."""

    tokens: list[list[int]]
    seconds: float


class Engine:
    """A vLLM engine, until it is closed.

    Args:
        model: a folder of transformers.
        settings: the policy and budget; None is vLLM as it is.
        options: arguments of `vllm.LLM`.
        environment: further variables.

    Raises:
        RuntimeError: with what vLLM said, where it does not start or fails.
    """

    def __init__(
        self,
        model: str,
        settings: Settings | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        variables = _ENVIRONMENT | (settings.environment() if settings else {}) | dict(environment or {})
        self._process = context.Process(target=_serve, args=(theirs, model, variables, options), daemon=False)
        self._process.start()
        theirs.close()
        self.info: dict[str, Any] = self._answer()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(timeout=30)
        self._process.kill()

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Answers:
        """The likeliest tokens behind each prompt, ends of text included."""
        self._connection.send((list(map(list, prompts)), max_new_tokens))
        return Answers(*self._answer())

    def _answer(self) -> Any:
        try:
            failed, answer = self._connection.recv()
        except EOFError:
            failed, answer = True, "its process ended"
        if failed:
            self._process.join(timeout=30)
            raise RuntimeError(f"the engine failed: {answer}")
        return answer


def _serve(connection: Connection, model: str, variables: Mapping[str, str], options: dict[str, Any]) -> None:
    for name in (POLICY, BUDGET):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        from vllm import LLM, SamplingParams

        llm = LLM(model, **options)
        config = llm.llm_engine.vllm_config
        cache = config.cache_config
        connection.send((False, {"blocks": cache.num_gpu_blocks, "max_concurrency": cache.kv_cache_max_concurrency}))
        while (asked := connection.recv()) is not None:
            prompts, limit = asked
            sampling = SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            connection.send((False, ([list(output.outputs[0].token_ids) for output in outputs], seconds)))
    except Exception as error:
        connection.send((True, f"{type(error).__name__}: {error}"))
        raise
