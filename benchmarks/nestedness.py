"""Is the best set of b tokens inside the best set of b + 1? Rows from all subsets of a few tokens, by true loss.

    python benchmarks/nestedness.py --out results/nestedness

A ranking serves every budget only as far as best sets are nested. Here the prompt is read whole; then sinks, the last
tokens and a subset of seven candidates stay (the same ones in all heads), and the loss of the right answer is measured
for all 128 subsets. The candidates are the four tokens that the answer reads most and three others.
"""

import argparse
from itertools import combinations, pairwise
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import kvkeep
from kvkeep import KVCache
from kvkeep.evaluate.prompts import encode
from kvkeep.evaluate.rows import manifest, mean_row, write_rows
from kvkeep.evaluate.tasks import generate

NUM_CANDIDATES = 7
SUBSETS = [subset for size in range(NUM_CANDIDATES + 1) for subset in combinations(range(NUM_CANDIDATES), size)]
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "vt")
SINKS, RECENT = 4, 16
METRICS = {
    "nested_best_sets": "share of sizes b whose best set lies in the best set of b + 1",
    "loss_of_one_ranking": "loss over all sizes of the best single ranking, relative to the best set of each size",
}


def candidates(model, prompt, future, seed: int) -> list[int]:
    """The four tokens read most by the future, over all layers and heads, and three others."""
    cache = KVCache(model, policy="oracle", budget=prompt.shape[1] + future.shape[1])
    kvkeep.prefill(model, prompt, cache, future=future)
    worth = sum(layer.slots.side("oracle")[0].sum(0) for layer in cache.managed)[SINKS:-RECENT]
    order = (worth.argsort(descending=True) + SINKS).tolist()
    others = torch.randperm(len(order) - 4, generator=torch.Generator().manual_seed(seed))[: NUM_CANDIDATES - 4]
    return order[:4] + [order[4 + place] for place in others.tolist()]


@torch.no_grad()
def losses(model, prompt, future, chosen: list[int]) -> dict[frozenset[int], float]:
    """Mean loss of the answer's tokens after each subset of the candidates is kept."""
    n, f = prompt.shape[1], future.shape[1]
    mask = torch.zeros(len(SUBSETS), n + f, dtype=torch.long)
    mask[:, :SINKS] = mask[:, n - RECENT :] = 1
    for row, subset in enumerate(SUBSETS):
        mask[row, [chosen[place] for place in subset]] = 1
    found: list[float] = []
    for rows in mask.split(128):
        cache = model(prompt, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(rows))
        tokens, positions = future.expand(len(rows), -1), torch.arange(n, n + f).expand(len(rows), -1)
        argument = {kvkeep.cache_argument(model): cache}
        logits = model(tokens, attention_mask=rows, position_ids=positions, **argument).logits[:, :-1]
        each = cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        found += each.mean(1).tolist()
    return {frozenset(subset): loss for subset, loss in zip(SUBSETS, found, strict=True)}


def best_of_size(loss: dict[frozenset[int], float]) -> list[frozenset[int]]:
    sizes = range(NUM_CANDIDATES + 1)
    return [min((subset for subset in loss if len(subset) == size), key=loss.__getitem__) for size in sizes]


def best_ranking(loss: dict[frozenset[int], float]) -> float:
    """Least sum of losses over nested sets of every size: what the best ranking pays."""
    paid = {frozenset(range(NUM_CANDIDATES)): loss[frozenset(range(NUM_CANDIDATES))]}
    for size in reversed(range(NUM_CANDIDATES)):
        for subset in (subset for subset in loss if len(subset) == size):
            larger = (subset | {token} for token in range(NUM_CANDIDATES) if token not in subset)
            paid[subset] = loss[subset] + min(paid[one] for one in larger)
    return paid[frozenset()]


def study(model, tokenizer, task: str, index: int, tokens: int) -> dict[str, float]:
    """Both metrics of one prompt."""
    count = lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)  # noqa: E731
    sample = generate(task, num_tokens=tokens, count_tokens=count, split="validation", index=index)
    prompt = encode(tokenizer, sample, "inside")
    loss = losses(model, prompt.compressed, prompt.future, candidates(model, prompt.compressed, prompt.future, index))
    best = best_of_size(loss)
    nested = [one <= other for one, other in pairwise(best)]
    return {
        "nested_best_sets": sum(nested) / len(nested),
        "loss_of_one_ranking": best_ranking(loss) / sum(loss[one] for one in best),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=torch.float32)
    rows = []
    for task in TASKS:
        found = [study(model, tokenizer, task, index, options.tokens) for index in range(options.prompts)]
        for metric in METRICS:
            values = [one[metric] for one in found]
            rows.append(
                mean_row(
                    metric,
                    values,
                    task=task,
                    length=options.tokens,
                    question="inside",
                    split="validation",
                    extra={"meaning": METRICS[metric], "candidates": NUM_CANDIDATES},
                    **manifest("smollm2", dtype="float32"),
                )
            )
        write_rows(options.out / "rows.jsonl", rows)
        print(task, {row.metric: round(row.value, 3) for row in rows if row.task == task})


if __name__ == "__main__":
    main()
