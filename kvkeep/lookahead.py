"""Looking ahead: continuations of a prompt that a policy sees before anything of it is evicted.

B sequences, P sequences that look ahead together, M futures of each, T steps, R = P * M rows of the model, H KV heads,
G query heads per KV head, V tokens of the vocabulary, D head size.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from .branches import Branches, Stem
from .cache import KVCache
from .group import CacheGroup, sequences_of
from .policies import Futures, Look
from .policies.base import hashed_uniform

# logits behind one more token of each row, from the tokens, their positions and the cache of what came before
Read = Callable[[Int[Tensor, "R 1"], Int[Tensor, "R 1"], Branches], Float[Tensor, "R V"]]


class Prompt(NamedTuple):
    """The logits behind what was read, or each row's last token where padding behind it hides its logits."""

    logits: Float[Tensor, "B V"]
    hidden_end: Int[Tensor, " B"] | None


def looks_ahead(cache: KVCache | CacheGroup) -> bool:
    """Whether some eviction waits for a look-ahead."""
    return any(_waits(member) for member in _members(cache))


def look_ahead(cache: KVCache | CacheGroup, prompt: Prompt, read: Read, ends: Collection[int]) -> None:
    """Sample the futures that policies ask for, show them, and let evict what waited for that.

    Draws depend on seed, future and position alone: a prompt has the same futures in any batch, and the caller's random
    numbers are untouched.

    Args:
        read: runs the model.
        ends: tokens with which a future ends.
    """
    for job in _jobs(cache, prompt):
        sampled, start = _sample(cache, job, prompt, read, ends), 0
        for root, viewers in zip(job.roots, job.viewers, strict=True):
            rows = slice(start, start + len(root.places))
            _show_all(viewers, sampled, rows)
            start = rows.stop
    for member in _members(cache):
        for layer in member.managed if _waits(member) else ():
            layer.release()


class _Job(NamedTuple):
    """Futures to sample at once: `look` of each root, for the caches that hold what it holds."""

    look: Look
    roots: list[Stem]
    viewers: list[list[KVCache]]


class _Sampled(NamedTuple):
    """What was read ahead; the first `skipped` tokens are no future, and step t of a future counts while `valid`."""

    branches: Branches
    skipped: int
    valid: Bool[Tensor, "P M T"]
    likelihood: Float[Tensor, "P M T"]
    entropy: Float[Tensor, "P M T"]


def _members(cache: KVCache | CacheGroup) -> list[KVCache]:
    return cache.members if isinstance(cache, CacheGroup) else [cache]


def _waits(member: KVCache) -> bool:
    return any(layer.awaits_future for layer in member.managed)


def _jobs(cache: KVCache | CacheGroup, prompt: Prompt) -> list[_Job]:
    """Caches with equal looks go together; where all have read the same rows, one looks for the others."""
    members = _members(cache)
    each = sequences_of(members[0])
    shared = len(prompt.logits) == each and cache is not members[0]
    alike: dict[Any, list[Stem]] = {}
    for place, member in enumerate(members):
        if _waits(member):
            look = _look(member)
            rows = torch.arange(each) + (0 if shared else place * each)
            alike.setdefault((look.seed, look.greedy) if shared else look, []).append(Stem(member, rows))
    jobs = []
    for stems in alike.values():
        caches = [stem.cache for stem in stems]
        roots, viewers = (stems[:1], [caches]) if shared else (stems, [[member] for member in caches])
        jobs.append(_Job(_largest([_look(member) for member in caches]), roots, viewers))
    return jobs


def _look(member: KVCache) -> Look:
    look = member.policy.look
    assert look is not None
    return look


def _largest(looks: Sequence[Look]) -> Look:
    return looks[0]._replace(futures=max(look.futures for look in looks), steps=max(look.steps for look in looks))


