"""What policies miss: their caches beside a full one that reads the same text, step by step.

L managed layers, H KV heads, n tokens so far, P prompt tokens, T tokens behind it, E events.

The full cache says which tokens each query attends to, and the others what they still hold of those: see
`kvkeep.metrics` for the measures. Nothing here grows with steps times tokens.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import CodedAttention
from ..budget import Budget
from ..cache import KVCache
from ..metrics import FutureMass, Revivals, churn, cosine, heaviest, recovered, tier_mass
from ..model import attach, next_logits
from ..policies import POLICIES, Observation, parse
from ..recorder import Item
from .answers import sizes_of
from .rows import Row, bootstrap_ratio, replace_file, write_rows
from .run import FULL, Arm, Progress, arms_of
from .texts import TextSession, begin
from .watching import watched

ORACLE = "oracle"
# where a token may be; sinks are in none of them
TIERS = ("full", "quantized", "gone", "recent")
SINK = -1
_FULL, _QUANTIZED, _GONE, _RECENT = range(len(TIERS))
VIEWS = "views"


# of each token so far, an index into TIERS or SINK
Tiers = Int[Tensor, "L H n"]


class _Event(NamedTuple):
    """What every cache held after `step` tokens behind the prompt."""

    step: int
    tiers: dict[Arm, Tiers]


@dataclass(frozen=True, kw_only=True)
class Events:
    """When caches are asked, and how far what follows counts.

    Attributes:
        omega: tokens between two events, and of a window.
        horizon: tokens behind an event whose attention counts.
        least: events that a token must be out before its return is a rescue.
        within: events within which a rescue must come, for the stricter count.

    Raises:
        ValueError: for numbers below 1.
    """

    omega: int = 8
    horizon: int = 32
    least: int = 4
    within: int = 8

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")


def diagnose(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    model_name: str,
    policies: Sequence[str],
    budgets: Sequence[int | float | str],
    out: Path,
    events: Events | None = None,
    views: int = 0,
    seed: int = 0,
    progress: Progress = lambda done, total, source: None,
    command: str | None = None,
) -> list[Row]:
    """Read texts under every policy at every budget, beside the full cache, and say what each of them misses.

    Finished texts are on disk, in `out`/samples.jsonl, before the next begins, and the same call goes on after them;
    `out`/rows.jsonl is written at the end. Two selections by hindsight are always among them: "oracle" takes at each
    event the tokens, "oracle of windows" the windows that the horizon will read most.

    Args:
        items: prompts and the texts behind them (see `kvkeep.corpus.harvest`).
        policies, budgets: as for `kvkeep.evaluate.run.evaluate`.
        views: texts of which every token's fate under the first budget is kept too, in `out`/views, for the page.
        command: how to run this again, for the rows; None takes this process's command line.

    Returns:
        Rows of future_missed_mass (what neither tier holds), future_missed_mass_full (what full precision does not
        hold), churn, lir, lir_in_time and time_to_revival, each over texts and layers; for policies with codes also
        q_score_cosine and q_score_recovered, of attention seen through the codes against the full cache's.

    Raises:
        ValueError: before any work, for what cannot be measured, and an `out` with samples under other settings.
    """
    events = events or Events()
    session = _Session(
        model=model,
        tokenizer=tokenizer,
        arms=arms_of([name for name in policies if parse(name)[0] != ORACLE], budgets),
        events=events,
        seed=seed,
        views=views,
        folder=out / VIEWS,
    )
    session.check(items)
    measured = session.run(items, out, model_name=model_name, progress=progress, command=command)
    rows = rows_of(measured.records, stamp=measured.stamp)
    write_rows(out / "rows.jsonl", rows)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Session(TextSession):
    events: Events
    # of so many texts every token's fate is kept, there
    views: int
    folder: Path

    @property
    def all_arms(self) -> list[Arm]:
        budgets = dict.fromkeys(arm.budget for arm in self.arms if arm.policy != FULL)
        return [*self.arms, *(Arm(name, budget) for budget in budgets for name in self.oracles)]

    @property
    def oracles(self) -> dict[str, int]:
        """What selections by hindsight are called, and the tokens of a window they select."""
        return {ORACLE: 1, f"{ORACLE} of windows": self.events.omega}

    def check(self, items: Sequence[Item]) -> None:
        for arm in self.arms:
            if len(arm.fresh_cache(self.model, self.seed).managed) == 0:
                raise ValueError("this model has no full-attention layer to look at")
        if not items:
            raise ValueError("there are no texts to read; give some")
        least = self.events.horizon + self.events.omega
        for item in items:
            if item.branches[0].given.shape[1] < least:
                raise ValueError(
                    f"{item.source} {item.name} has {item.branches[0].given.shape[1]} tokens behind its prompt, and "
                    f"{least} are needed for one event with its horizon; give longer texts"
                )

    @property
    def how(self) -> dict[str, Any]:
        return asdict(self.events)

    def read(
        self, items: Sequence[Item], arms: Sequence[Arm], place: int
    ) -> Iterator[tuple[Item, Arm, dict[str, Any]]]:
        [item] = items
        accounts = self._read(item, keep_views=place < self.views)
        texts = {"prompt_tokens": item.num_tokens, "extra": {"tokens": item.branches[0].given.shape[1]}}
        for arm in arms:
            if accounts[arm].keeps_view:
                _write_view(self.folder, arm, self._view(item, accounts[arm]))
            yield item, arm, {**accounts[arm].record(), **texts}

    @torch.inference_mode()
    def _read(self, item: Item, *, keep_views: bool) -> "dict[Arm, _Account]":
        """Read one text through the full cache and all others together."""
        device = self.model.device
        prompt, text = item.token_ids.to(device), item.branches[0].given.to(device)
        accounts = {arm: _Account(self.events, keep_views and self._is_shown(arm)) for arm in self.all_arms}
        full = _FullCache(self.model)
        members = {arm: self._member(arm, accounts[arm]) for arm in self.arms if arm.policy != FULL}
        asked = {Arm(FULL, FULL): full.cache, **members}
        future = FutureMass(self.events.horizon)
        with attach(self.model):
            group, tokens = begin(self.model, asked.values(), prompt, text)
            for step, token in enumerate(tokens.split(1, dim=1), 1):
                next_logits(self.model, group, input_ids=token.expand(len(group.members), -1))
                for mass, event in future.add(full.attention()):
                    for arm, tiers in self._with_oracles(event.tiers, mass).items():
                        accounts[arm].add(event.step, tiers, mass)
                for account in accounts.values():
                    account.compare(full)
                if step % self.events.omega == 0:
                    future.mark(_Event(step, {arm: tiers_of(cache) for arm, cache in asked.items()}))
        for arm, cache in asked.items():
            accounts[arm].sizes = sizes_of(cache)
        return accounts

    def _is_shown(self, arm: Arm) -> bool:
        """Whether the page shows the tokens' fate under an arm."""
        return arm.budget == next((arm.budget for arm in self.arms if arm.policy != FULL), FULL)

    def _member(self, arm: Arm, account: "_Account") -> KVCache:
        cache = arm.fresh_cache(self.model, self.seed)
        if cache.policy.tiers is not None:
            cache.plan.policy = watched(cache.policy, seen=account.look)
        if account.keeps_view:
            cache.plan.policy = watched(cache.policy, scored=account.hear)
        return cache

    def _with_oracles(self, tiers: dict[Arm, Tiers], mass: Float[Tensor, "L H n"]) -> dict[Arm, Tiers]:
        """Beside what caches held, what was best to hold: as many tokens as the cache of that budget with fewest."""
        likes: dict[str, Tiers] = {}
        for arm, held in tiers.items():
            fewest = likes.get(arm.budget)
            if arm.policy != FULL and (fewest is None or _num_chosen(held) < _num_chosen(fewest)):
                likes[arm.budget] = held
        oracles = {
            Arm(name, budget): best_tiers(held, mass, omega)
            for budget, held in likes.items()
            for name, omega in self.oracles.items()
        }
        return {**tiers, **oracles}

    def _view(self, item: Item, account: "_Account") -> dict[str, Any]:
        tokens = [*item.token_ids[0].tolist(), *item.branches[0].given[0].tolist()]
        return {
            "source": item.source,
            "name": item.name,
            "prompt_tokens": item.num_tokens,
            "tokens": [self.tokenizer.decode([token]) for token in tokens],
            **account.view(),
        }


