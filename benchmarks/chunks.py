"""What reading a prompt in chunks changes: rows of how many kept tokens agree with reading it in one piece.

    python benchmarks/chunks.py --out results/chunks

Embedded model, prompts of the bundled novels, budget of 25% of the prompt.
"""

import argparse
from pathlib import Path

import torch

import kvkeep
from kvkeep import POLICIES, KVCache
from kvkeep.evaluate.rows import manifest, mean_row, write_rows
from kvkeep.evaluate.tasks import demo_document

CHUNKS = (64, 256)


def kept_positions(cache: KVCache) -> list[set[tuple[int, int]]]:
    """For each layer the kept (head, position) pairs of the only sequence."""
    layers = (layer.slots.positions[0].tolist() for layer in cache.managed)
    return [{(head, at) for head, row in enumerate(heads) for at in row if at >= 0} for heads in layers]


def read(model, prompt, name: str, chunk: int | None) -> list[set[tuple[int, int]]]:
    cache = KVCache(model, policy=name, budget=prompt.shape[1] // 4)
    kvkeep.prefill(model, prompt, cache, chunk=chunk)
    return kept_positions(cache)


def agreements(model, prompt, name: str) -> list[tuple[float, float]]:
    """For each chunk size the share of kept tokens that agree, in the first layer and in the mean over layers."""
    whole, found = read(model, prompt, name, None), []
    for chunk in CHUNKS:
        shares = [len(a & b) / len(a) for a, b in zip(whole, read(model, prompt, name, chunk), strict=True)]
        found.append((shares[0], sum(shares) / len(shares)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=torch.float32)
    count = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
    texts = [demo_document(options.tokens, count, seed)[0] for seed in range(options.prompts)]
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    rows = []
    for name, policy in POLICIES.items():
        if "future" in policy.needs:
            continue
        found = [agreements(model, prompt, name) for prompt in prompts]
        for chunk, each in zip(CHUNKS, zip(*found, strict=True), strict=True):
            first, mean = zip(*each, strict=True)
            rows.append(
                mean_row(
                    "kept_in_chunks_as_in_one_piece",
                    mean,
                    policy=name,
                    budget="25%",
                    length=options.tokens,
                    extra={"chunk": chunk, "first_layer": sum(first) / len(first)},
                    **manifest("smollm2", dtype="float32"),
                )
            )
            print(f"{name} chunk {chunk}: {rows[-1].value:.3f} (first layer {rows[-1].extra['first_layer']:.3f})")
            write_rows(options.out / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
