"""What policies cost in a decode step: rows of their own time as a share of all the rest of the step.

    python benchmarks/step_cost.py --out results/step-cost

Embedded model, one thread, a budget that is full. A policy's own time is what it takes to look at each new token and to
score the slots; finding the least and evicting it is the same for all. Rounds are long enough for what a policy does
once in some tokens to count in each, policies take turns, and time is the processor time of this process.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from clock import Clock

import kvkeep
from kvkeep import KVCache
from kvkeep.evaluate.rows import manifest, write_rows
from kvkeep.evaluate.speed import median_row
from kvkeep.evaluate.tasks import demo_document
from kvkeep.policies import make_policy

ARMS = ("streaming", "knorm", "keydiff", "tova", "h2o", "snapkv", "kvp", "kvpop_mlp", "kvpop")
STEPS = 32


@torch.inference_mode()
def share(model: Any, cache: KVCache, clock: Clock, tokens: torch.Tensor) -> float:
    """Time inside the policy over that outside, while these tokens are decoded."""
    clock.seconds, start = 0.0, time.process_time()
    for token in tokens.split(1, dim=1):
        model(input_ids=token, **{kvkeep.model.cache_argument(model): cache})
    whole = time.process_time() - start
    return clock.seconds / (whole - clock.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--dtype", default="fast")
    parser.add_argument("--policy", nargs="+", default=ARMS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=options.dtype)
    length = options.budget + 2 * STEPS
    text, _ = demo_document(2 * length, lambda text: len(tokenizer(text).input_ids), 0)
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, : length + STEPS]
    common = {"length": length, "budget": str(options.budget), **manifest("smollm2", dtype=str(model.dtype))}
    common["extra"] = {"steps": STEPS, "clock": "process"}
    shares: dict[str, list[float]] = {name: [] for name in options.policy}
    clock = Clock()
    for kind in {type(make_policy(name)) for name in options.policy}:
        clock.watch(kind, "track")
        clock.watch(kind, "score")
    with kvkeep.attach(model):
        for name in [*options.policy] * options.rounds:
            cache = KVCache(model, policy=name, budget=options.budget)
            kvkeep.prefill(model, tokens[:, :length], cache)
            shares[name].append(share(model, cache, clock, tokens[:, length:]))
    rows = [median_row("policy_share_of_a_step", shares[name], {"policy": name, **common}) for name in options.policy]
    for row in rows:
        print(f"{row.policy}: {row.value:.1%} of the rest of a step")
    write_rows(options.out / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
