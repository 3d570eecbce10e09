"""How well does kept future attention predict right answers? A rank correlation over policies and budgets.

    python benchmarks/mass_and_accuracy.py --replay REPLAY/rows.jsonl --tasks TASKS/rows.jsonl [...] --out results/mass

Joins the rows of `kvkeep replay` with those of `kvkeep eval`, by policy and budget; accuracy is the mean over the tasks
whose names begin with --task.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from kvkeep.evaluate.replay import ALL, METRIC
from kvkeep.evaluate.rows import Row, manifest, read_rows, write_rows

RESAMPLES = 2000


def accuracies(paths: list[Path], task: str) -> dict[tuple[str, str], float]:
    """Mean accuracy of each policy and budget over tasks."""
    found = defaultdict(list)
    for row in (row for path in paths for row in read_rows(path)):
        if row.metric == "accuracy" and row.task.startswith(task) and row.question == "inside":
            found[row.policy, row.budget].append(row.value)
    return {arm: float(np.mean(values)) for arm, values in found.items()}


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's; equal values share their mean rank."""
    ranks = [
        [(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values] for values in (one, other)
    ]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replay", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, nargs="+", required=True)
    parser.add_argument("--task", default="niah")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    right = accuracies(options.tasks, options.task)
    mass = {(r.policy, r.budget): r for r in read_rows(options.replay) if r.metric == METRIC and r.task == ALL}
    arms = sorted(set(right) & set(mass))
    pairs = np.array([(mass[arm].value, right[arm]) for arm in arms])
    draws = np.random.default_rng(0).integers(len(arms), size=(RESAMPLES, len(arms)))
    # arms that are all alike in one of the two correlate with nothing
    drawn = [rank_correlation(*pairs[rows].T) for rows in draws if np.ptp(pairs[rows], axis=0).all()]
    low, high = np.quantile(drawn, (0.025, 0.975))
    row = Row(
        metric="rank_correlation_of_kept_future_and_accuracy",
        value=rank_correlation(*pairs.T),
        low=float(low),
        high=float(high),
        interval="bootstrap",
        n=len(arms),
        task=options.task,
        question="inside",
        extra={f"{policy} {budget}": [mass[policy, budget].value, right[policy, budget]] for policy, budget in arms},
        **manifest(mass[arms[0]].model),
    )
    write_rows(options.out / "rows.jsonl", [row])
    for arm in sorted(arms, key=lambda arm: mass[arm].value):
        print(f"{arm[0]:20s} {arm[1]:>5s} kept {mass[arm].value:.3f} right {right[arm]:.3f}")
    print(f"rank correlation {row.value:.2f} ({row.low:.2f} to {row.high:.2f}) over {row.n} arms")


if __name__ == "__main__":
    main()
