"""The scenarios' conversations in kvpress, by its documented calls.

A press is used as `with press(model):` around every forward and `generate`; new tokens are read at true positions,
which is what KVPressTextGenerationPipeline does. `adakv` is AdaKVPress over SnapKVPress. `knorm+decoding` evicts in
both phases: PrefillDecodingPress with a DecodingPress that compresses after every step.
"""

import importlib.metadata
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from conversation import Conversation, Held, Library, NotThere
from inputs import PROMPT
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_functions = dict(ALL_ATTENTION_FUNCTIONS.items())

import kvpress  # type: ignore[import-not-found]  # noqa: E402

# the default of 64 would fill the whole budget
_WINDOW = 16


class KVPressConversation(Conversation):
    def __init__(self, model: Any, press: Any):
        self.model, self.press = model, press
        self.cache: Any = DynamicCache()
        self.seen = 0

    def read(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(self.seen, self.seen + input_ids.shape[1])[None]
        return self._forward(input_ids, position_ids=positions)

    def call(self, input_ids: Tensor) -> Tensor:
        return self._forward(input_ids)

    def generate(self, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        mask = torch.ones_like(input_ids) if mask is None else mask
        with self._pressing():
            return self.model.generate(
                input_ids, attention_mask=mask, past_key_values=self.cache, do_sample=False, **options
            )

    def held(self) -> list[Held]:
        return [Held(layer.keys, torch.ones(layer.keys.shape[:3], dtype=torch.bool)) for layer in self.cache.layers]

    def kept(self) -> int:
        return max(layer.keys.shape[2] for layer in self.cache.layers)

    def claimed_bytes(self, full: int) -> float:
        return (1 - self.press.compression_ratio) * full

    def roots(self) -> list[Any]:
        masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in self.model.model.layers]
        return [self.cache, masked]

    def save(self, path: Path) -> None:
        torch.save(self.cache, path)

    def load(self, path: Path, model: Any, prefix: Tensor) -> "KVPressConversation":
        again = KVPressConversation(model, self.press)
        again.cache, again.seen = torch.load(path, weights_only=False), prefix.shape[1]
        return again

    def _forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        with self._pressing(), torch.no_grad():
            logits = self.model(input_ids, past_key_values=self.cache, **options).logits
        self.seen += input_ids.shape[1]
        return logits[:, -1]

    def _pressing(self) -> AbstractContextManager:
        return nullcontext() if self.press is None else self.press(self.model)


class KVPress(Library):
    name = "kvpress"
    replaced = sum(ALL_ATTENTION_FUNCTIONS[name] is not before for name, before in _functions.items())

    def versions(self) -> dict[str, str]:
        return {"kvpress": importlib.metadata.version("kvpress")}

    def start(
        self, model: Any, policy: str, *, share: float | None = None, tokens: int | None = None
    ) -> KVPressConversation:
        ratio = 1 - (share if share is not None else (tokens or PROMPT) / PROMPT)
        return KVPressConversation(model, _press(policy, ratio, tokens))

    def pipeline(self, model: Any, folder: Path, text: str, policy: str, share: float) -> None:
        from transformers import AutoTokenizer, pipeline

        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        task: Any = "kv-press-text-generation"
        ask = pipeline(task, model=model, tokenizer=tokenizer)
        ask(text, question="Who?", press=_press(policy, 1 - share, None), max_new_tokens=2)


def _press(policy: str, ratio: float, tokens: int | None) -> Any:
    presses = {
        "full": lambda: None,
        "knorm": lambda: kvpress.KnormPress(ratio),
        "snapkv": lambda: kvpress.SnapKVPress(ratio, window_size=_WINDOW),
        "streaming": lambda: kvpress.StreamingLLMPress(ratio),
        "tova": lambda: kvpress.TOVAPress(ratio),
        "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=_WINDOW)),
        "knorm+decoding": lambda: _both_phases(ratio, tokens),
    }
    return presses[policy]()


def _both_phases(ratio: float, tokens: int | None) -> Any:
    if tokens is None:
        raise NotThere("DecodingPress takes a number of tokens, not a share")
    decoding = kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=1, target_size=tokens)
    return kvpress.PrefillDecodingPress(kvpress.KnormPress(ratio), decoding)
