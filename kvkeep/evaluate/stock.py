"""transformers' own caches, to be measured beside ours.

B sequences.
"""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, QuantizedCache
from transformers.cache_utils import Cache

DYNAMIC = "DynamicCache"


def _quantized(bits: int) -> Callable[[PretrainedConfig], Cache]:
    return lambda config: QuantizedCache("quanto", config, nbits=bits)


_MAKERS: dict[str, Callable[[PretrainedConfig], Cache]] = {
    DYNAMIC: lambda config: DynamicCache(config=config),
    **{f"QuantizedCache-{bits}": _quantized(bits) for bits in (2, 4)},
}
QUANTIZED = tuple(name for name in _MAKERS if name != DYNAMIC)


def refuse_unknown(names: tuple[str, ...]) -> None:
    """Refuse caches that transformers does not have, and those whose library is missing.

    Raises:
        ValueError: with what there is, or what to install.
    """
    for name in names:
        if name not in QUANTIZED:
            raise ValueError(
                f"{name!r} is no cache of transformers that is measured; choose from {', '.join(QUANTIZED)}"
            )
        if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
            raise ValueError(f"{name} needs optimum-quanto; install it with: pip install optimum-quanto")


def stock_cache(name: str, config: PretrainedConfig) -> Cache:
    """An empty cache of transformers: DynamicCache, or one of `QUANTIZED` with its bits, on quanto."""
    return _MAKERS[name](config.get_text_config(decoder=True))


def repeated(cache: Cache, batch_size: int) -> Cache:
    """A copy with each sequence `batch_size` times. Codes cannot be copied, so what they say is coded anew."""
    if not isinstance(cache, QuantizedCache):
        copied = deepcopy(cache)
        copied.batch_repeat_interleave(batch_size)
        return copied
    copied = copy(cache)
    copied.layers = [_repeated_layer(layer, batch_size) for layer in cache.layers]
    return copied


def _repeated_layer(layer: Any, batch_size: int) -> Any:
    def each(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(batch_size, 0) if tensor.numel() else tensor

    copied = copy(layer)
    copied.keys, copied.values = each(layer.keys), each(layer.values)
    for name, axis in (("_quantized_keys", layer.axis_key), ("_quantized_values", layer.axis_value)):
        plain = each(layer._dequantize(getattr(layer, name)))
        setattr(copied, name, layer._quantize(plain.contiguous(), axis=axis))
    return copied


def tensors_of(cache: Cache) -> Iterator[Tensor]:
    """Every tensor that a cache of transformers stores."""
    layers: list[Any] = cache.layers
    for layer in layers:
        yield from (layer.keys, layer.values)
        for codes in (getattr(layer, "_quantized_keys", None), getattr(layer, "_quantized_values", None)):
            yield from () if codes is None else _parts(codes)


def _parts(codes: Any) -> list[Tensor]:
    """Of quanto's tensors: packed codes, scales and zeros."""
    return [codes._data._data, codes._scale, codes._shift]
