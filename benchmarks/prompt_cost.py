"""What policies cost while a prompt is read: rows of the time they add, and of the bytes a look-ahead takes meanwhile.

    python benchmarks/prompt_cost.py --out results/prompt-cost

Embedded model, one thread, a prompt of the bundled novels. In every round each policy reads the prompt once, in turns.
Its time is what goes by in policy, eviction and look-ahead, beside the model's own for the prompt under the plainest
policy (streaming): the difference of two whole prompts would be mostly noise. It is the processor time of this process,
which others on the machine change less than the clock on the wall. A kept look-ahead is followed to its end, and the
steps of the model, which the full cache's answer takes too, do not count.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from clock import Clock

import kvkeep
from kvkeep import KVCache
from kvkeep.branches import Branches
from kvkeep.evaluate.rows import Row, manifest, write_rows
from kvkeep.evaluate.speed import median_row
from kvkeep.evaluate.tasks import demo_document
from kvkeep.layer import KVLayer
from kvkeep.policies import make_policy

PLAIN = "streaming"
ARMS = (
    "knorm",
    "keydiff",
    "lagkv",
    "tova",
    "snapkv",
    "h2o",
    "expected_attention",
    "kvp",
    "lorekv(futures=0)",
    "lorekv(futures=1)",
    "lorekv",
    "lorekv(steps=32)",
    "lorekv(objective=mass)",
    "lorekv(kept=True)",
    "lorekv(kept=True,objective=response)",
)
AHEAD = ("lorekv(futures=1)", "lorekv", "lorekv(steps=32)")


def one_round(model: Any, prompt: torch.Tensor, budget: int, arms: Sequence[str], clock: Clock) -> dict[str, float]:
    """Seconds of the plain prompt, and what each arm adds to them as a share."""

    def spent(arm: str) -> float:
        """Seconds of the model's own work, as far as a policy's is not among it."""
        clock.seconds, look = 0.0, make_policy(arm).look
        cache, start = KVCache(model, policy=arm, budget=budget), time.process_time()
        if look is not None and look.keeps:
            kvkeep.generate(model, prompt, cache=cache, max_new_tokens=look.steps + 1, do_sample=False)
        else:
            kvkeep.prefill(model, prompt, cache)
        return time.process_time() - start - clock.seconds

    plain = spent(PLAIN)
    found = {"plain": plain}
    for arm in arms:
        spent(arm)
        found[arm] = clock.seconds / plain
    return found


def look_ahead_bytes(model: Any, prompt: torch.Tensor, policy: str, budget: int) -> dict[str, int]:
    """Measured bytes of what the futures hold beside the prompt, in all layers, and of the prompt's own slots."""
    found: dict[str, int] = {"own": 0, "queries": 0, "prompt": 0}
    made: list[Branches] = []

    class Watched(Branches):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            made.append(self)

    kvkeep.lookahead.Branches, before = Watched, kvkeep.lookahead.Branches
    cache = KVCache(model, policy=policy, budget=budget)
    try:
        kvkeep.prefill(model, prompt, cache)
    finally:
        kvkeep.lookahead.Branches = before
    for layer in made[0].layers if made else ():
        arrays = {name: array for name, array in vars(layer).items() if isinstance(array, torch.Tensor)}
        found["queries"] += arrays.pop("queries").untyped_storage().nbytes()
        found["own"] += sum(array.untyped_storage().nbytes() for array in arrays.values())
    slots = [layer.slots for layer in cache.managed if layer.slots is not None]
    found["prompt"] = sum(prompt.shape[1] * (s.keys[:, :, 0].nbytes + s.values[:, :, 0].nbytes) for s in slots)
    return found


def time_row(arm: str, rounds: Sequence[dict[str, float]], common: dict[str, Any]) -> Row:
    """The median over the rounds so far of what ``arm`` adds."""
    extra = {"plain_prompt_s": median(measured["plain"] for measured in rounds), "clock": "process"}
    shares = [measured[arm] for measured in rounds]
    return median_row("time_added_to_the_prompt", shares, {"policy": arm, "extra": extra, **common})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--dtype", default="fast")
    parser.add_argument("--policy", nargs="+", default=ARMS, help="only these; names as for KVCache")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=options.dtype)
    text, _ = demo_document(options.tokens + 64, lambda text: len(tokenizer(text).input_ids), 0)
    prompt = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    common = {"length": options.tokens, "budget": str(options.budget), **manifest("smollm2", dtype=str(model.dtype))}
    rows = []
    for arm in (arm for arm in options.policy if arm in AHEAD):
        held = look_ahead_bytes(model, prompt, arm, options.budget)
        rows.append(Row(metric="look_ahead_bytes", value=held["own"], n=1, policy=arm, extra=held, **common))
        print(f"{arm}: {held['own']} bytes of keys and values beside {held['prompt']}, {held['queries']} of queries")
    write_rows(options.out / "rows.jsonl", rows)
    clock, rounds, times = Clock(), [], []
    clock.watch(KVLayer, "settle")
    clock.watch(KVLayer, "finish_answer")
    clock.watch(kvkeep.model, "look_ahead")
    for _ in range(options.rounds):
        rounds.append(one_round(model, prompt, options.budget, options.policy, clock))
        times = [time_row(arm, rounds, common) for arm in options.policy]
        write_rows(options.out / "rows.jsonl", [*rows, *times])
    for row in times:
        bounds = "" if row.low is None else f" [{row.low:.1%}, {row.high:.1%}]"
        print(f"{row.policy}: adds {row.value:.1%}{bounds} to {row.extra['plain_prompt_s']:.1f} s")


if __name__ == "__main__":
    main()
