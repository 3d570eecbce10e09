"""The scenarios, each written once for both libraries, and what must come out.

B sequences, H KV heads, N slots, D head size, S tokens.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conversation import Conversation, Library, cache_argument, storage_bytes
from inputs import KEPT, LENGTHS, PROMPT, SHARE, Inputs, same
from torch import Tensor
from transformers import DynamicCache

_NEW = 20
_LONG = 4 * PROMPT
_BEAMS = 4


class Measured(NamedTuple):
    """One number of a scenario; `raw` is what it was worked out from."""

    metric: str
    value: float
    n: int = 1
    raw: Any = None


class Metric(NamedTuple):
    """What a number says, what it must be, and how it is shown: "share", "number" or "tiny"."""

    text: str
    right: str
    kind: str = "number"


class Scenario(NamedTuple):
    """One thing users do, for several policies; those in `real` are also run on a real model."""

    title: str
    run: Callable[[Library, Inputs, str], Iterator[Measured]]
    policies: tuple[str, ...]
    budget: str
    metrics: dict[str, Metric]
    real: tuple[str, ...] = ()


def left_padded_batch(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    rows, batch, mask = inputs.padded()
    options = {"max_new_tokens": _NEW, "min_new_tokens": _NEW}

    def answer(input_ids: Tensor, where: Tensor) -> Tensor:
        conversation = library.start(inputs.model, policy, share=SHARE)
        return conversation.generate(input_ids, where, **options)[:, input_ids.shape[1] :]

    together = answer(batch, mask)
    alone = torch.cat([answer(row, torch.ones_like(row)) for row in rows])
    raw = {"together": together.tolist(), "alone": alone.tolist()}
    yield Measured("same_tokens", same(together, alone), alone.numel(), raw)
    if policy != "full":
        yield from _padding_kept(library, inputs, policy, batch, mask)


def _padding_kept(library: Library, inputs: Inputs, policy: str, batch: Tensor, mask: Tensor) -> Iterator[Measured]:
    """Which tokens the shortest prompt's kept keys belong to is found by the nearest key of the full cache."""
    some, everything = library.start(inputs.model, policy, share=SHARE), library.start(inputs.model, "full")
    for conversation in (some, everything):
        conversation.generate(batch, mask, max_new_tokens=1, min_new_tokens=1)
    row = LENGTHS.index(min(LENGTHS))
    shares = []
    for held, full in zip(some.held(), everything.held(), strict=True):
        nearest = torch.cdist(held.keys[row], full.keys[row]).argmin(-1)
        shares += (mask[row][nearest[held.used[row]]] == 0).tolist()
    yield Measured("padding_kept", sum(shares) / len(shares), len(shares))


