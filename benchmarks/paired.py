"""How much better one policy does than another on the same prompts: rows of paired differences.

    python benchmarks/paired.py diagnose --pair "tiered(h2o)" h2o --pair "tiered(kvp)" kvp
    python benchmarks/paired.py eval --pair "tiered(kvp)" kvp

Reads the samples that `kvkeep diagnose` or `kvkeep eval` left in the folder and writes paired.jsonl beside them. A pair
is one layer of one text (future missed mass), or one prompt (accuracy), under both policies at the same budget;
intervals are a bootstrap over pairs.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvkeep.evaluate.rows import Row, manifest, mean_row, read_samples, write_rows
from kvkeep.policies import spelled

# by policy and budget, and in each by prompt
Samples = dict[tuple[str, str], dict[str, Mapping[str, Any]]]


def by_arm(samples: Sequence[Mapping[str, Any]]) -> Samples:
    found: Samples = {}
    for sample in samples:
        arm = found.setdefault((sample["policy"], sample["budget"]), {})
        arm[f"{sample['task']} {sample['index']} {sample.get('question', '')}"] = sample
    return found


def gains(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """What the first sample is better by: in each layer, or as a whole."""
    if "layers" not in one:
        return [one["score"] - other["score"]]
    return [more - less for less, more in zip(one["layers"]["missed"], other["layers"]["missed"], strict=True)]


def row_of(samples: Samples, budget: str, policy: str, other: str, stamp: Mapping[str, Any]) -> Row:
    """The mean gain of `policy` over `other`."""
    ours, theirs = samples[policy, budget], samples[other, budget]
    prompts = sorted(ours.keys() & theirs.keys())
    gained = [gain for prompt in prompts for gain in gains(ours[prompt], theirs[prompt])]
    their_bytes = fmean(theirs[prompt]["cache_bytes"] for prompt in prompts)
    return mean_row(
        "future_missed_mass_saved" if "layers" in ours[prompts[0]] else "accuracy_gained",
        gained,
        policy=policy,
        budget=budget,
        cache_bytes=fmean(ours[prompt]["cache_bytes"] for prompt in prompts),
        full_bytes=fmean(ours[prompt]["full_bytes"] for prompt in prompts),
        extra={"against": other, "prompts": len(prompts), "their_cache_bytes": their_bytes},
        **stamp,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pair", nargs=2, action="append", required=True, metavar=("POLICY", "OTHER"))
    options = parser.parse_args()
    samples = by_arm(read_samples(options.folder / "samples.jsonl"))
    [model] = {sample["model"] for arm in samples.values() for sample in arm.values()}
    rows = []
    for policy, other in ((spelled(one), spelled(two)) for one, two in options.pair):
        for budget in [budget for name, budget in samples if name == policy and (other, budget) in samples]:
            rows.append(row_of(samples, budget, policy, other, manifest(model)))
            row, prompts = rows[-1], rows[-1].extra["prompts"]
            print(
                f"{policy} {budget}: {row.value:+.3f} [{row.low:+.3f}, {row.high:+.3f}] on {other}, {prompts} prompts"
            )
    write_rows(options.folder / "paired.jsonl", rows)


if __name__ == "__main__":
    main()
