"""vLLM with and without kvkeep: are the answers the same, and how fast are they?

    python benchmarks/served.py answers --out results/vllm/answers
    python benchmarks/served.py speed --out results/vllm/speed
    python benchmarks/served.py room --out results/vllm/room

`answers`, in fp32: tokens equal to those of vLLM alone under a budget above the length, and to those of kvkeep under
transformers where tokens are evicted. Both need to agree up to the first token that differs.
`speed`: whole requests a second, engines side by side and in turns.
`room`: requests of a length that find room at once, as vLLM computes it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import kvkeep
from kvkeep.evaluate.prompts import Exam, encode
from kvkeep.evaluate.rows import Row, manifest, mean_row, write_rows
from kvkeep.evaluate.speed import median_row
from kvkeep.evaluate.tasks import demo_document
from kvkeep.models import locate
from kvkeep.vllm_plugin.engine import Engine
from kvkeep.vllm_plugin.settings import Settings

TASKS = ("niah_single_1", "niah_multikey_1", "vt", "cwe", "qa_1")


def prompts_of(tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """Prompts of several task structures (test split), each with its whole question."""
    exam = Exam(tokenizer=tokenizer, tasks=TASKS, num_tokens=length, split="test", num_samples=-(-count // len(TASKS)))
    samples = [exam.sample(task, index) for task, index in exam.places][:count]
    return [torch.cat(encode(tokenizer, sample, "inside")[:2], dim=1)[0].tolist() for sample in samples]


def parts_of_a_book(tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """So many different parts of the bundled prose, which begins anew at its end."""
    text, _ = demo_document(10**6, lambda text: len(tokenizer(text).input_ids), 0)
    ids = tokenizer(text).input_ids
    wanted = length + (count - 1) * (len(ids) // count)
    endless = ids * (1 + wanted // len(ids))
    return [endless[start : start + length] for start in range(0, wanted - length + 1, len(ids) // count)]


def agreeing(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[float]:
    """Share of each of their answers that is ours, up to the first token that differs; ours may go on."""

    def first_other(one: Sequence[int], other: Sequence[int]) -> int:
        return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(other))

    return [first_other(one[: len(other)], other) / len(other) for one, other in zip(ours, theirs, strict=True)]


def answers(options: argparse.Namespace) -> list[Row]:
    """Rows of how far answers agree: with vLLM alone, and with transformers."""
    model, tokenizer = kvkeep.load(options.model, dtype="float32")
    prompts = prompts_of(tokenizer, options.length, options.prompts)
    longest = max(map(len, prompts)) + options.new
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": longest + 1,
        # no prompt is cut in pieces, as transformers reads them whole
        "max_num_batched_tokens": sum(map(len, prompts)),
        "kv_cache_memory_bytes": 2**31,
    }
    folder = str(locate(options.model))

    def served(settings: Settings | None) -> list[list[int]]:
        with Engine(folder, settings, **engine) as vllm:
            return vllm.generate(prompts, options.new).tokens

    def transformed(policy: str) -> list[list[int]]:
        written = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            limits = {"max_new_tokens": options.new, "do_sample": False}
            whole = kvkeep.generate(model, ids, policy=policy, budget=options.budget, **limits)
            written.append(whole[0, len(prompt) :].tolist())
        return written

    common = {"length": options.length, **manifest(options.model, dtype="float32")}
    rows = []

    def record(metric: str, policy: str, budget: int, shares: list[float]) -> None:
        whole = sum(share == 1 for share in shares)
        rows.append(mean_row(metric, shares, policy=policy, budget=str(budget), extra={"whole": whole}, **common))
        print(f"{metric} {policy} {budget}: {100 * rows[-1].value:.2f}%, {whole} of {len(shares)} whole", flush=True)

    alone = served(None)
    for policy in options.policy:
        ours = served(Settings.parse(policy, str(longest)))
        record("agrees_with_vllm", policy, longest, agreeing(ours, alone))
    for policy in options.policy:
        ours = served(Settings.parse(policy, str(options.budget)))
        record("agrees_with_transformers", policy, options.budget, agreeing(ours, transformed(policy)))
    return rows


def speed(options: argparse.Namespace) -> list[Row]:
    """Rows of requests a second beside vLLM alone, engines in turns."""
    _, tokenizer = kvkeep.load(options.model)
    engine = {
        "dtype": options.dtype,
        "max_model_len": options.length + options.new + 128,
        "max_num_seqs": options.prompts,
        # every round reads its prompts
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2**31,
    }
    pieces = {"max_num_batched_tokens": options.piece} if options.piece else {}
    folder = str(locate(options.model))
    arms: dict[str, Engine] = {"full": Engine(folder, **engine)}
    for policy in options.policy:
        arms[policy] = Engine(folder, Settings.parse(policy, str(options.budget)), **engine, **pieces)
    prompts = parts_of_a_book(tokenizer, options.length, options.prompts)
    for vllm in arms.values():
        # compiles
        vllm.generate(prompts[:2], 4)
    once = {arm: vllm.generate(prompts, 1).seconds for arm, vllm in arms.items()}
    print("prompts alone:", {arm: round(seconds, 1) for arm, seconds in once.items()}, flush=True)
    rounds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(options.rounds):
        for arm, vllm in arms.items():
            rounds[arm].append(vllm.generate(prompts, options.new).seconds)
            print(f"{arm}: {rounds[arm][-1]:.1f} s", flush=True)
    common = {"length": options.length, **manifest(options.model, dtype=options.dtype)}
    rows = []
    for arm, vllm in arms.items():
        vllm.close()
        budget = "full" if arm == "full" else str(options.budget)
        ratios = [alone / ours for alone, ours in zip(rounds["full"], rounds[arm], strict=True)]
        extra = {
            "requests": options.prompts,
            "new": options.new,
            "seconds": median(rounds[arm]),
            "prompt_seconds": once[arm],
            **(pieces if arm != "full" else {}),
        }
        rows.append(median_row("throughput_ratio", ratios, {"policy": arm, "budget": budget, "extra": extra, **common}))
        print(f"{arm}: {rows[-1].value:.2f} x")
    return rows


def room(options: argparse.Namespace) -> list[Row]:
    """Rows of requests that vLLM says it has room for, beside vLLM alone."""
    engine = {"dtype": options.dtype, "max_model_len": options.length, "kv_cache_memory_bytes": 2**30}
    common = {"length": options.length, **manifest(options.model, dtype=options.dtype)}
    rows: list[Row] = []
    for policy in ("full", *options.policy):
        settings = None if policy == "full" else Settings.parse(policy, str(options.budget))
        with Engine(str(locate(options.model)), settings, enforce_eager=True, **engine) as vllm:
            fits = vllm.info["max_concurrency"]
        budget = "full" if policy == "full" else str(options.budget)
        rows.append(Row(metric="max_concurrency", value=fits, n=1, policy=policy, budget=budget, **common))
        print(f"{policy}: {fits:.1f} requests of {options.length} tokens, {fits / rows[0].value:.2f} x", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("answers", "speed", "room"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", nargs="+", required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--piece", type=int, default=0, help="tokens of a step, for engines with a policy")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = {"answers": answers, "speed": speed, "room": room}[options.what](options)
    write_rows(options.out / "rows.jsonl", rows)


if __name__ == "__main__":
    main()