def tiers_of(cache: KVCache) -> Tiers:
    """In which of TIERS each token so far is, SINK for sinks."""
    layers = cache.managed
    H, n = layers[0].holdings()["full"].shape[1], layers[0].get_seq_length()
    tiers = torch.full((len(layers), H, n + 1), _GONE, dtype=torch.int8)
    for codes, layer in zip(tiers, layers, strict=True):
        holdings = layer.holdings()
        # what is held in both is held in full
        for code in (_QUANTIZED, _FULL):
            at = holdings.get(TIERS[code])
            if at is not None:
                # what is empty writes behind the end
                codes.scatter_(1, torch.where(at < 0, n, at)[0].long().cpu(), code)
    tiers = tiers[..., :n].clone()
    tiers[..., n - cache.budget.recent :] = _RECENT
    tiers[..., : cache.budget.sinks] = SINK
    return tiers


def best_tiers(like: Int[Tensor, "L H n"], mass: Float[Tensor, "L H n"], omega: int) -> Int[Tensor, "L H n"]:
    """The windows that got most of the mass, as many tokens as `like` holds, in place of those it chose."""
    places = ((like[0, 0] != SINK) & (like[0, 0] != _RECENT)).nonzero()[:, 0]
    if not len(places):
        return like
    count = _num_chosen(like) // omega
    first, until = int(places[0]), int(places[-1]) + 1
    chosen = heaviest(mass, count, omega=omega, first=first, until=until)
    best = like.clone()
    best[..., first:until] = torch.where(chosen[..., first:until], _FULL, _GONE).to(like.dtype)
    return best


