"""What a model tells a cache when it is not attached: whether the tokens that come hold padding."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from .cache import KVCache


class PaddingWatch:
    """A forward hook on `model` that refuses padding for one cache, as long as the cache lives.

    transformers hands a cache its keys without the padding mask. On an attached model the attention function reads
    the mask; on any other this hook does, and vouches for the tokens of the call (`plan.vouched`).
    """

    def __init__(self, cache: "KVCache | None", model: nn.Module | None = None):
        self._cache = (lambda: None) if cache is None else weakref.ref(cache)
        if cache is not None and model is not None:
            handle = model.register_forward_pre_hook(self, with_kwargs=True)
            weakref.finalize(cache, handle.remove)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = self._cache()
        given = [*args, *kwargs.values()]
        if cache is None or cache.plan.attached or not any(value is cache for value in given):
            return
        _refuse_padding(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
        cache.plan.vouched = cache.get_seq_length()

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy of the model, in memory or on disk, is not called with this cache
        return type(self), (None,)


def _refuse_padding(mask: Any) -> None:
    if isinstance(mask, Tensor) and not (mask.ndim == 2 and bool(mask.all())):
        raise ValueError(
            f"this attention mask of shape {tuple(mask.shape)} holds padding (or is no padding mask), which a cache "
            "cannot follow on a model that is not attached: call kvkeep.attach(model) first, or use kvkeep.generate, "
            "which does"
        )
