"""What agreement with the full cache could be, if it were known what later tokens read.

    python benchmarks/hindsight.py --data text:data/haystack/great_expectations_1400-0.txt --out results/kvpop/hindsight

Long test texts are read once in full, and what every query pays to every token is noted, in blocks of queries. Then
they are read under budgets by policies that have the notes: "teacher" keeps for good what KVpop's teacher does, by the
mean of all later attention; "hindsight(h)" keeps at every moment what the tokens yet to come read most, each step
further away counting less, half after h tokens. Other policies read beside them. One row for each policy, budget and
metric.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import kvkeep
from kvkeep import KVCache
from kvkeep.corpus import Reading, harvest
from kvkeep.evaluate.agreement import compare, predictions
from kvkeep.evaluate.rows import manifest, mean_row, write_rows
from kvkeep.future import future_importance
from kvkeep.layer import StandIn
from kvkeep.model import attach, next_logits
from kvkeep.policies import Policy
from kvkeep.policies.base import Observation
from kvkeep.target import mean_later, target

# queries whose attention is noted as one sum
BLOCK = 64
METRICS = {"kl_to_full": "kl", "top1_agreement": "top1"}


class _Notes(StandIn):
    """Reads on in a layer of a full cache and notes what a whole text's queries pay, as `[H, n]` for each block."""

    def __init__(self, layer: Any, delay: int):
        super().__init__(layer)
        self.delay = delay
        self.later, self.blocks = torch.empty(0), torch.empty(0)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scale: float) -> Tensor:
        self.later = target(mean_later(queries, keys, scale, self.delay)[0])
        starts = range(0, keys.shape[2], BLOCK)
        parts = zip(starts, queries.split(BLOCK, 2), strict=True)
        self.blocks = torch.stack([future_importance(part, keys, start, scale).max[0] for start, part in parts])
        return self.layer.attend(queries, keys, values, valid, scale)


@dataclass(frozen=True, eq=False)
class Known(Policy):
    """Worths that stand in a table: one a token, or one a token for each block of queries that comes next.

    Args:
        table: `[L, blocks, H, n]`; the last of fewer blocks holds for good.
        window: newest tokens that stay in any case.
    """

    table: Tensor
    window: int

    def score(self, seen: Observation) -> Tensor:
        after = -(-int(seen.lengths.max()) // BLOCK)
        now = self.table[seen.layer, min(after, self.table.shape[1] - 1)]
        worth = now.expand(len(seen.lengths), -1, -1).gather(2, seen.slots.positions.clamp(min=0).long())
        recent = seen.slots.positions >= (seen.lengths - self.window)[:, None, None]
        return worth.masked_fill(recent, torch.finfo(worth.dtype).max)


def hindsight(model: Any, tokens: Tensor, window: int, half_lives: Sequence[int]) -> dict[str, Known]:
    """The policies that know this text."""
    noted = Cache(layers=[_Notes(layer, window) for layer in KVCache(model).layers])
    next_logits(model, noted, input_ids=tokens)
    found = {"teacher": Known(torch.stack([layer.later for layer in noted.layers])[:, None], window)}
    blocks = torch.stack([layer.blocks for layer in noted.layers])
    for half_life in half_lives:
        table, fade = torch.zeros_like(blocks), 0.5 ** (BLOCK / half_life)
        for block in reversed(range(blocks.shape[1])):
            later = table[:, block + 1] if block + 1 < blocks.shape[1] else 0
            table[:, block] = blocks[:, block] + fade * later
        found[f"hindsight({half_life})"] = Known(table, 0)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", nargs="+", default=["snapkv", "kvpop"], help="read beside them")
    parser.add_argument("--budget", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--half-life", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--texts", type=int, default=2, help="of each source")
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=3584, help="tokens behind it")
    parser.add_argument("--window", type=int, default=64, help="the teacher's")
    parser.add_argument("--chunk", type=int, default=16, help="tokens read at once")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=options.dtype)
    sizes = {"num_tokens": options.length, "least_tokens": options.length, "num_prompts": options.texts}
    futures = {"futures": "data", "future_tokens": options.tokens, "least_future": options.tokens}
    reading = Reading(tokenizer=tokenizer, split="test", **sizes, **futures)
    items = [item for source in options.data for item in harvest(source, reading).items]
    common = {"length": options.length + options.tokens, "split": "test", **manifest("smollm2", dtype=options.dtype)}
    means: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for number, item in enumerate(items, 1):
        text = item.branches[0].given
        with attach(model):
            known = hindsight(model, torch.cat([item.token_ids, text], 1), options.window, options.half_life)
            arms = {
                (name, budget): KVCache(model, policy=known.get(name, name), budget=budget)
                for name in (*options.policy, *known)
                for budget in options.budget
            }
            told = predictions(model, [KVCache(model), *arms.values()], item.token_ids, text, options.chunk)
            strayed = [compare(one[0], one[1:], token) for one, token in zip(told, text.unbind(1), strict=True)]
        for metric, field in METRICS.items():
            by_arm = torch.stack([getattr(one, field)[:, 0] for one in strayed]).mean(0).tolist()
            for (name, budget), value in zip(arms, by_arm, strict=True):
                means[name, budget, metric].append(value)
        rows = [
            mean_row(metric, values, policy=name, budget=str(budget), **common)
            for (name, budget, metric), values in means.items()
        ]
        write_rows(options.out / "rows.jsonl", rows)
        print(f"{number} of {len(items)} texts: {item.source} {item.name}", flush=True)
    for row in rows:
        print(f"{row.policy} at {row.budget}: {row.metric} {row.value:.4f} [{row.low:.4f}, {row.high:.4f}]")


if __name__ == "__main__":
    main()