def _num_chosen(tiers: Tiers) -> int:
    """Tokens of a head that a policy holds by choice."""
    return int(((tiers[0, 0] == _FULL) | (tiers[0, 0] == _QUANTIZED)).sum())


class _FullCache:
    """A cache that keeps everything and remembers what the newest token attends to."""

    def __init__(self, model: PreTrainedModel):
        self._received: dict[int, Tensor] = {}
        # a policy is only shown something where something could be evicted
        everything = Budget(tokens=2**30, sinks=Budget.sinks, recent=Budget.recent)
        self.cache = KVCache(model, policy=watched(POLICIES["tova"](), seen=self._hear), budget=everything)

    def _hear(self, seen: Observation) -> None:
        assert seen.attention is not None
        if seen.num_new == 1:
            self._received[seen.layer] = seen.attention.received()[0].cpu()

    def attention(self) -> Float[Tensor, "L H n"]:
        """Softmax of the newest token over all so far, mean over the query heads of each KV head."""
        return torch.stack([self.attention_of(layer.index) for layer in self.cache.managed])

    def attention_of(self, layer: int) -> Float[Tensor, "H n"]:
        """The same of one layer, by its index in the model."""
        return self._received[layer]


class _Account:
    """What one arm missed of one text, summed up event by event."""

    def __init__(self, events: Events, keeps_view: bool):
        self.keeps_view = keeps_view
        self.sizes: dict[str, Any] = {}
        self._revivals = Revivals(least=events.least, within=events.within)
        self._steps: list[int] = []
        # [E] of each layer's and each head's shares of mass by tier
        self._of_layers: list[Tensor] = []
        self._of_heads: list[Tensor] = []
        self._churn: list[Tensor] = []
        self._every = events.omega
        # what the newest token sees through codes, by layer, and sums of how well that agrees with the truth
        self._seen: dict[int, _Coded] = {}
        self._agreement: dict[int, Tensor] = {}
        self._before: Tensor | None = None
        self._moves: list[_Moves] = []
        self._worth: dict[int, Tensor] = {}

    def add(self, step: int, tiers: Int[Tensor, "L H n"], mass: Float[Tensor, "L H n"]) -> None:
        """One event: where each token was, and what it got within the horizon."""
        sums = tier_mass(mass, tiers, len(TIERS))
        self._steps.append(step)
        self._of_layers.append(sums.sum(1) / sums.sum((1, 2))[:, None])
        self._of_heads.append(sums / sums.sum(-1, keepdim=True))
        selected = tiers == _FULL
        self._revivals.add(selected, (tiers != SINK) & (tiers != _RECENT))
        if self._before is not None:
            before = torch.zeros_like(selected)
            before[..., : self._before.shape[-1]] = self._before == _FULL
            self._churn.append(churn(before, selected))
        if self.keeps_view:
            self._moves.append(_moves(len(self._moves), self._before, tiers))
        self._before = tiers

    def hear(self, seen: Observation, worth: Float[Tensor, "1 H N"]) -> None:
        """Remember what each token was last said to be worth."""
        length = int(seen.lengths[0])
        known = self._worth.get(seen.layer)
        grown = worth.new_full((worth.shape[1], length + 1), torch.nan)
        if known is not None:
            grown[:, : known.shape[1] - 1] = known[:, :-1]
        positions = seen.slots.positions[0]
        grown.scatter_(1, torch.where(positions < 0, length, positions).long(), worth[0])
        self._worth[seen.layer] = grown

    def look(self, seen: Observation) -> None:
        """Note what the newest token pays to windows held as codes, at an event."""
        if seen.num_new == 1 and seen.coded is not None and int(seen.lengths[0]) % self._every == 0:
            assert isinstance(seen.coded, CodedAttention)
            tokens = seen.coded.tokens()
            mass = seen.coded.received()[0]
            shape = (*mass.shape, -1)
            at = tokens.positions[0].view(shape)
            self._seen[seen.layer] = _Coded(at, mass, tokens.read[0].view(shape)[..., 0])

    def compare(self, full: "_FullCache") -> None:
        """Hold what was noted against what the full cache's newest token pays to the same windows."""
        for layer, (at, mass, read) in self._seen.items():
            true = full.attention_of(layer)
            true = true.gather(1, at.clamp(min=0).flatten(1).long()).view(at.shape).mean(-1)
            found = torch.stack([cosine(mass, true, read), recovered(mass, true, read)])
            known = ~found.isnan()
            # cosine, share recovered, and heads in which there was something to compare
            sums = torch.cat([found.nan_to_num().sum(1), known[:1].sum(1)])
            self._agreement[layer] = self._agreement.get(layer, 0) + sums
        self._seen.clear()

    def record(self) -> dict[str, Any]:
        """The measured part of a sample."""
        layers, heads = torch.stack(self._of_layers), torch.stack(self._of_heads)
        counts = {name: found.sum(-1) for name, found in self._revivals.counts._asdict().items()}
        churned = torch.stack(self._churn) if self._churn else torch.zeros(1, *heads.shape[1:3])
        missed = layers[..., _GONE].mean(0)
        return {
            "score": float(missed.mean()),
            **self.sizes,
            "layers": {
                "missed": missed.tolist(),
                "missed_full": (layers[..., _GONE] + layers[..., _QUANTIZED]).mean(0).tolist(),
                "churn": churned.mean((0, 2)).tolist(),
                **{name: found.tolist() for name, found in counts.items()},
                **self._agreements(layers.shape[1]),
            },
            "heads": {"missed": _rounded(heads[..., _GONE].mean(0)), "churn": _rounded(churned.mean(0))},
            "tiers": dict(zip(TIERS, layers.mean((0, 1)).tolist(), strict=True)),
            "curve": {
                "step": self._steps,
                "missed": _rounded(layers[..., _GONE].mean(1)),
                "missed_full": _rounded((layers[..., _GONE] + layers[..., _QUANTIZED]).mean(1)),
                "churn": [0.0, *_rounded(churned.mean((1, 2)))][: len(self._steps)],
            },
        }

    def _agreements(self, num_layers: int) -> dict[str, list[float]]:
        """Sums of cosines and shares recovered over events and heads, and how many those are, by layer."""
        sums = [self._agreement[layer] for layer in sorted(self._agreement)] or [torch.zeros(3)] * num_layers
        return dict(zip(("cosine", "recovered", "compared"), torch.stack(sums).T.tolist(), strict=True))

    def view(self) -> dict[str, Any]:
        """Every token's fate in every head, packed: see `docs/diagnose.md`."""
        moves = _Moves(*(torch.cat(parts) for parts in zip(*self._moves, strict=True)))
        # layer by layer and head by head, in order of time
        order = moves.head.argsort(stable=True)
        assert self._before is not None
        L, H, n = self._before.shape
        worth = [self._worth.get(layer, torch.full((H, n + 1), torch.nan))[:, :n] for layer in sorted(self._worth)]
        padded = [torch.nn.functional.pad(one, (0, n - one.shape[1]), value=torch.nan) for one in worth]
        return {
            "steps": self._steps,
            "sinks": int((self._before[0, 0] == SINK).sum()),
            "recent": int((self._before[0, 0] == _RECENT).sum()),
            "heads": H,
            "length": n,
            "starts": [0, *moves.head.bincount(minlength=L * H).cumsum(0).tolist()],
            "token": _packed(moves.token[order].to(torch.int32)),
            "event": _packed(moves.event[order].to(torch.int32)),
            "tier": _packed(moves.tier[order].to(torch.uint8)),
            "worth": _packed(torch.stack(padded).float()) if padded else "",
        }


