"""Slow twins: what the engine must equal, in plain Python lists and loops, one formula a line.

H KV heads, G query heads per KV head, N tokens, D head size. Each works on one sequence; nothing here is taken from
kvkeep.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

# slots


class Token(NamedTuple):
    """One occupied slot; `mark` stands for its key, value and side arrays, and is never used twice."""

    position: int
    mark: int


class PlainSlots:
    """Slots as lists: `heads[row][head]` holds a Token or None (empty) for each slot."""

    def __init__(self, num_rows: int, num_heads: int):
        self.heads: list[list[list[Token | None]]] = [[[] for _ in range(num_heads)] for _ in range(num_rows)]
        self.streams = list(range(num_rows))
        self.holes: list[list[int]] | None = None
        self.capacity = 0

    @property
    def length(self) -> int:
        return len(self.heads[0][0])

    def append(self, new: list[list[list[Token | None]]], room: int) -> None:
        for row, tokens in zip(self.heads, new, strict=True):
            for head, more in zip(row, tokens, strict=True):
                head.extend(more)
        if self.length > self.capacity:
            self.capacity = self.length + room

    def fill(self, new: list[list[list[Token | None]]]) -> None:
        assert self.holes is not None
        for row, tokens, holes in zip(self.heads, new, self.holes, strict=True):
            for head, (token,), hole in zip(row, tokens, holes, strict=True):
                head[hole] = token
        self.holes = None

    def keep(self, index: list[list[list[int]]], blank: list[list[list[bool]]], holes: int) -> None:
        for row, kept, emptied in zip(self.heads, index, blank, strict=True):
            for h, head in enumerate(row):
                survivors = [None if out else head[i] for i, out in zip(kept[h], emptied[h], strict=True)]
                row[h] = [None] * holes + survivors
        self.capacity = self.length
        self.holes = self.last_empty() if holes else None

    def clear(self, index: list[list[int]], where: list[bool] | None) -> None:
        for r, row in enumerate(self.heads):
            for h, head in enumerate(row):
                if where is None or where[r]:
                    head[index[r][h]] = None
        self.holes = index if where is None else self.last_empty()

    def truncate(self, length: int) -> None:
        self.heads = [[head[:length] for head in row] for row in self.heads]

    def select(self, rows: list[int]) -> None:
        self.heads = [[list(head) for head in self.heads[row]] for row in rows]
        self.streams = [self.streams[row] for row in rows]
        self.holes = None if self.holes is None else [list(self.holes[row]) for row in rows]

    def last_empty(self) -> list[list[int]] | None:
        """The last empty slot of each head, or None if some head has none."""
        if not all(None in head for row in self.heads for head in row):
            return None
        return [[max(i for i, token in enumerate(head) if token is None) for head in row] for row in self.heads]


# budgets


def share_of(share: Fraction, num_tokens: int) -> int:
    return math.ceil(share * num_tokens)


# selection


def worth_order(score: Sequence[float], positions: Sequence[int], guarded: Sequence[bool]) -> list[int]:
    """Slots from the one to keep first to the one to drop first."""

    def rank(slot: int) -> tuple[bool, bool, float, int]:
        occupied = positions[slot] >= 0
        # the worth of an empty slot says nothing
        return occupied, guarded[slot], score[slot] if occupied and not guarded[slot] else 0.0, positions[slot]

    return sorted(range(len(score)), key=rank, reverse=True)


def kept_by_sorting(score: Sequence[float], positions: Sequence[int], guarded: Sequence[bool], count: int) -> list[int]:
    """Slots of the tokens that stay, in order of position; empty slots only fill up."""
    kept = [slot for slot in worth_order(score, positions, guarded)[:count] if positions[slot] >= 0]
    return sorted(kept, key=lambda slot: positions[slot])


def victim_by_sorting(score: Sequence[float], positions: Sequence[int], guarded: Sequence[bool]) -> int:
    candidates = [slot for slot in range(len(score)) if positions[slot] >= 0 and not guarded[slot]]
    return min(candidates, key=lambda slot: (score[slot], positions[slot]))


# policies


@dataclass
class Run:
    """One sequence read in pieces, in one layer, with nothing evicted.

    Attributes:
        queries: `[H, G, N, D]` after rotation.
        keys, values: `[H, N, D]`.
        sizes: tokens of each forward; they add up to N.
        ahead: tokens at the end that are a look-ahead.
        options: the policy's settings.
        scale: what products of queries and keys are multiplied by; not D ** -0.5, which some models do not use.
        angle: angles `[D / 2]` by which a step of one position turns each pair of dimensions.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    sizes: tuple[int, ...]
    options: dict[str, Any]
    layer: int = 0
    ahead: int = 0
    angle: Tensor | None = None
    scale: float = 0.5

    @property
    def forwards(self) -> list[range]:
        """Positions of the new tokens of each forward."""
        stops = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        return [range(stop - size, stop) for stop, size in zip(stops, self.sizes, strict=True)]