def interleaved_conversations(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    answers = torch.cat([inputs.prompt(6, seed) for seed in (2, 3)])

    def turns(number: int) -> Iterator[Tensor]:
        conversation = library.start(inputs.model, policy, share=SHARE)
        yield conversation.read(inputs.prompt(PROMPT, number))
        for token in answers[number]:
            yield conversation.read(token.view(1, 1))

    apart = [list(turns(0)), list(turns(1))]
    together = list(zip(turns(0), turns(1), strict=True))
    differences = [
        float((one - other).abs().max())
        for number in (0, 1)
        for one, other in zip(apart[number], (pair[number] for pair in together), strict=True)
    ]
    yield Measured("logit_difference", max(differences), len(differences), differences)


def second_turn(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    conversation = library.start(inputs.model, policy, tokens=KEPT)
    conversation.read(inputs.prompt(PROMPT))
    first = conversation.kept()
    conversation.read(inputs.prompt(PROMPT, seed=1))
    yield Measured("kept", conversation.kept(), raw={"after_first": first})
    conversation = library.start(inputs.model, policy, tokens=KEPT)
    said = conversation.generate(inputs.prompt(PROMPT), max_new_tokens=_NEW, min_new_tokens=_NEW)
    whole = torch.cat([said, inputs.prompt(PROMPT, seed=1)], 1)
    with _tokens_read(inputs.model) as read:
        conversation.generate(whole, max_new_tokens=1, min_new_tokens=1)
    # the last token of the first answer had not been read yet
    yield Measured("read_again", sum(read) - PROMPT - 1, raw=read)


@contextmanager
def _tokens_read(model: Any) -> Iterator[list[int]]:
    lengths: list[int] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    try:
        yield lengths
    finally:
        hook.remove()


def prompt_lookup(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    prompt = inputs.repetitive(PROMPT)

    def answer(**options: Any) -> Tensor:
        conversation = library.start(inputs.model, policy, tokens=KEPT)
        said = conversation.generate(prompt, max_new_tokens=2 * _NEW, min_new_tokens=2 * _NEW, **options)
        # accepted drafts may go beyond the length asked for
        return said[:, PROMPT : PROMPT + 2 * _NEW]

    greedy, drafted = answer(), answer(prompt_lookup_num_tokens=6)
    raw = {"greedy": greedy.tolist(), "drafted": drafted.tolist()}
    yield Measured("same_tokens", same(greedy, drafted), greedy.numel(), raw)


def beam_search(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    prompt = inputs.prompt(PROMPT)
    beams = library.start(inputs.model, policy, tokens=KEPT).generate(
        prompt,
        num_beams=_BEAMS,
        num_return_sequences=_BEAMS,
        max_new_tokens=_NEW,
        min_new_tokens=_NEW,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    alone = [_score(library.start(inputs.model, policy, tokens=KEPT), prompt, row[PROMPT:]) for row in beams.sequences]
    differences = (torch.tensor(alone) - beams.sequences_scores).abs()
    yield Measured("score_difference", float(differences.max()), _BEAMS, differences.tolist())


def _score(conversation: Conversation, prompt: Tensor, answer: Tensor) -> float:
    """Log probability of an answer, read token by token."""
    logits, total = conversation.read(prompt), 0.0
    for token in answer:
        total += float(logits.log_softmax(-1)[0, token])
        logits = conversation.read(token.view(1, 1))
    return total


def positions_after_eviction(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    conversation = library.start(inputs.model, policy, share=SHARE)
    conversation.read(inputs.prompt(PROMPT))
    with _positions(inputs.model) as seen:
        conversation.call(inputs.prompt(1, seed=1))
    yield Measured("bare_call", seen[-1][0] - PROMPT, raw=seen)
    with _positions(inputs.model) as seen:
        library.start(inputs.model, policy, share=SHARE).generate(inputs.prompt(PROMPT), max_new_tokens=2)
    yield Measured("generate", seen[-1][0] - PROMPT, raw=seen[-1])
    # the pipeline needs a tokenizer
    if inputs.folder is None:
        return
    with _positions(inputs.model) as seen:
        library.pipeline(inputs.model, inputs.folder, inputs.text, policy, SHARE)
    read = sum(len(positions) for positions in seen[:-1])
    yield Measured("pipeline", seen[-1][0] - read, raw={"read": read, "position": seen[-1][0]})


@contextmanager
def _positions(model: Any) -> Iterator[list[list[int]]]:
    """Positions of the tokens of each forward, as the rotation sees them."""
    seen: list[list[int]] = []

    def note(_: Any, given: tuple, named: dict) -> None:
        seen.append((given[1] if len(given) > 1 else named["position_ids"]).flatten().tolist())

    hook = model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def real_bytes(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    prompt = inputs.prompt(_LONG)
    everything = library.start(inputs.model, "full")
    everything.read(prompt)
    full = sum(2 * held.keys.numel() * held.keys.element_size() for held in everything.held())
    conversation = library.start(inputs.model, policy, share=SHARE)
    conversation.read(prompt)
    measured, claimed = storage_bytes(conversation.roots()), conversation.claimed_bytes(full)
    raw = {"full_bytes": full, "measured_bytes": measured, "claimed_bytes": claimed}
    yield Measured("claimed", claimed / full, raw=raw)
    yield Measured("measured", measured / full, raw=raw)


def chunked_prefill(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    conversation = library.start(inputs.model, policy, tokens=KEPT)
    kept = []
    for chunk in inputs.prompt(PROMPT).split(KEPT, dim=1):
        conversation.read(chunk)
        kept.append(conversation.kept())
    yield Measured("kept", max(kept), raw=kept)


def exception_inside(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    model, token = inputs.fresh(), inputs.prompt(1, seed=3)
    # one list for both times: a module that was hung in a second place would else be counted as new
    modules = dict(model.named_modules())
    before = _parts(model, modules)
    bystander = _Bystander(model, inputs.prompt(PROMPT, seed=2))
    expected = bystander.next_logits(token)
    conversation = library.start(model, policy, share=SHARE)
    conversation.read(inputs.prompt(PROMPT))

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    hook = model.model.layers[-1].register_forward_pre_hook(fail)
    with suppress(KeyError):
        conversation.read(token)
    hook.remove()
    left = sorted(_parts(model, modules) - before)
    yield Measured("left_behind", len(left), raw=left)
    yield Measured("logit_difference", float((bystander.next_logits(token) - expected).abs().max()))


def importing(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    yield Measured("replaced", library.replaced)


class _Bystander:
    """A conversation with transformers' own cache, begun before the library is used on the model."""

    def __init__(self, model: Any, prompt: Tensor):
        self._model, self._cache = model, DynamicCache()
        self._argument = cache_argument(model)
        with torch.no_grad():
            model(prompt, **{self._argument: self._cache})

    def next_logits(self, token: Tensor) -> Tensor:
        with torch.no_grad():
            return self._model(token, **{self._argument: deepcopy(self._cache)}).logits[:, -1]


def _parts(model: Any, modules: dict[str, Any]) -> set[str]:
    """Attributes and hooks of `modules`, and the attention chosen."""
    parts = {f"attention: {model.config._attn_implementation}"}
    for name, module in modules.items():
        parts |= {f"{name}.{attribute}" for attribute in {**vars(module), **module._modules}}
        parts |= {f"{name} hook {number}" for number in [*module._forward_hooks, *module._forward_pre_hooks]}
    return parts


def decoding_beyond(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    conversation = library.start(inputs.model, policy, tokens=KEPT)
    conversation.generate(inputs.prompt(PROMPT), max_new_tokens=100, min_new_tokens=100)
    yield Measured("kept", conversation.kept())


def nan_in_keys(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    conversation = library.start(inputs.model, policy, tokens=KEPT)
    with _one_nan_key(inputs.model), _complaints() as said:
        conversation.read(inputs.prompt(PROMPT))
    last = conversation.held()[-1]
    yield Measured("nan_kept", int((last.keys.isnan().any(-1) & last.used).sum()))
    logits = conversation.read(inputs.prompt(1, seed=1))
    yield Measured("finite_logits", float(logits.isfinite().float().mean()), logits.numel())
    yield Measured("warnings", len(said), raw=said)


@contextmanager
def _one_nan_key(model: Any) -> Iterator[None]:
    """The 20th token of the prompt gets a NaN key in the first head of the last layer."""

    def spoil(_: Any, __: Any, keys: Tensor) -> Tensor:
        keys = keys.clone()
        keys[:, 20, : model.config.head_dim] = torch.nan
        return keys

    hook = model.model.layers[-1].self_attn.k_proj.register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Warnings, issued or logged."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(warning.message) for warning in caught]
    finally:
        logging.getLogger().removeHandler(handler)


def saving(library: Library, inputs: Inputs, policy: str) -> Iterator[Measured]:
    prompt, token, elsewhere = inputs.prompt(PROMPT), inputs.prompt(1, seed=1), deepcopy(inputs.model)
    conversation = library.start(inputs.model, policy, share=SHARE)
    conversation.read(prompt)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        conversation.save(path)
        again = conversation.load(path, elsewhere, prompt)
        difference = float((again.read(token) - conversation.read(token)).abs().max())
        yield Measured("logit_difference", difference)
        refused = _refused(conversation, path, elsewhere, prompt, inputs.prompt(PROMPT, seed=1))
    yield Measured("refused", sum(refused.values()), len(refused), refused)


def _refused(conversation: Conversation, path: Path, model: Any, prompt: Tensor, other: Tensor) -> dict[str, bool]:
    """Does loading refuse another text, a file cut in half, and one with a byte changed among its keys?"""
    whole = path.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    cases = {"another text": (whole, other), "cut": (whole[:middle], prompt), "changed": (changed, prompt)}
    refused = {}
    for name, (content, prefix) in cases.items():
        path.write_bytes(content)
        try:
            conversation.load(path, model, prefix)
            refused[name] = False
        except (ValueError, RuntimeError, EOFError, OSError):
            refused[name] = True
    return refused


_SAME = Metric("greedy tokens that are the same", "100%", "share")
_KEPT = Metric("tokens kept", f"≤ {KEPT}")

SCENARIOS = {
    "left_padded_batch": Scenario(
        f"Prompts of {', '.join(map(str, LENGTHS))} tokens as one left-padded batch against each alone, 25% kept",
        left_padded_batch,
        ("full", "knorm", "snapkv", "streaming", "tova"),
        "25%",
        {"same_tokens": _SAME, "padding_kept": Metric("of the shortest prompt's kept slots: padding", "0%", "share")},
        real=("full", "knorm", "snapkv"),
    ),
    "interleaved_conversations": Scenario(
        "Two conversations step by step in turns against each run apart, 25% kept, 7 steps",
        interleaved_conversations,
        ("knorm", "snapkv", "adakv"),
        "25%",
        {"logit_difference": Metric("largest logit difference", "0", "tiny")},
    ),
    "second_turn": Scenario(
        f"A first turn of {PROMPT} tokens ({KEPT} kept), then a second of {PROMPT}",
        second_turn,
        ("knorm", "snapkv", "knorm+decoding"),
        str(KEPT),
        {
            "kept": Metric("tokens kept after the second turn", f"≤ {KEPT}"),
            "read_again": Metric("old tokens that `generate` on the whole conversation reads again", "0"),
        },
        real=("knorm", "knorm+decoding"),
    ),
    "prompt_lookup": Scenario(
        f"Prompt-lookup decoding against greedy decoding, {KEPT} of {PROMPT} kept, {2 * _NEW} new tokens",
        prompt_lookup,
        ("full", "knorm", "snapkv", "knorm+decoding"),
        str(KEPT),
        {"same_tokens": _SAME},
        real=("full", "knorm", "snapkv"),
    ),
    "beam_search": Scenario(
        f"Scores of {_BEAMS} beams against the same answers scored alone, {KEPT} of {PROMPT} kept",
        beam_search,
        ("full", "knorm", "snapkv", "adakv", "knorm+decoding"),
        str(KEPT),
        {"score_difference": Metric("largest difference of log probabilities", "0", "tiny")},
    ),
    "positions_after_eviction": Scenario(
        f"Position of the next token once {KEPT} of {PROMPT} tokens are kept, minus the true one",
        positions_after_eviction,
        ("knorm",),
        "25%",
        {
            "bare_call": Metric("bare `model(token, cache)`", "0"),
            "generate": Metric("`model.generate`", "0"),
            "pipeline": Metric("the library's own highest-level call", "0"),
        },
        real=("knorm",),
    ),
    "real_bytes": Scenario(
        f"Bytes after a prompt of {_LONG} tokens, 25% kept, as a share of the full cache's",
        real_bytes,
        ("knorm", "snapkv", "adakv"),
        "25%",
        {
            "claimed": Metric("claimed by the library", "25%", "share"),
            "measured": Metric("measured on storages", "as claimed", "share"),
        },
        real=("knorm", "adakv"),
    ),
    "chunked_prefill": Scenario(
        f"A prompt of {PROMPT} tokens in chunks of {KEPT}, budget {KEPT}",
        chunked_prefill,
        ("knorm", "snapkv", "knorm+decoding"),
        str(KEPT),
        {"kept": Metric("most tokens kept after any chunk", f"≤ {KEPT}")},
    ),
    "exception_inside": Scenario(
        "An exception in a forward under the library, then a conversation with the stock cache goes on",
        exception_inside,
        ("knorm", "snapkv", "adakv"),
        "25%",
        {
            "left_behind": Metric("attributes and hooks left on the model's modules", "0"),
            "logit_difference": Metric("largest change of the stock conversation's logits", "0", "tiny"),
        },
    ),
    "importing": Scenario(
        "Importing the library",
        importing,
        ("full",),
        "full",
        {"replaced": Metric("attention functions of transformers replaced", "0")},
    ),
    "decoding_beyond": Scenario(
        f"100 new tokens after a prompt of {PROMPT}, budget {KEPT}",
        decoding_beyond,
        ("knorm", "snapkv", "knorm+decoding"),
        str(KEPT),
        {"kept": _KEPT},
    ),
    "nan_in_keys": Scenario(
        f"One NaN key in one head of the last layer, {KEPT} of {PROMPT} kept",
        nan_in_keys,
        ("knorm", "snapkv", "streaming"),
        str(KEPT),
        {
            "nan_kept": Metric("NaN keys kept", "0"),
            "finite_logits": Metric("finite logits of the next token", "100%", "share"),
            "warnings": Metric("warnings about it", "1"),
        },
    ),
    "saving": Scenario(
        "Saved after the prompt, loaded with another copy of the model",
        saving,
        ("knorm", "snapkv", "adakv"),
        "25%",
        {
            "logit_difference": Metric("largest logit difference of the next token", "0", "tiny"),
            "refused": Metric("refused of another text, a cut file, a changed byte", "3"),
        },
    ),
}