class _Coded(NamedTuple):
    """Windows held as codes in one layer: positions of their tokens, what each gets, and whether codes are read."""

    positions: Int[Tensor, "H W w"]
    mass: Float[Tensor, "H W"]
    read: Bool[Tensor, "H W"]


class _Moves(NamedTuple):
    """Tokens that changed their tier, each with its head counted over all layers."""

    head: Int[Tensor, " m"]
    token: Int[Tensor, " m"]
    event: Int[Tensor, " m"]
    tier: Int[Tensor, " m"]


def _moves(event: int, before: Int[Tensor, "L H _"] | None, tiers: Int[Tensor, "L H n"]) -> _Moves:
    """What changed since the event before; a token comes in full precision, and is no less for being recent."""
    was, now = torch.full_like(tiers, _FULL), tiers.clone()
    if before is not None:
        was[..., : before.shape[-1]] = before
    for array in (was, now):
        array[(array == _RECENT) | (array == SINK)] = _FULL
    layer, head, token = (was != now).nonzero(as_tuple=True)
    flat = layer * tiers.shape[1] + head
    return _Moves(flat, token, torch.full_like(flat, event), now[layer, head, token].long())


def _packed(array: Tensor) -> str:
    return base64.b64encode(array.contiguous().numpy().tobytes()).decode()


