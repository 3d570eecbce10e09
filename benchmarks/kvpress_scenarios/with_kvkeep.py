"""The scenarios' conversations in kvkeep."""

from pathlib import Path
from typing import Any

import torch
from conversation import Conversation, Held, Library, NotThere, cache_argument
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_functions = dict(ALL_ATTENTION_FUNCTIONS.items())

import kvkeep  # noqa: E402
from kvkeep import KVCache  # noqa: E402

_WINDOW = 16


class KVKeepConversation(Conversation):
    def __init__(self, model: Any, cache: KVCache):
        self.model, self.cache = model, cache

    def read(self, input_ids: Tensor) -> Tensor:
        return kvkeep.prefill(self.model, input_ids, self.cache).logits[:, -1]

    def call(self, input_ids: Tensor) -> Tensor:
        with kvkeep.attach(self.model), torch.no_grad():
            return self.model(input_ids, **{cache_argument(self.model): self.cache}).logits[:, -1]

    def generate(self, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        return kvkeep.generate(self.model, input_ids, cache=self.cache, attention_mask=mask, do_sample=False, **options)

    def held(self) -> list[Held]:
        return [Held(layer.slots.keys, layer.slots.occupied) for layer in self.cache.managed if layer.slots]

    def kept(self) -> int:
        return max(layer.kept for layer in self.cache.report().layers)

    def claimed_bytes(self, full: int) -> float:
        return self.cache.report().bytes

    def roots(self) -> list[Any]:
        return [self.cache.layers]

    def save(self, path: Path) -> None:
        self.cache.save(path)

    def load(self, path: Path, model: Any, prefix: Tensor) -> "KVKeepConversation":
        return KVKeepConversation(model, KVCache.load(path, model, prefix=prefix))


class KVKeep(Library):
    name = "kvkeep"
    replaced = sum(ALL_ATTENTION_FUNCTIONS[name] is not before for name, before in _functions.items())

    def versions(self) -> dict[str, str]:
        return {}

    def start(
        self, model: Any, policy: str, *, share: float | None = None, tokens: int | None = None
    ) -> KVKeepConversation:
        if policy == "adakv":
            raise NotThere("no policy gives KV heads different numbers of tokens")
        if policy == "knorm+decoding":
            raise NotThere("every policy evicts while decoding")
        if policy == "full":
            return KVKeepConversation(model, KVCache(model, budget=None))
        options: dict[str, Any] = {"window": _WINDOW} if policy == "snapkv" else {}
        return KVKeepConversation(model, KVCache(model, policy=policy, budget=share or tokens, **options))

    def pipeline(self, model: Any, folder: Path, text: str, policy: str, share: float) -> None:
        from transformers import AutoTokenizer

        input_ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
        kvkeep.generate(model, input_ids, policy=policy, budget=share, max_new_tokens=2, do_sample=False)
