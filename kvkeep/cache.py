"""KVCache: a transformers cache that evicts.

B sequences, H KV heads, N slots, T new tokens, D head size.
"""

from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from .budget import Budget
from .cache_report import CacheReport, LayerReport
from .layer import Costs, KVLayer, Plan, num_kv_heads, slot_costs
from .policies import Policy, Rotary, make_policy

_MANAGED = "full_attention"
_SLIDING = "sliding_attention"


class KVCache(Cache):
    """A transformers cache that keeps at most `budget` tokens per KV head, chosen by `policy`.

    Works wherever transformers takes a cache: `model.generate(..., cache=cache)` (`past_key_values=` before
    transformers 5.24), `model(...)`, several turns, chunked prefill. Policies that read queries need
    `kvkeep.attach(model)`; `kvkeep.generate` does that itself.

    Args:
        model: the model, or `model.config` (the same object, not a copy).
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
        self.plan = Plan(config, chosen, budget, len(managed), rotary)
        if budget.bytes is not None:
            costs = _config_costs(config, chosen)
            budget.slots_for_bytes(
                torch.zeros(1, dtype=torch.int32), len(managed), slot_bytes=costs.slot, fixed_bytes=costs.fixed
            )
        super().__init__(
            layers=[
                KVLayer(self.plan, index, managed.index(index))
                if kind == _MANAGED
                else DynamicSlidingWindowLayer(sliding_window=config.sliding_window)
                for index, kind in enumerate(types)
            ]
        )

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

    def __deepcopy__(self, memo: dict) -> "KVCache":
        # one plan for all layers of the copy, none shared with the original
        fork = copy(self)
        memo[id(self.plan)] = fork.plan = copy(self.plan)
        fork.layers = [deepcopy(layer, memo) for layer in self.layers]
        return fork

    def report(self) -> CacheReport:
        """Tokens seen and kept and measured bytes of every managed layer; printing it gives a table."""
        layers = [
            LayerReport(layer.index, layer.seen, layer.slots.kept if layer.slots else 0, layer.nbytes())
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


def _config_costs(config: PretrainedConfig, policy: Policy) -> Costs:
    heads = num_kv_heads(config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