def attention_of(run: Run, head: int, query: int) -> Tensor:
    """Softmax over the tokens up to `query`, mean over the query heads of the group: `[N]`."""
    weights = torch.zeros(run.keys.shape[1])
    for q in run.queries[head, :, query]:
        logits = run.keys[head, : query + 1] @ q * run.scale
        weights[: query + 1] += logits.softmax(0) / run.queries.shape[1]
    return weights


def per_head(worth: Callable[[Run, int], Tensor]) -> Callable[[Run], Tensor]:
    return lambda run: torch.stack([worth(run, head) for head in range(run.keys.shape[0])])


def random(run: Run, head: int) -> Tensor:
    mask = 2**32 - 1

    def uniform(position: int) -> float:
        seed = run.options["seed"] + 1_000_003 * run.layer
        x = (position * 0x9E3779B1 + head * 0x85EBCA77 + seed * 0xC2B2AE3D) & mask
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 16) * 0xC2B2AE35 & mask
        return ((x ^ x >> 16) >> 8) / 2**24

    return torch.tensor([uniform(position) for position in range(run.keys.shape[1])])


def streaming(run: Run, head: int) -> Tensor:
    return torch.arange(float(run.keys.shape[1]))


def knorm(run: Run, head: int) -> Tensor:
    return torch.tensor([-math.sqrt(sum(x * x for x in key)) for key in run.keys[head].tolist()])


def keydiff(run: Run, head: int) -> Tensor:
    directions = [key / key.norm() for key in run.keys[head]]
    anchor = sum(directions) / len(directions)
    return torch.stack([-(d @ anchor) / anchor.norm() for d in directions])


def lagkv(run: Run, head: int) -> Tensor:
    """Equations (2) to (6) of arXiv 2504.04704, then each token's place in its partition."""
    lag, sinks, N = run.options["lag"], run.options["sinks"], run.keys.shape[1]
    worth = torch.full((N,), 2.0)
    starts = range(sinks, N - 2 * lag + 1, lag)
    for start in starts:
        score = torch.zeros(lag)
        for array in (run.keys[head], run.values[head]):
            part, following = array[start : start + lag], array[start + lag : start + 2 * lag]
            low, high = following.min(0).values, following.max(0).values
            score += ((part - low) / (high - low)).std(1).softmax(0)
        for i in range(lag):
            worth[start + i] = sum(bool(other < score[i]) for other in score) / lag
    return worth


def tova(run: Run, head: int) -> Tensor:
    newest = run.keys.shape[1] - 1
    if not run.options["share_heads"]:
        return attention_of(run, head, newest)
    return sum(attention_of(run, h, newest) for h in range(run.keys.shape[0])) / run.keys.shape[0]


def h2o(run: Run, head: int) -> Tensor:
    decay, norm, N = run.options.get("decay", 1.0), run.options.get("norm", 1.0), run.keys.shape[1]
    worth = torch.zeros(N)
    for query in range(N):
        for member in range(run.queries.shape[1]):
            alone = replace(run, queries=run.queries[:, member : member + 1])
            worth += attention_of(alone, head, query) ** norm * decay ** (N - 1 - query) / run.queries.shape[1]
    return worth


def snapkv(run: Run, head: int) -> Tensor:
    window, reach = run.options["window"], run.options["kernel"] // 2
    worth = torch.zeros(run.keys.shape[1])
    for new in run.forwards:
        observed = list(new)[-window:]
        mass = sum(attention_of(run, head, query) for query in observed) / window
        if len(new) > 1:
            held = mass[: new.stop]
            pooled = [held[max(0, i - reach) : i + reach + 1].max() for i in range(new.stop)]
            mass[: new.stop] = torch.stack(pooled)
        worth = worth * (1 - len(observed) / window) + mass
    return worth


def rotation(angle: Tensor, position: float) -> Tensor:
    """The matrix `[D, D]` that turns dimension i with dimension i + D / 2 by `position * angle[i]`."""
    half = len(angle)
    matrix = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
    for i, a in enumerate(angle.tolist()):
        matrix[i, i] = matrix[half + i, half + i] = math.cos(position * a)
        matrix[half + i, i] = math.sin(position * a)
        matrix[i, half + i] = -math.sin(position * a)
    return matrix


