"""Streaming an answer to the terminal while timing it."""

import time
from typing import Any

from torch import Tensor
from transformers import TextStreamer


class TimedStreamer(TextStreamer):
    """Prints the answer as it comes and keeps the time: of the prompt, and of each token after the first."""

    def __init__(self, tokenizer: Any, *, show: bool):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show
        self._started = time.perf_counter()
        self._tokens: list[float] = []

    def put(self, value: Tensor) -> None:
        # transformers hands over the prompt first, then each token
        if not self.next_tokens_are_prompt:
            self._tokens.append(time.perf_counter())
        else:
            self._started = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._show:
            super().on_finalized_text(text, stream_end)

    @property
    def prefill_seconds(self) -> float:
        """From the prompt to the first token of the answer."""
        return self._tokens[0] - self._started

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None for an answer of one token."""
        if len(self._tokens) < 2:
            return None
        return (len(self._tokens) - 1) / (self._tokens[-1] - self._tokens[0])
