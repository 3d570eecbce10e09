"""How much less one policy misses than another on the same texts: rows of paired differences of future missed mass.

    python benchmarks/paired_missed_mass.py diagnose --pair "tiered(h2o)" h2o --pair "tiered(kvp)" kvp

Reads the samples that `kvkeep diagnose` left in the folder and writes paired.jsonl beside them. A pair is one layer of
one text under both policies at the same budget; intervals are a bootstrap over those.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvkeep.evaluate.rows import Row, bootstrap, manifest, read_samples, write_rows
from kvkeep.policies import spelled

Samples = dict[tuple[str, str], dict[str, Mapping[str, Any]]]


def by_arm(samples: Sequence[Mapping[str, Any]]) -> Samples:
    """Samples by policy and budget, and in each by text."""
    found: Samples = {}
    for sample in samples:
        arm = found.setdefault((sample["policy"], sample["budget"]), {})
        arm[f"{sample['task']} {sample['index']}"] = sample
    return found


def difference(samples: Samples, budget: str, policy: str, other: str, stamp: Mapping[str, Any]) -> Row:
    """The mean over texts and layers of what `other` misses and `policy` does not."""
    ours, theirs = samples[policy, budget], samples[other, budget]
    texts = sorted(ours.keys() & theirs.keys())
    layers = [(ours[text]["layers"]["missed"], theirs[text]["layers"]["missed"]) for text in texts]
    saved = [less - more for more_of, less_of in layers for more, less in zip(more_of, less_of, strict=True)]
    bounds = bootstrap(saved)
    extra = {"against": other, "texts": len(texts)}
    return Row(
        metric="future_missed_mass_saved",
        value=fmean(saved),
        low=bounds.low,
        high=bounds.high,
        interval=bounds.method,
        n=len(saved),
        policy=policy,
        budget=budget,
        cache_bytes=fmean(ours[text]["cache_bytes"] for text in texts),
        full_bytes=fmean(ours[text]["full_bytes"] for text in texts),
        extra={**extra, "their_cache_bytes": fmean(theirs[text]["cache_bytes"] for text in texts)},
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
            rows.append(difference(samples, budget, policy, other, manifest(model)))
            row, texts = rows[-1], rows[-1].extra["texts"]
            print(f"{policy}, {other} at {budget}: {row.value:.3f} less [{row.low:.3f}, {row.high:.3f}], {texts} texts")
    write_rows(options.folder / "paired.jsonl", rows)


if __name__ == "__main__":
    main()