def future_gaussian(run: Run, head: int, member: int, new: range) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the query `horizon` positions after `new` on average, from the queries in `new`."""
    horizon, sinks = run.options["horizon"], run.options["sinks"] if new.stop > run.options["sinks"] else 0
    counted = [t for t in new if t >= sinks]
    plain = torch.stack([rotation(run.angle, -t) @ run.queries[head, member, t].double() for t in counted])
    mean = plain.mean(0)
    covariance = (plain - mean).T @ (plain - mean) / len(counted)
    turn = sum(rotation(run.angle, new.stop + step) for step in range(horizon)) / horizon
    return turn @ mean, turn @ covariance @ turn.T


def expected_attention(run: Run, head: int) -> Tensor:
    keys, size = run.keys[head].double(), run.keys.shape[2]
    norms = run.values[head].norm(dim=1).double()
    group, N = run.queries.shape[1], run.keys.shape[1]
    # before any prompt of more than one token: a Gaussian of zeros
    known = [(torch.zeros(size).double(), torch.zeros(size, size).double(), 0.0) for _ in range(group)]
    worth = torch.zeros(N, dtype=torch.float64)
    for new in run.forwards:
        sinks = run.options["sinks"] if len(new) > 1 and new.stop > run.options["sinks"] else 0
        expected = torch.zeros(N, dtype=torch.float64)
        for member in range(group):
            if len(new) > 1:
                mean, covariance = future_gaussian(run, head, member, new)
            else:
                mean, covariance = known[member][0], torch.diag(known[member][1].diagonal())
            s = run.scale
            logits = torch.stack([k @ mean * s + k @ covariance @ k * s**2 / 2 for k in keys[: new.stop]])
            if len(new) > 1:
                known[member] = mean, covariance, logits[sinks:].exp().sum().log()
            expected[: new.stop] += (logits - known[member][2]).exp() / group
        judged = range(new.stop) if len(new) > 1 else new
        for i in judged:
            worth[i] = (expected[i] + run.options["epsilon"]) * norms[i]
        if sinks:
            worth[:sinks] = worth[sinks : new.stop].max() + 1
    return worth


def read_without(run: Run, head: int, member: int, query: int, gone: Sequence[int]) -> Tensor:
    """What a query head reads of the tokens up to its own that are not gone."""
    seen = [j for j in range(query + 1) if j not in gone]
    logits = run.keys[head, seen].double() @ run.queries[head, member, query].double() * run.scale
    return logits.softmax(0) @ run.values[head, seen].double()


def lost_output(run: Run, head: int, query: int, gone: Sequence[int]) -> float:
    """Squared change of what the query heads read, before their projection, when tokens go."""
    if set(range(query + 1)) <= set(gone):
        return 0.0
    members = range(run.queries.shape[1])
    changes = [read_without(run, head, m, query, gone) - read_without(run, head, m, query, ()) for m in members]
    return sum(float(change.square().sum()) for change in changes)


def guarded_loss(run: Run, head: int, window: Sequence[int], gone: Sequence[int]) -> float:
    """Squared attention to the tokens times the squared distance of what they say from what is kept in any case."""
    total, first_kept = 0.0, window[-1] - run.options["window"] + 1
    for member in range(run.queries.shape[1]):
        rows = torch.zeros(len(window), run.keys.shape[1], dtype=torch.float64)
        for row, query in zip(rows, window, strict=True):
            logits = run.keys[head, : query + 1].double() @ run.queries[head, member, query].double() * run.scale
            row[: query + 1] = logits.softmax(0)
        mass, kept = rows.mean(0), [j for j in range(window[-1] + 1) if j == 0 or j >= first_kept]
        says, instead = (
            mass[tokens] @ run.values[head, tokens].double() / mass[tokens].sum() for tokens in (list(gone), kept)
        )
        total += float(rows[:, list(gone)].sum(1).square().mean() * (says - instead).square().sum())
    return total


def lorekv(run: Run, head: int) -> Tensor:
    """Without futures, and before the output projection."""
    width, chunk, worth = run.options["window"], run.options["chunk"], torch.zeros(run.keys.shape[1])
    for new in run.forwards:
        if len(new) == 1:
            worth[new.start] = lost_output(run, head, new.start, [new.start])
            continue
        window, full = list(new)[-width:], min(width, new.stop)
        old = worth[: new.stop] * (1 - len(window) / full)
        for start in range(0, new.stop, chunk):
            gone = range(start, min(start + chunk, new.stop))
            loss = sum(lost_output(run, head, query, [j for j in gone if j <= query]) for query in window) / full
            least = run.options["guard"] * guarded_loss(run, head, window, gone) * len(window) / full
            worth[list(gone)] = max(loss, least) / len(gone)
        worth[: new.stop] += old
    return worth


def oracle(run: Run, head: int) -> Tensor:
    N = run.keys.shape[1]
    if not run.ahead:
        # what no future was supplied for counts as read once
        return torch.ones(N)
    return sum(attention_of(run, head, query) for query in range(N - run.ahead, N))


def kvp(run: Run, head: int) -> Tensor:
    """Each token as its agent saw it last: at the end of a prompt, or where the length is a multiple of 16."""
    file = run.options["trained"].file
    place = file.layers.index(run.layer) * run.keys.shape[0] + head
    frequencies = file.tensors.get("frequencies", torch.zeros(0))
    agent = {name: tensor[place].float() for name, tensor in file.tensors.items() if name != "frequencies"}
    worth = torch.full((run.keys.shape[1],), torch.finfo(torch.float32).max)
    glance = file.architecture["glance"]
    for number, new in enumerate(run.forwards):
        n = new.stop
        if len(new) == 1 and n % 16:
            continue
        read_by_newest = []
        if glance:
            so_far = replace(run, sizes=run.sizes[: number + 1], options={"window": glance, "kernel": 1})
            received = [snapkv(so_far, head), attention_of(run, head, n - 1)]
            read_by_newest = [(each * n + 1e-3).log() / 3 for each in received]
        for p in range(n):
            at = [p / n, math.log(1 + max(n - 1 - p, 16)) / 14, math.log(1 + p) / 14]
            angles = frequencies * -(p + min(n - 1 - p, file.architecture["sight"]))
            key = turned(run.keys[head, p].float(), angles)
            seen = torch.cat(
                [key, run.values[head, p].float(), torch.tensor(at), *(read[p : p + 1] for read in read_by_newest)]
            )
            hidden = (seen - agent["centre"][0]) / agent["spread"][0]
            for name in ("first", "second"):
                hidden = hidden @ agent[name] + agent[f"{name}_bias"][0]
                hidden = hidden / (1 + (-hidden).exp())
            worth[p] = hidden @ agent["last"][:, 0]
    return worth


def turned(key: Tensor, angles: Tensor) -> Tensor:
    """A key whose first pairs of numbers, halves paired, are turned by so much each."""
    pairs = len(angles)
    first, second, rest = key[:pairs], key[pairs : 2 * pairs], key[2 * pairs :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])


def kvpop(run: Run, head: int) -> Tensor:
    """The static priority of each token that has left the window, the greatest number for the others."""
    file = run.options["trained"].file
    place, shape = file.layers.index(run.layer) * run.keys.shape[0] + head, file.architecture
    net = {name: tensor[place].double() for name, tensor in file.tensors.items()}
    n, memory = run.keys.shape[1], "norm" in net
    hidden, M = shape["hidden"] * (shape["architecture"] != "memory"), shape["memory"] * memory
    tokens = torch.cat([run.keys[head], run.values[head]], 1).double()
    read = (tokens - net["centre"]) / net["spread"] @ net["first"] + net["first_bias"]
    rate = math.log(0.999) + (math.log(0.999999) - math.log(0.999)) / (1 + math.exp(-net["age"].item()))
    worth = torch.full((n,), torch.finfo(torch.float32).max)

    def phi(y: Tensor) -> Tensor:
        return torch.cat([y.softmax(0), (-y).softmax(0)])

    for u in range(n - shape["window"]):
        parts = [read[u, :hidden] * read[u, :hidden].sigmoid()]
        if memory:
            query, top, bottom = phi(read[u, hidden : hidden + M]), torch.zeros(M).double(), 0.0
            for s in range(u + shape["window"] + 1):
                later = read[s + 1 : u + shape["window"] + 1, -1].sigmoid().prod()
                weight = later * read[s, -2].exp() * (query @ phi(read[s, hidden + M : hidden + 2 * M]))
                top, bottom = top + weight * read[s, hidden + 2 * M : hidden + 3 * M], bottom + weight
            h = top / bottom
            h = (h - h.mean()) / (h.var(correction=0) + 1e-5).sqrt() * net["norm"][0, 0] + net["norm"][1, 0]
            parts.append(h * h.sigmoid())
        worth[u] = torch.cat(parts) @ net["last"][:, 0] - u * rate
    return worth


TWINS: dict[str, Callable[[Run], Tensor]] = {
    name: per_head(worth)
    for name, worth in {
        "random": random,
        "streaming": streaming,
        "knorm": knorm,
        "keydiff": keydiff,
        "lagkv": lagkv,
        "tova": tova,
        "h2o": h2o,
        "snapkv": snapkv,
        "pyramidkv": snapkv,
        "expected_attention": expected_attention,
        "kvp": kvp,
        "kvpop": kvpop,
        "kvpop_mlp": kvpop,
        "lorekv": lorekv,
        "qevict": h2o,
        "tiered": h2o,
        "oracle": oracle,
    }.items()
}
