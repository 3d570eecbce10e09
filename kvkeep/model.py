"""Running a model through a KVCache: the attention registered with transformers, attach, prefill and generate.

B sequences, H KV heads, G query heads per KV head, T new tokens, S tokens seen, D head size,
V tokens of the vocabulary.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .branches import Branches
from .budget import Budget
from .cache import KVCache
from .group import CacheGroup
from .layer import ATTENTION_NAME
from .lookahead import Prompt, look_ahead, looks_ahead
from .policies import Policy

# attention options that change the softmax or its mask; slots know nothing of them
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


# what slots hold changes from token to token: a compiled model calls this as it is
@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of an attached model.

    Keys that a KVCache handed out carry their layer, which then attends and evicts. Any other call (no cache,
    another cache, sliding-window layers) is transformers' own sdpa attention.
    """
    layer = getattr(key, "_kvkeep_layer", None)
    if layer is None:
        mask = attention_mask
        if mask is not None and mask.ndim == 2:
            mask = _causal_mask(mask, query.shape[2], key.shape[2])
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    _refuse_unsupported(module, attention_mask, dropout, kwargs)
    valid = None if attention_mask is None else attention_mask[:, -query.shape[2] :]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = layer.attend(query, key, value, valid, scale)
    return output.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of an attached model: which tokens so far are no padding, `[B, S]`, or None if all are.

    Slots carry true positions, so causality needs no map. Patterns other than plain causal ones get transformers'
    own mask.
    """
    if mask_function is causal_mask_function:
        if attention_mask is None:
            return None
        so_far = attention_mask[:, : int(q_offset) + q_length]
        return None if bool(so_far.all()) else so_far
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


class _Attachments:
    """Which models are attached, how often, and what to put back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list]] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()

    def add(self, model: PreTrainedModel) -> None:
        with self._lock:
            count, before = self._held.get(model, (0, []))
            if count == 0:
                before = [(config, config._attn_implementation) for config in _configs(model)]
                model.set_attn_implementation(ATTENTION_NAME)
                # whoever else hooks the model finds its caches within their budgets
                self._hooks[model] = (
                    model.register_forward_pre_hook(_read_prompt_before_drafts, with_kwargs=True),
                    model.register_forward_hook(_after_forward, with_kwargs=True, prepend=True),
                )
            self._held[model] = (count + 1, before)

    def drop(self, model: PreTrainedModel) -> None:
        with self._lock:
            count, before = self._held.pop(model, (0, []))
            if count > 1:
                self._held[model] = (count - 1, before)
                return
            for config, implementation in before:
                config._attn_implementation_internal = implementation
            for hook in self._hooks.pop(model, ()):
                hook.remove()


_attachments = _Attachments()


class Attachment:
    """One `attach`: undone by `detach()` or by leaving the with-block, once."""

    def __init__(self, model: PreTrainedModel):
        self._model: PreTrainedModel | None = model
        _attachments.add(model)

    def detach(self) -> None:
        """Give the model its own attention back, unless another attachment still holds it."""
        model, self._model = self._model, None
        if model is not None:
            _attachments.drop(model)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def attach(model: PreTrainedModel) -> Attachment:
    """Let policies see the queries of `model`: its attention runs through transformers' AttentionInterface as ours.

    Calls without a KVCache stay transformers' sdpa attention. Attaching twice is harmless; the model is as before
    when every attachment is detached.

    >>> with kvkeep.attach(model):
    ...     model.generate(**inputs, cache=KVCache(model, policy="tova", budget=512))

    Raises:
        ValueError: for a model whose attention does not go through AttentionInterface.
    """
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not route its attention through transformers' AttentionInterface, so it "
            "cannot be attached; policies that read keys and values alone work without"
        )
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
    return Attachment(model)


def prefill(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    cache: KVCache,
    *,
    attention_mask: Int[Tensor, "B S"] | None = None,
    chunk: int | None = None,
    future: Int[Tensor, "B F"] | None = None,
) -> Any:
    """Read a prompt into `cache` and evict down to its budget.

    Args:
        input_ids: the new tokens only; what the cache has seen stays in it.
        attention_mask: 1 for tokens, 0 for padding, over everything seen and the new tokens.
        chunk: tokens per forward. Memory then peaks at budget + chunk; the budget holds after every forward, and a
            share counts the whole prompt from the start.
        future: tokens that will follow, for the oracle alone: they are read, looked at and taken back.

    Returns:
        The model's output for the last chunk, with logits of the last token only.

    Raises:
        ValueError: for an empty prompt, or a policy that needs a future and got none.
    """
    _check_prompt(input_ids, chunk)
    fresh = cache.get_seq_length() == 0
    if fresh and "future" in cache.policy.needs and future is None and not cache.budget.unlimited:
        raise ValueError(f"{type(cache.policy).__name__} needs the future: pass future=, the tokens that will follow")
    mask = _full_mask(cache, input_ids, attention_mask)
    token_ids = _joined(cache, input_ids)
    with attach(model), expecting(cache, mask), torch.no_grad():
        if future is None:
            output = _forward(model, input_ids, cache, mask, chunk)
        else:
            with _holding(cache):
                output = _forward(model, input_ids, cache, mask, chunk)
                with _looking_ahead(cache):
                    _forward(model, future, cache, torch.cat([mask, torch.ones_like(future)], dim=1), None)
    cache.token_ids = token_ids
    return output


def generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B S"],
    *,
    cache: KVCache | None = None,
    policy: str | Policy = "streaming",
    budget: Budget | int | float | str | None = None,
    attention_mask: Int[Tensor, "B S"] | None = None,
    chunk: int | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate` through an evicting cache, attached for the call.

    Args:
        input_ids: the whole conversation, as transformers expects; a cache that has seen its beginning skips that.
        cache: a cache to go on with; else a fresh one is made from `policy` and `budget`.
        attention_mask: 1 for tokens, 0 for padding, on either side.
        chunk: tokens per forward of the prompt; memory then peaks at budget + chunk.
        kwargs: everything else goes to `model.generate`.

    Returns:
        What `model.generate` returns. Rows padded on the right come back padded on the left.
    """
    _check_prompt(input_ids, chunk)
    cache = KVCache(model, policy=policy, budget=budget) if cache is None else cache
    fresh = cache.get_seq_length() == 0
    if fresh and "future" in cache.policy.needs and not cache.budget.unlimited:
        raise ValueError(f"{type(cache.policy).__name__} needs the future: call kvkeep.prefill(..., future=...) first")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    elif fresh:
        input_ids, attention_mask = _pad_left(input_ids, attention_mask)
    cache.check_prefix(input_ids)
    if chunk is not None:
        kwargs["prefill_chunk_size"] = chunk
    kwargs[cache_argument(model)] = cache
    with attach(model), expecting(cache, attention_mask), _answering(cache):
        output = model.generate(input_ids, attention_mask=attention_mask, **kwargs)  # type: ignore[operator]
    sequences = output if isinstance(output, Tensor) else output.sequences
    # beams and several samples of a prompt have moved the rows
    one_each = sequences.shape[0] == input_ids.shape[0] and kwargs.get("num_beams", 1) == 1
    cache.token_ids = sequences[:, : cache.get_seq_length()].cpu() if one_each else None
    return output


def next_logits(model: PreTrainedModel, cache: Cache, **inputs: Any) -> Float[Tensor, "B V"]:
    """Logits behind the last of the tokens that `inputs` name, read through `cache`."""
    return model(**inputs, logits_to_keep=1, **{cache_argument(model): cache}).logits[:, -1]


def cache_argument(model: PreTrainedModel) -> str:
    """What this transformers release calls the cache: "cache", or "past_key_values" before 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _read_prompt_before_drafts(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook before the forward: drafts that come in one call with the prompt wait until the prompt is evicted."""
    cache = _our_cache(args, kwargs)
    if not isinstance(cache, KVCache) or cache.plan.policy.look is None or "input_ids" not in kwargs:
        return None
    length, drafts = cache.length_before_drafts(), kwargs["input_ids"].shape[1]
    if not 0 < length < drafts:
        return None
    seen = cache.get_seq_length()
    stops = {"input_ids": length, "position_ids": length, "attention_mask": seen + length}
    given = {name: stop for name, stop in stops.items() if kwargs.get(name) is not None}
    prompt = {**kwargs, "logits_to_keep": 1} | {name: kwargs[name][:, :stop] for name, stop in given.items()}
    cache.plan.prompt_logits = model(*args, **prompt).logits
    rest = {name: kwargs[name][:, stop:] for name, stop in given.items() if name != "attention_mask"}
    return args, {**kwargs, **rest}


@torch.no_grad()
def _after_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """A hook after the forward: a policy that asks for the future sees it once the prompt is read, and then evicts."""
    cache = _our_cache(args, kwargs)
    if isinstance(cache, KVCache) and cache.plan.prompt_logits is not None:
        output.logits = torch.cat([cache.plan.prompt_logits, output.logits], dim=1)
        cache.plan.prompt_logits = None
    if cache is None or not looks_ahead(cache):
        return
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if not hasattr(output, "logits"):
        raise RuntimeError(
            f"looking ahead needs the logits of {type(model).__name__}: attach the model that has them, and leave "
            "return_dict as it is"
        )

    def read(tokens: Tensor, positions: Tensor, branches: Branches) -> Tensor:
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": branches.mask(mask)}
        return next_logits(model, branches, **inputs)

    prompt = Prompt(output.logits[:, -1], _hidden_end(input_ids, mask))
    look_ahead(cache, prompt, read, end_tokens(model))


def _our_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KVCache | CacheGroup | None:
    found = (value for value in (*args, *kwargs.values()) if isinstance(value, KVCache | CacheGroup))
    return next(found, None)


def _hidden_end(input_ids: Int[Tensor, "B T"] | None, mask: Int[Tensor, "B S"] | None) -> Int[Tensor, " B"] | None:
    """The last token of each row where padding follows in some row, so that the last logits are not those behind it."""
    if mask is None or input_ids is None or bool(mask[:, -1].all()):
        return None
    new = mask[:, -input_ids.shape[1] :].long()
    last = (new * torch.arange(1, new.shape[1] + 1, device=new.device)).argmax(1, keepdim=True)
    return input_ids.gather(1, last)[:, 0]


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Tokens that end what the model writes."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def _forward(model: PreTrainedModel, input_ids: Tensor, cache: KVCache, mask: Tensor, chunk: int | None) -> Any:
    seen = mask.shape[1] - input_ids.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = None
    for start in range(0, input_ids.shape[1], chunk or input_ids.shape[1]):
        stop = min(start + (chunk or input_ids.shape[1]), input_ids.shape[1])
        output = model(
            input_ids=input_ids[:, start:stop],
            attention_mask=mask[:, : seen + stop],
            position_ids=positions[:, seen + start : seen + stop],
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
    return output


@contextmanager
def expecting(cache: KVCache, mask: Tensor) -> Iterator[None]:
    """Where the prompt ends: a share counts all of it from its first chunk on, and drafts begin behind it."""
    cache.plan.expected = mask.sum(1).cpu()
    cache.plan.reads_prompt = mask.shape[1] - cache.get_seq_length() > 1
    cache.plan.forget_limits()
    try:
        yield
    finally:
        cache.plan.expected = None
        cache.plan.forget_limits()
        for layer in cache.managed:
            layer.stop_recording()


@contextmanager
def _answering(cache: KVCache) -> Iterator[None]:
    """What is written behind the prompt stays, and may be the future that a policy asks for."""
    cache.plan.answering = True
    try:
        yield
    finally:
        cache.plan.answering = False
        for layer in cache.managed:
            layer.finish_answer()


@contextmanager
def _holding(cache: KVCache) -> Iterator[None]:
    """Hold evictions back until the block is left."""
    cache.plan.holding = True
    try:
        yield
    finally:
        cache.plan.holding = False
    for layer in cache.managed:
        layer.release()


@contextmanager
def _looking_ahead(cache: KVCache) -> Iterator[None]:
    """Tokens read inside are shown to the policy as a look-ahead and taken back at the end."""
    seen = cache.get_seq_length()
    sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    cache.plan.ahead = True
    for layer in sliding:
        layer.activate_past_recording()
    try:
        yield
    finally:
        cache.plan.ahead = False
        cache.crop(seen - cache.get_seq_length())
        for layer in sliding:
            layer.record_past = False


def _refuse_unsupported(module: torch.nn.Module, mask: Tensor | None, dropout: float, kwargs: dict) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses {name!r} in its attention, which kvkeep does not support yet"
            )
    if kwargs.get("output_attentions"):
        raise ValueError("attention maps are never built here; drop output_attentions=True or use the stock cache")
    if module.training and torch.is_grad_enabled():
        raise ValueError("no gradients flow through an evicting cache; call model.eval(), or train without a cache")
    if dropout:
        raise ValueError("attention dropout makes eviction meaningless; call model.eval() first")
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} cannot follow evicted slots; pass the 2D padding mask"
        )


def _causal_mask(padding: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """transformers' own causal mask for a padding mask, `[B, 1, T, N]`."""
    return sdpa_mask(  # type: ignore[return-value]
        batch_size=padding.shape[0],
        q_length=num_queries,
        kv_length=num_keys,
        q_offset=num_keys - num_queries,
        attention_mask=padding,
        allow_is_causal_skip=False,
        device=padding.device,
    )


def _joined(cache: KVCache, input_ids: Tensor) -> Tensor | None:
    """The tokens read once `input_ids` are, None where the earlier ones are not known."""
    if cache.get_seq_length() == 0:
        return input_ids.cpu()
    known = cache.token_ids
    return None if known is None or known.shape[0] != input_ids.shape[0] else torch.cat([known, input_ids.cpu()], 1)


def _full_mask(cache: KVCache, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    total = cache.get_seq_length() + input_ids.shape[1]
    if mask is None:
        return torch.ones(input_ids.shape[0], total, dtype=torch.long, device=input_ids.device)
    if mask.shape[1] != total:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens, but the cache has seen {total - input_ids.shape[1]} and "
            f"{input_ids.shape[1]} are new: it must cover {total}"
        )
    return mask.long()


def _pad_left(input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding to the left, where the last column is every row's last token."""
    order = mask.long().argsort(dim=1, stable=True)
    return input_ids.gather(1, order), mask.gather(1, order)


def _check_prompt(input_ids: Tensor, chunk: int | None) -> None:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"the prompt is empty or not [batch, tokens]: got shape {tuple(input_ids.shape)}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")


def _configs(model: PreTrainedModel) -> list:
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    for config in list(configs.values()):
        for name in getattr(config, "sub_configs", {}):
            part = getattr(config, name, None)
            if part is not None:
                configs[id(part)] = part
    return list(configs.values())
