"""Problems solved in long answers of the model's own, under every policy and budget: does it still come out right?

B problems answered together, P prompt tokens, T tokens of an answer.

Each policy writes its own answer, so what it forgot leads it astray as it would in use: unlike in `agreement`, where
every cache is fed the same text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..cache import KVCache
from ..model import generate
from .answers import sizes_of, until_end
from .prompts import token_ids, user_turn
from .rows import Row, bootstrap_ratio, summarise, write_rows
from .run import FULL, Arm, Progress, arms_of, digest_of, end_tokens
from .session import Missing, Session

INSTRUCTION = "Think step by step, and put the final answer into \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem in words and its answer, a number or an expression in LaTeX."""

    source: str
    name: str
    statement: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How answers are written.

    Attributes:
        max_new_tokens: longest answer; one that has not ended by then is graded as it stands.
        temperature: 0 takes the likeliest token each time.
        top_p: tokens that make up so much of the probability are drawn from.
        draws: answers to each problem.
        instruction: what the user says behind a problem.

    Raises:
        ValueError: for numbers out of range, and several draws of what is not random.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    draws: int = 1
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.draws < 1:
            raise ValueError(f"longest answer and draws must be at least 1, got {self.max_new_tokens} and {self.draws}")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature must be 0 or more and top_p in (0, 1], got {self.temperature} and {self.top_p}"
            )
        if self.draws > 1 and not self.temperature:
            raise ValueError(f"{self.draws} draws at temperature 0 are all the same; give a temperature")

    @property
    def options(self) -> dict[str, Any]:
        """For `generate`; whatever a model's own settings add, such as a penalty on repetition, is left out."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p} if self.temperature else {}
        own = dict.fromkeys(("temperature", "top_p", "top_k"))
        return {
            **own,
            **drawn,
            "do_sample": bool(self.temperature),
            "repetition_penalty": 1.0,
            "max_new_tokens": self.max_new_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One answer to one problem, the `draw`-th."""

    problem: Problem
    draw: int
    split: str = "test"

    @property
    def source(self) -> str:
        return self.problem.source

    @property
    def name(self) -> str:
        return f"{self.problem.name}.{self.draw}"

    @property
    def key(self) -> str:
        return f"{self.source}-{self.name}-{digest_of(asdict(self.problem))}"


