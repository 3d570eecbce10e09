"""Our caches beside transformers' QuantizedCache at the bytes that it takes: right answers, agreement, speed.

    pip install optimum-quanto
    python benchmarks/quantized_cache.py --data FOLDER --out results/quantized-cache

Embedded model, one thread. QuantizedCache (quanto, 2 and 4 bits, its own defaults: groups of 64, the last 128 tokens
whole) reads each prompt first; then every policy gets a budget of as many bytes as it holds behind the prompt. Answers
are to the thirteen task structures, question inside the prompt; agreement is with DynamicCache, token by token over the
texts behind prompts from --data. Speed and bytes while decoding are those of `kvkeep bench`, in the same process.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvkeep
from kvkeep import KVCache
from kvkeep.corpus import Reading, harvest
from kvkeep.evaluate.agreement import METRICS, compare
from kvkeep.evaluate.prompts import encode
from kvkeep.evaluate.rows import Row, manifest, mean_row, write_rows
from kvkeep.evaluate.run import end_tokens
from kvkeep.evaluate.speed import bench, held_bytes
from kvkeep.evaluate.stock import DYNAMIC, QUANTIZED, stock_cache
from kvkeep.evaluate.tasks import TASKS, generate, score
from kvkeep.model import cache_argument


class Found(NamedTuple):
    """What was measured of one prompt, and the bytes of the cache behind it."""

    value: float
    size: int


# by policy and budget
Arms = dict[tuple[str, str], list[Found]]


class Reader:
    """A model that reads on through one cache, ours or transformers' own."""

    def __init__(self, model: Any, cache: Any, prompt: Tensor):
        self.model, self.cache = model, cache
        self.read(prompt)
        self.size = held_bytes(cache)

    def read(self, tokens: Tensor) -> Tensor:
        """Logits behind the last of the tokens."""
        ours = isinstance(self.cache, KVCache)
        with torch.inference_mode(), kvkeep.attach(self.model) if ours else nullcontext():
            options = {cache_argument(self.model): self.cache, "logits_to_keep": 1}
            return self.model(input_ids=tokens, **options).logits[:, -1]

    def answer(self, follow_up: Tensor, most: int, ends: set[int]) -> list[int]:
        """What the model says next, greedily."""
        token, said = self.read(follow_up).argmax(-1), []
        while len(said) < most and int(token) not in ends:
            said.append(int(token))
            token = self.read(token[:, None]).argmax(-1)
        return said


def readers(model: Any, prompt: Tensor, policies: list[str]) -> Iterator[tuple[tuple[str, str], Reader]]:
    """Caches that have read the prompt, by policy and budget."""
    yield ("full", "full"), Reader(model, stock_cache(DYNAMIC, model.config), prompt)
    for name in QUANTIZED:
        theirs = Reader(model, stock_cache(name, model.config), prompt)
        yield (name, "full"), theirs
        for policy in policies:
            cache = KVCache(model, policy=policy, budget=f"{theirs.size}B")
            yield (policy, f"bytes of {name}"), Reader(model, cache, prompt)


def answers(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the mean accuracy over tasks."""
    ends, found = end_tokens(model, tokenizer), Arms()
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    for index, task in product(range(options.samples), options.task):
        sample = generate(task, num_tokens=options.length, count_tokens=count, split=options.split, index=index)
        prompt, follow_up, _ = encode(tokenizer, sample, "inside")
        for arm, reader in readers(model, prompt, options.policy):
            said = tokenizer.decode(reader.answer(follow_up, sample.max_new_tokens, ends))
            found.setdefault(arm, []).append(Found(score(sample, said), reader.size))
        print(f"{task} {index}: " + ", ".join(f"{' of '.join(arm)} {got[-1].value:.2f}" for arm, got in found.items()))
    yield from rows_of("accuracy", found)


def agreement(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Rows of agreement with the full cache over the tokens behind prompts."""
    reading = Reading(
        tokenizer=tokenizer,
        split=options.split,
        num_tokens=options.length,
        num_prompts=options.texts,
        future_tokens=options.tokens,
        least_future=options.tokens,
    )
    found: dict[str, Arms] = {metric.name: {} for metric in METRICS}
    for item in harvest(f"text:{options.data}", reading).items:
        text, full = item.branches[0].given, []
        tokens = torch.cat([item.token_ids[:, -1:], text[:, :-1]], 1).split(1, dim=1)
        for arm, reader in readers(model, item.token_ids[:, :-1], options.policy):
            logits = [reader.read(token) for token in tokens]
            full = full or logits
            strayed = [compare(f, own[None], text[:, i]) for i, (f, own) in enumerate(zip(full, logits, strict=True))]
            for metric in METRICS:
                value = metric.of(fmean(float(getattr(one, metric.summed)) for one in strayed))
                found[metric.name].setdefault(arm, []).append(Found(value, reader.size))
        print(f"{item.source} {item.name}")
    for name, arms in found.items():
        yield from rows_of(name, arms)


def rows_of(metric: str, arms: Arms) -> Iterator[Row]:
    full_bytes = fmean(found.size for found in arms["full", "full"])
    for (policy, budget), found in arms.items():
        yield mean_row(
            metric,
            [one.value for one in found],
            policy=policy,
            budget=budget,
            cache_bytes=fmean(one.size for one in found),
            full_bytes=full_bytes,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", nargs="+", default=["h2o", "qevict", "kvp", "tiered(kvp)"])
    parser.add_argument("--data", type=Path, required=True, help="text file or folder, for agreement")
    parser.add_argument("--split", default="test")
    parser.add_argument("--task", nargs="+", default=list(TASKS), help="only these")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1, help="prompts of each task")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="behind the prompt, for agreement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="fast")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvkeep.load("smollm2", dtype=options.dtype)
    stamp = {"length": options.length, "split": options.split, **manifest("smollm2", dtype=str(model.dtype))}
    rows: list[Row] = []
    for part in (answers, agreement):
        rows += [replace(row, **stamp) for row in part(model, tokenizer, options)]
        write_rows(options.out / "rows.jsonl", rows)
    speed = {"lengths": [2 * options.length], "batch_sizes": [8], "prefill": False, "repeats": options.rounds}
    rows += bench(model, model_name="smollm2", policies=options.policy, budgets=["20%"], beside=QUANTIZED, **speed)
    write_rows(options.out / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
