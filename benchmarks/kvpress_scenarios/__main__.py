"""kvpress and kvkeep over the same scenarios: one file of rows each, and the table of both.

    python benchmarks/kvpress_scenarios --library kvkeep --out results/kvpress/kvkeep.jsonl
    python benchmarks/kvpress_scenarios --library kvpress --out results/kvpress/kvpress.jsonl
    python benchmarks/kvpress_scenarios --table results/kvpress/kvpress.jsonl results/kvpress/kvkeep.jsonl

The second needs an environment with kvpress 0.5.5 (transformers 5.2) and PYTHONPATH set to the checkout, for the rows'
format. `--model FOLDER` adds the scenarios of a real model. Beside FILE.jsonl stands FILE-raw.jsonl, with what the
numbers were worked out from, and why others are missing.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# a checkout is enough; kvkeep need not be installed
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from conversation import Library, NotThere  # noqa: E402
from inputs import PROMPT, Inputs  # noqa: E402
from scenarios import SCENARIOS, Measured  # noqa: E402
from table import table  # noqa: E402

from kvkeep.evaluate.rows import Row, manifest, replace_file, write_rows  # noqa: E402

PROSE = ROOT / "kvkeep/evaluate/haystack/pride_and_prejudice.txt"


def library_named(name: str) -> Library:
    if name == "kvpress":
        from with_kvpress import KVPress

        return KVPress()
    from with_kvkeep import KVKeep

    return KVKeep()


def measure(library: Library, inputs: Inputs, command: str) -> Iterator[tuple[Row | None, dict[str, Any]]]:
    """For every number its row and what it came from; for what is missing the reason alone."""
    stamp = manifest(inputs.name, dtype=str(inputs.model.dtype), command=command)
    stamp["versions"] |= library.versions()
    for task, scenario in SCENARIOS.items():
        for policy in scenario.policies if inputs.folder is None else scenario.real:
            where = {"library": library.name, "model": inputs.name, "task": task, "policy": policy}
            for found in _attempt(scenario.run(library, inputs, policy)):
                if isinstance(found, str):
                    yield None, {**where, "reason": found}
                    continue
                row = Row(
                    metric=found.metric,
                    value=found.value,
                    n=found.n,
                    policy=policy,
                    budget="full" if policy == "full" else scenario.budget,
                    task=task,
                    length=PROMPT,
                    seed=0,
                    extra={"library": library.name},
                    **stamp,
                )
                yield row, {**where, "metric": found.metric, "value": found.value, "raw": found.raw}


def _attempt(measured: Iterator[Measured]) -> Iterator[Measured | str]:
    try:
        yield from measured
    except NotThere as reason:
        yield f"n/a: {reason}"
    except Exception as error:
        # a library that fails in a scenario is a result, too
        yield f"fails: {type(error).__name__}: {error}"


def run(library: Library, inputs: list[Inputs], out: Path, command: str) -> None:
    found = []
    for row, raw in (pair for one in inputs for pair in measure(library, one, command)):
        found.append((row, raw))
        outcome = raw["reason"] if row is None else f"{row.metric} {row.value:g}"
        print(raw["model"], raw["task"], raw["policy"], outcome, flush=True)
    write_rows(out, [row for row, _ in found if row is not None])
    lines = "".join(json.dumps(raw) + "\n" for _, raw in found)
    replace_file(out.with_name(f"{out.stem}-raw.jsonl"), lines.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=("kvpress", "kvkeep"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="folder of a Llama-type model")
    parser.add_argument("--table", type=Path, nargs=2, metavar="ROWS")
    options = parser.parse_args()
    if options.table:
        print(table(*options.table))
        return
    if options.library is None or options.out is None:
        parser.error("give --library and --out, or --table")
    torch.set_num_threads(1)
    command = f"python benchmarks/kvpress_scenarios --library {options.library} --out {options.out}"
    inputs = [Inputs(None, PROSE)]
    if options.model is not None:
        command += f" --model {options.model.name}"
        inputs.append(Inputs(options.model, PROSE))
    run(library_named(options.library), inputs, options.out, command)


if __name__ == "__main__":
    main()
