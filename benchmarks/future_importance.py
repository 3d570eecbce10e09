"""What future importance costs: rows of its time against one plain attention forward of the same size.

    python benchmarks/future_importance.py --out results/future

fp32, one thread, a causal sdpa forward and our sums in turns; keys are not repeated for either.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.evaluate.rows import manifest, write_rows
from kvkeep.evaluate.speed import median_row
from kvkeep.future import future_importance

# query heads, KV heads, queries, keys, head size
SIZES = [(9, 3, 2048, 2048, 64), (9, 3, 64, 1514, 64), (9, 3, 8192, 8192, 64), (32, 8, 512, 16_384, 128)]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def pairs(size: tuple[int, ...], rounds: int) -> list[tuple[float, float]]:
    """Seconds of attention and of importance, in turns, after one round that is not counted."""
    query_heads, kv_heads, num_queries, num_keys, head_size = size
    queries = torch.randn(1, query_heads, num_queries, head_size)
    keys, values = (torch.randn(1, kv_heads, num_keys, head_size) for _ in range(2))
    shared = [x.repeat_interleave(query_heads // kv_heads, dim=1) for x in (keys, values)]
    first = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(first) if first else None
    scale = head_size**-0.5

    def attention() -> torch.Tensor:
        return scaled_dot_product_attention(queries, *shared, attn_mask=mask, is_causal=mask is None, scale=scale)

    found = [
        (seconds(attention), seconds(lambda: future_importance(queries, keys, first, scale))) for _ in range(rounds + 1)
    ]
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for size in SIZES:
        times = pairs(size, options.rounds)
        ratios = [ours / plain for plain, ours in times]
        extra = {
            **dict(zip(("query_heads", "kv_heads", "queries", "keys", "head_size"), size, strict=True)),
            "attention_ms": 1000 * median(plain for plain, _ in times),
            "importance_ms": 1000 * median(ours for _, ours in times),
        }
        common = {"length": size[3], "extra": extra, **manifest("none", dtype="float32")}
        rows.append(median_row("future_importance_over_attention", ratios, common))
        print(f"{size}: {rows[-1].value:.2f} times one attention forward")
        write_rows(options.out / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