def _rounded(array: Tensor) -> list[Any]:
    return [[round(value, 5) for value in row] if isinstance(row, list) else round(row, 5) for row in array.tolist()]


def _write_view(folder: Path, arm: Arm, view: Mapping[str, Any]) -> None:
    name = hashlib.sha256(f"{view['source']} {view['name']} {arm}".encode()).hexdigest()[:16]
    replace_file(folder / f"{name}.json", json.dumps({**arm._asdict(), **view}).encode())


class Metric(NamedTuple):
    """A row's number: the mean of `shares` over texts and layers, or of `shares` / `over` as a ratio of their sums."""

    name: str
    shares: str
    over: str = ""


METRICS = (
    Metric("future_missed_mass", "missed"),
    Metric("future_missed_mass_full", "missed_full"),
    Metric("churn", "churn"),
    Metric("lir", "rescued", "lasting"),
    Metric("lir_in_time", "in_time", "decided"),
    Metric("time_to_revival", "waits", "rescued"),
    Metric("q_score_cosine", "cosine", "compared"),
    Metric("q_score_recovered", "recovered", "compared"),
)


def rows_of(records: Sequence[Mapping[str, Any]], *, stamp: Mapping[str, Any] | None = None) -> list[Row]:
    """One row for each arm and metric, the full cache's and the oracle's first; none where nothing was counted."""
    groups: dict[Arm, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(Arm(record["policy"], record["budget"]), []).append(record)
    order = sorted(groups, key=lambda arm: (arm.policy != FULL, not arm.policy.startswith(ORACLE)))
    rows = [_row(metric, groups[arm], {**(stamp or {}), **arm._asdict()}) for arm in order for metric in METRICS]
    return [row for row in rows if row is not None]


def _row(metric: Metric, group: Sequence[Mapping[str, Any]], naming: Mapping[str, Any]) -> Row | None:
    shares = [value for record in group for value in record["layers"][metric.shares]]
    over = (
        [value for record in group for value in record["layers"][metric.over]] if metric.over else [1.0] * len(shares)
    )
    if not sum(over):
        return None
    bounds = bootstrap_ratio(shares, over)
    splits = {record["split"] for record in group}
    sizes: dict[str, Any] = {
        name: fmean(record[name] for record in group)
        for name in ("kept", "cache_bytes", "full_bytes")
        if name in group[0]
    }
    return Row(
        **naming,
        **sizes,
        metric=metric.name,
        value=sum(shares) / sum(over),
        low=bounds.low,
        high=bounds.high,
        interval=bounds.method,
        n=len(shares),
        split=splits.pop() if len(splits) == 1 else "",
        seed=group[0]["seed"],
        length=round(fmean(record["prompt_tokens"] + record["extra"]["tokens"] for record in group)),
        extra={
            "texts": len(group),
            "tiers": {tier: fmean(record["tiers"][tier] for record in group) for tier in TIERS},
            **{name: group[0]["settings"][name] for name in asdict(Events())},
        },
    )