def _sample(cache: KVCache | CacheGroup, job: _Job, prompt: Prompt, read: Read, ends: Collection[int]) -> _Sampled:
    look, again = job.look, prompt.hidden_end is not None
    branches = Branches(cache, job.roots, num=look.futures, room=look.steps + again, hides_last=again)
    places = torch.cat([stem.places for stem in job.roots]).repeat_interleave(look.futures).to(prompt.logits.device)
    at = torch.cat([stem.lengths for stem in job.roots])[:, None, None].repeat(1, look.futures, 1)
    if prompt.hidden_end is None:
        logits = prompt.logits[places]
    else:
        logits = read(prompt.hidden_end[places, None], at.view(-1, 1) - 1, branches)
    steps = []
    for _ in range(look.steps):
        step = draw(logits.float(), None if look.greedy else hashed_uniform(at, look.seed).view(-1))
        logits = read(step.tokens[:, None], at.view(-1, 1), branches)
        at = at + 1
        steps.append(step)
    tokens, likelihood, entropy = (
        torch.stack(parts, 1).unflatten(0, (-1, look.futures)) for parts in zip(*steps, strict=True)
    )
    ended = torch.isin(tokens, torch.tensor(sorted(ends), dtype=tokens.dtype, device=tokens.device))
    return _Sampled(branches, int(again), ~ended.cummax(-1).values, likelihood, entropy)


class Step(NamedTuple):
    """One token of each row, its log probability plus the entropy of what it was drawn from, and that entropy."""

    tokens: Int[Tensor, " R"]
    likelihood: Float[Tensor, " R"]
    entropy: Float[Tensor, " R"]


def draw(logits: Float[Tensor, "R V"], uniform: Float[Tensor, " R"] | None) -> Step:
    """The token at which the cumulated probabilities pass a uniform number, or the likeliest one."""
    logs = logits.log_softmax(-1)
    tokens = logs.argmax(-1)
    if uniform is not None:
        # fp64: in fp32 so many small numbers do not add up to one
        reached = logs.double().exp().cumsum(-1)
        drawn = torch.searchsorted(reached, uniform.double()[:, None] * reached[:, -1:], right=True)[:, 0]
        tokens = drawn.clamp(max=logits.shape[-1] - 1)
    entropy = torch.special.entr(logs.exp()).sum(-1)
    return Step(tokens, logs.gather(1, tokens[:, None])[:, 0] + entropy, entropy)


def _show_all(viewers: Sequence[KVCache], sampled: _Sampled, rows: slice) -> None:
    """Show every cache the futures `rows`; what one policy finds is found once, whatever the budgets."""
    first: dict[Any, KVCache] = {}
    for viewer in viewers:
        layers = tuple(layer.index for layer in viewer.managed if layer.awaits_future)
        other = first.setdefault((viewer.policy, layers), viewer)
        if other is viewer:
            _show(viewer, sampled, rows)
            continue
        for layer, known in zip(viewer.managed, other.managed, strict=True):
            layer.foresee_as(known)


def _show(member: KVCache, sampled: _Sampled, rows: slice) -> None:
    """Show a policy the futures `rows` of what was sampled, as many and as far as it wants."""
    look, skipped = _look(member), sampled.skipped
    cut = (rows, slice(look.futures), slice(look.steps))
    valid, likelihood, entropy = (part[cut] for part in (sampled.valid, sampled.likelihood, sampled.entropy))
    queries = [
        sampled.branches.queries(layer.index)[rows, : look.futures, :, skipped : skipped + look.steps]
        for layer in member.managed
    ]
    count = valid.sum(-1).clamp(min=1)
    trust = member.policy.trust(
        (likelihood * valid).sum(-1) / count, (entropy * valid).sum(-1) / count, _disagreement(queries, valid)
    )
    # what is no number says nothing about any future
    trust = torch.where(trust.isfinite(), trust, 1.0) * valid.any(-1)
    shares = trust / trust.sum(-1, keepdim=True).clamp(min=torch.finfo(trust.dtype).tiny)
    weights = ((shares / count)[..., None] * valid).flatten(1)
    for layer, seen in zip(member.managed, queries, strict=True):
        if layer.awaits_future:
            layer.foresee(Futures(seen.transpose(1, 2).flatten(2, 3), weights))


def _disagreement(queries: Sequence[Float[Tensor, "P M HG T D"]], valid: Bool[Tensor, "P M T"]) -> Float[Tensor, "P M"]:
    """1 - cosine of a future's query and another's at the same step, mean over others, heads, layers and steps."""
    counted = valid[:, :, None, :, None]
    others = valid.sum(1, keepdim=True) - valid.int()
    total = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
    for layer in queries:
        unit = normalize(layer.float(), dim=-1) * counted
        agreement = (unit * (unit.sum(1, keepdim=True) - unit)).sum(-1).mean(2)
        total += 1 - agreement / others.clamp(min=1)
    compared = valid & (others > 0)
    return (total * compared).sum(-1) / compared.sum(-1).clamp(min=1) / len(queries)
