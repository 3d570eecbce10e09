"""KVCache: a transformers cache that evicts.

B sequences, H KV heads, N slots, T new tokens, D head size.
"""

import weakref
from copy import copy, deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from . import saving
from .budget import Budget
from .cache_report import CacheReport, LayerReport
from .fingerprint import fingerprint, head_size, num_kv_heads, refuse_other_model
from .layer import Costs, KVLayer, Plan, slot_costs
from .padding import PaddingWatch
from .policies import Policy, Rotary, make_policy, saved_policy
from .projections import projections
from .tiered_layer import TieredLayer

_FORMAT = 1
_MANAGED = "full_attention"
_SLIDING = "sliding_attention"


class KVCache(Cache):
    """A transformers cache that keeps at most `budget` tokens per KV head, chosen by `policy`.

    Works wherever transformers takes a cache: `model.generate(..., cache=cache)` (`past_key_values=` before
    transformers 5.24), `model(...)`, several turns, chunked prefill. Policies that read queries need
    `kvkeep.attach(model)`; `kvkeep.generate` does that itself.

    Args:
        model: the model, or `model.config` (the same object, not a copy), which needs `kvkeep.attach(model)`.
        policy: name or `Policy`; see `kvkeep.POLICIES`.
        budget: tokens per KV head and layer (512), share of the tokens seen (0.25 or "25%"), bytes of the whole
            cache ("64MiB"), a `Budget`, or None to keep everything.
        sinks: first tokens always kept, inside the budget.
        recent: last tokens always kept, inside the budget.
        schedule: "uniform" or "pyramid"; None takes the policy's own.
        options: further options of the policy, when it is given by name.

    Raises:
        ValueError: for an unknown policy, an impossible budget, or a model with layers that cannot be managed.
    """

    def __init__(
        self,
        model: PreTrainedModel | PretrainedConfig,
        *,
        policy: str | Policy = "streaming",
        budget: Budget | int | float | str | None = None,
        sinks: int = 4,
        recent: int = 16,
        schedule: str | None = None,
        **options: Any,
    ):
        config = model if isinstance(model, PretrainedConfig) else model.config
        config = config.get_text_config(decoder=True)
        chosen = make_policy(policy, **options)
        if not isinstance(budget, Budget):
            budget = Budget.parse(budget, sinks=sinks, recent=recent, schedule=schedule or chosen.schedule)
        rotary = _rotary(model) if "rotary" in chosen.needs and not budget.unlimited else None
        types = _layer_types(config)
        managed = [index for index, kind in enumerate(types) if kind == _MANAGED]
        chosen.check(fingerprint(config), managed)
        self.plan = Plan(config, chosen, budget, len(managed), rotary)
        if "projection" in chosen.needs and not budget.unlimited:
            self.plan.projections = projections(model, managed)
        self._model = None if isinstance(model, PretrainedConfig) else weakref.ref(model)
        if budget.bytes is not None:
            self.plan.check_bytes(_config_costs(config, chosen))
        # the tokens read so far, where kvkeep.prefill or kvkeep.generate read them: they guard a reused cache
        self.token_ids: Tensor | None = None
        layer_kind = KVLayer if chosen.tiers is None or budget.unlimited else TieredLayer
        super().__init__(
            layers=[
                layer_kind(self.plan, index, managed.index(index))
                if kind == _MANAGED
                else DynamicSlidingWindowLayer(sliding_window=config.sliding_window)
                for index, kind in enumerate(types)
            ]
        )
        self._watch_padding()

    @property
    def policy(self) -> Policy:
        return self.plan.policy

    @property
    def budget(self) -> Budget:
        return self.plan.budget

    @property
    def managed(self) -> list[KVLayer]:
        """The layers under the budget; sliding-window layers are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    def length_before_drafts(self) -> int:
        """Tokens still missing of a prompt behind which drafts will be tried; 0 where none are."""
        if self.plan.expected is None or not any(layer.record_past for layer in self.managed):
            return 0
        return max(0, int(self.plan.expected[0]) - self.get_seq_length())

    def __deepcopy__(self, memo: dict) -> "KVCache":
        # one plan for all layers of the copy, none shared with the original
        fork = copy(self)
        memo[id(self.plan)] = fork.plan = copy(self.plan)
        fork.layers = [deepcopy(layer, memo) for layer in self.layers]
        fork._watch_padding()
        return fork

    def _watch_padding(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            PaddingWatch(self, model)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.token_ids = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.token_ids = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.token_ids = None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, : self.get_seq_length()]

    def check_prefix(self, input_ids: Int[Tensor, "B S"]) -> None:
        """Refuse a conversation that does not begin with the tokens this cache has read.

        Raises:
            ValueError: naming the first token that differs.
        """
        seen = self.get_seq_length()
        if input_ids.shape[1] < seen:
            raise ValueError(f"the cache has seen {seen} tokens, but the conversation given has {input_ids.shape[1]}")
        if self.token_ids is None:
            return
        known = self.token_ids.to(input_ids.device)
        if known.shape[0] != input_ids.shape[0]:
            raise ValueError(f"the cache holds {known.shape[0]} sequences, got {input_ids.shape[0]}")
        differs = (known != input_ids[:, : known.shape[1]]).any(0)
        if bool(differs.any()):
            raise ValueError(
                f"the cache was filled with another text: token {int(differs.int().argmax())} differs; give the "
                "conversation it has read, from its first token on, or use a fresh cache"
            )

    def save(self, path: str | Path) -> None:
        """Write everything needed to go on later: slots, positions, state, policy, budget and the tokens read.

        One safetensors file, written whole or not at all. See `KVCache.load`.
        """
        layers, tensors = [], {}
        for index, layer in enumerate(self.layers):
            counters, arrays = layer.state() if isinstance(layer, KVLayer) else _sliding_state(layer)
            layers.append(counters)
            tensors.update({f"{index}.{name}": array for name, array in arrays.items()})
        if self.token_ids is not None:
            tensors["token_ids"] = self.token_ids
        state = {
            "model": fingerprint(self.plan.config),
            "policy": {"name": type(self.policy).__name__, "options": self.policy.settings()},
            "budget": asdict(self.budget),
            "layers": layers,
        }
        saving.write(Path(path), "cache", _FORMAT, state, tensors)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        prefix: Int[Tensor, "B S"] | None = None,
        policy: Policy | None = None,
    ) -> "KVCache":
        """A cache that goes on where the saved one stopped.

        Args:
            model: the model it was made with (another of the same shape and rotation is accepted).
            prefix: tokens it must have read, checked from the first on.
            policy: needed for a policy of your own that is not in POLICIES.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is truncated, changed or too new, or was made with another model or text.
        """
        state, tensors = saving.read(Path(path), "cache", _FORMAT)
        if policy is None:
            policy = _policy_named(state["policy"])
        cache = cls(model, policy=policy, budget=Budget(**state["budget"]))
        refuse_other_model(state["model"], fingerprint(cache.plan.config), path)
        cache.token_ids = tensors.pop("token_ids", None)
        for index, (layer, counters) in enumerate(zip(cache.layers, state["layers"], strict=True)):
            head = f"{index}."
            arrays = {n.removeprefix(head): t.to(model.device) for n, t in tensors.items() if n.startswith(head)}
            if isinstance(layer, KVLayer):
                layer.restore_state(counters, arrays)
            else:
                _restore_sliding(layer, counters, arrays)
        if prefix is not None:
            cache.check_prefix(prefix)
        return cache

    def report(self) -> CacheReport:
        """Tokens seen and kept and measured bytes of every managed layer; printing it gives a table."""
        layers = [
            LayerReport(
                layer.index, layer.seen, layer.slots.kept if layer.slots else 0, layer.nbytes(), layer.num_coded
            )
            for layer in self.managed
        ]
        others = sum(_storage_bytes(layer) for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer))
        return CacheReport(type(self.policy).__name__, str(self.budget), layers, others)

    def __repr__(self) -> str:
        return f"KVCache(policy={self.policy!r}, budget={str(self.budget)!r}, seen={self.managed[0].seen})"


def _layer_types(config: PretrainedConfig) -> list[str]:
    """The type of each layer, refused unless it can be managed or left to transformers."""
    types = getattr(config, "layer_types", None)
    if types is None:
        kind = _SLIDING if getattr(config, "sliding_window", None) else _MANAGED
        types = [kind] * config.num_hidden_layers
    for index, kind in enumerate(types):
        if kind not in (_MANAGED, _SLIDING):
            raise ValueError(
                f"{config.model_type}: layer {index} is of type {kind!r}; kvkeep manages {_MANAGED!r} layers and "
                f"leaves {_SLIDING!r} layers alone, other caches cannot be evicted safely"
            )
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise ValueError(
            f"{config.model_type}: some layers share another layer's keys and values (shared-KV attention); evicting "
            "there would change the other layer too, so the model is refused"
        )
    if _MANAGED not in types:
        raise ValueError(
            f"{config.model_type}: every layer is of type {_SLIDING!r}, which is bounded already; there is nothing "
            "to evict"
        )
    return list(types)


def _policy_named(saved: dict[str, Any]) -> Policy:
    try:
        policy = saved_policy(saved["name"], saved["options"])
    except (ValueError, OSError) as error:
        raise ValueError(f"the file's policy cannot be made again ({error}); pass it as policy=") from error
    if policy is None:
        raise ValueError(f"the file's policy {saved['name']!r} is not one of kvkeep's; pass it as policy=")
    return policy


def _sliding_state(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not layer.is_initialized:
        return {"seen": 0}, {}
    return {"seen": layer.cumulative_length}, {"keys": layer.keys, "values": layer.values}


def _restore_sliding(layer: Any, counters: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    if counters["seen"]:
        layer.lazy_initialization(arrays["keys"], arrays["values"])
        layer.keys, layer.values, layer.cumulative_length = arrays["keys"], arrays["values"], counters["seen"]


def _config_costs(config: PretrainedConfig, policy: Policy) -> Costs:
    heads = num_kv_heads(config)
    size = head_size(config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return slot_costs(heads, config.num_attention_heads // heads, size, size, dtype.itemsize, policy)


def _storage_bytes(layer: DynamicSlidingWindowLayer) -> int:
    return sum(t.untyped_storage().nbytes() for t in (layer.keys, layer.values) if t is not None)


def _rotary(model: PreTrainedModel | PretrainedConfig) -> Rotary:
    """The rotation of the model's full-attention layers, as a function of positions."""
    modules = (
        [] if isinstance(model, PretrainedConfig) else [m for n, m in model.named_modules() if n.endswith("rotary_emb")]
    )
    if not modules:
        raise ValueError(
            f"this policy needs the model's rotary embedding, and none was found on {type(model).__name__}; pass the "
            "model itself to KVCache, or choose another policy"
        )
    module = modules[0]
    # models with several rotations keep them by layer type
    by_type = {"layer_type": _MANAGED} if isinstance(getattr(module, "rope_type", None), dict) else {}

    def rotate(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = module(like, positions, **by_type)
        half = cos.shape[-1] // 2
        if not torch.equal(cos[..., :half], cos[..., half:]):
            raise ValueError(f"{type(module).__name__} interleaves its rotated dimensions, which is not supported here")
        return cos, sin

    return rotate
