"""Decoding without an end: memory and perplexity over a stream of documents far longer than the model's maximum.

    python benchmarks/endless.py --data text:data/haystack/great_expectations_1400-0.txt --out results/kvpop/endless

Documents of the test split follow each other and are fed token by token. One row a policy says by how much measured
bytes differ, (most - least) / most, once the budget is full; another the perplexity of the stream, by position.
"""

import argparse
from collections.abc import Iterator
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import kvkeep
from kvkeep.corpus import Reading, harvest
from kvkeep.evaluate.rows import Row, manifest, write_rows

# bytes are measured, and losses summed up, once in so many tokens
EVERY = 250


def stream(data: list[str], tokenizer: Any, num_tokens: int, piece: int) -> Tensor:
    """The first tokens `[1, T]` of test documents in a row, each a piece of its text."""
    reading = Reading(tokenizer=tokenizer, split="test", num_tokens=piece, futures="data", future_tokens=1)
    items = [item for source in data for item in harvest(source, reading).items]
    joined = torch.cat([item.token_ids for item in items], dim=1)
    if joined.shape[1] < num_tokens:
        raise SystemExit(f"the documents have {joined.shape[1]} tokens, not {num_tokens}: give more, or fewer --tokens")
    return joined[:, :num_tokens]


@torch.inference_mode()
def follow(model: Any, cache: kvkeep.KVCache, tokens: Tensor) -> Iterator[tuple[int, float]]:
    """Bytes held and the mean loss of each part of the stream."""
    losses: list[float] = []
    with kvkeep.attach(model):
        for at in range(tokens.shape[1] - 1):
            logits = (
                model(input_ids=tokens[:, at : at + 1], **{kvkeep.model.cache_argument(model): cache})
                .logits[:, -1]
                .float()
            )
            losses.append(float(cross_entropy(logits, tokens[:, at + 1])))
            if len(losses) == EVERY:
                yield cache.report().bytes, fmean(losses)
                losses = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", nargs="+", default=["streaming", "kvpop"])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--piece", type=int, default=2_000, help="tokens of a document")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=options.dtype)
    tokens = stream(options.data, tokenizer, options.tokens, options.piece)
    common = {"budget": str(options.budget), "length": options.tokens, "split": "test", "n": 1}
    common |= manifest("smollm2", dtype=options.dtype)
    rows: list[Row] = []
    for policy in options.policy:
        cache = kvkeep.KVCache(model, policy=policy, budget=options.budget)
        sizes, losses = zip(*follow(model, cache, tokens), strict=True)
        full = sizes[-(-options.budget // EVERY) :]
        spread = (max(full) - min(full)) / max(full)
        by_position = [{"until": EVERY * (1 + at), "value": exp(loss)} for at, loss in enumerate(losses)]
        rows.append(Row(metric="bytes_spread", value=spread, policy=policy, cache_bytes=max(full), **common))
        extra = {"by_position": by_position, "model_maximum": model.config.max_position_embeddings}
        rows.append(Row(metric="perplexity", value=exp(fmean(losses)), policy=policy, extra=extra, **common))
        write_rows(options.out / "rows.jsonl", rows)
        print(f"{policy}: bytes within {100 * spread:.3f}%, perplexity {rows[-1].value:.2f}", flush=True)


if __name__ == "__main__":
    main()