def solve(
    model: PreTrainedModel,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    model_name: str,
    policies: Sequence[str],
    budgets: Sequence[int | float | str],
    out: Path,
    decoding: Decoding | None = None,
    batch: int = 16,
    seed: int = 0,
    progress: Progress = lambda done, total, source: None,
    command: str | None = None,
) -> list[Row]:
    """Let the model solve problems under every policy at every budget, and under the full cache.

    Answers are graded by math-verify, which finds the final answer in a text and knows equal expressions. Finished
    batches are on disk, in `out`/samples.jsonl, before the next begins, and the same call goes on after them;
    `out`/rows.jsonl is written at the end.

    Args:
        problems: see `kvkeep.corpus.problems.problems_of`.
        policies, budgets: as for `kvkeep.evaluate.run.evaluate`; budgets in tokens or bytes hold memory fixed however
            long an answer becomes.
        batch: problems answered together; draws at a temperature depend on it.
        seed: for draws, and for policies that draw at random.
        command: how to run this again, for the rows; None takes this process's command line.

    Returns:
        For each source of problems, policy and budget a row of accuracy, then one of relative_accuracy (against the
        full cache's, over the same problems), where the full cache solves any. `extra` has the mean number of tokens
        of an answer and the share of answers that ended by themselves.

    Raises:
        ValueError: before any work, for what cannot be measured, and an `out` with samples under other settings.
        ModuleNotFoundError: without math-verify.
    """
    if not problems:
        raise ValueError("there are no problems to solve; give some")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    _grader()
    session = _Session(
        model=model,
        tokenizer=tokenizer,
        arms=arms_of(policies, budgets),
        decoding=decoding or Decoding(),
        batch=batch,
        seed=seed,
    )
    session.check()
    attempts = [
        Attempt(problem=problem, draw=draw) for draw, problem in product(range(session.decoding.draws), problems)
    ]
    measured = session.run(attempts, out, model_name=model_name, progress=progress, command=command)
    accuracies = summarise(measured.records, stamp=measured.stamp)
    rows = [*accuracies, *_relative(accuracies, measured.records)]
    write_rows(out / "rows.jsonl", rows)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Session(Session[Attempt]):
    decoding: Decoding

    def check(self) -> None:
        for arm in self.arms:
            if "future" in arm.fresh_cache(self.model, self.seed).policy.needs:
                raise ValueError(f"{arm.policy} needs the future, which is not written yet; leave it out")

    @property
    def how(self) -> dict[str, Any]:
        drawn = {"batch": self.batch} if self.decoding.temperature else {}
        return {**asdict(self.decoding), **drawn}

    def parts(
        self, items: Sequence[Attempt], missing: Missing[Attempt]
    ) -> Iterator[tuple[list[Attempt], tuple[Arm, ...]]]:
        # a batch is what it was before a stop, so that it draws what it would have drawn
        for start in range(0, len(items), self.batch):
            part = list(items[start : start + self.batch])
            yield part, tuple(dict.fromkeys(arm for item in part for arm in missing(item)))

    def read(
        self, items: Sequence[Attempt], arms: Sequence[Arm], place: int
    ) -> Iterator[tuple[Attempt, Arm, dict[str, Any]]]:
        prompts = [self._prompt(item.problem) for item in items]
        for arm in arms:
            held = arm.fresh_cache(self.model, self.seed)
            answers = self._answers(held, prompts, draw_seed=self.seed + place)
            sizes = sizes_of(held)
            for item, prompt, tokens in zip(items, prompts, answers, strict=True):
                output = self.tokenizer.decode(tokens, skip_special_tokens=True)
                yield (
                    item,
                    arm,
                    {
                        "score": float(is_right(output, item.problem.answer)),
                        "output": output,
                        "answers": [item.problem.answer],
                        "prompt_tokens": len(prompt),
                        "extra": {"tokens": len(tokens), "ended": float(len(tokens) < self.decoding.max_new_tokens)},
                        **sizes,
                    },
                )

    def _prompt(self, problem: Problem) -> list[int]:
        text = user_turn(self.tokenizer, f"{problem.statement.strip()}\n\n{self.decoding.instruction}")
        special = self.tokenizer.chat_template is None
        return token_ids(self.tokenizer, text, special=special)[0].tolist()

    def _answers(self, held: KVCache, prompts: Sequence[Sequence[int]], draw_seed: int) -> list[list[int]]:
        """The tokens that each prompt is answered with, up to one that ends an answer."""
        device, texts = self.model.device, [torch.tensor(prompt) for prompt in prompts]
        rows, mask = (
            pad_sequence(parts, batch_first=True, padding_side="left")
            for parts in (texts, [torch.ones_like(text) for text in texts])
        )
        ends = end_tokens(self.model, self.tokenizer)
        options = {**self.decoding.options, "eos_token_id": sorted(ends), "pad_token_id": min(ends)}
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(draw_seed)
            written = generate(self.model, rows.to(device), cache=held, attention_mask=mask.to(device), **options)
        return [until_end(row, ends) for row in written[:, rows.shape[1] :].tolist()]


def is_right(output: str, answer: str) -> bool:
    """Whether the final answer in a text equals `answer`, as math-verify finds and compares them."""
    grader = _grader()
    return bool(grader.verify(grader.parse(f"${answer}$"), grader.parse(output)))


@cache
def _grader() -> Any:
    try:
        import math_verify
    except ModuleNotFoundError as error:
        message = "grading needs math-verify: pip install 'kvkeep[eval]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return math_verify


def _relative(rows: Sequence[Row], records: Sequence[Any]) -> Iterator[Row]:
    """Each policy's accuracy as a share of the full cache's, over the same problems."""
    scores: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in records:
        arm = (record["task"], record["policy"], record["budget"])
        scores.setdefault(arm, {})[record["index"]] = record["score"]
    for row in rows:
        full = scores[row.task, FULL, FULL]
        if row.policy == FULL or not sum(full.values()):
            continue
        theirs = scores[row.task, row.policy, row.budget]
        above, below = [theirs[name] for name in full], list(full.values())
        bounds = bootstrap_ratio(above, below)
        yield replace(
            row,
            metric="relative_accuracy",
            value=sum(above) / sum(below),
            low=bounds.low,
            high=bounds.high,
            interval=bounds.method,
        )
