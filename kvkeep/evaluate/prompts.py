"""The prompts of an evaluation: which there are, and the parts in which a cache meets them.

P compressed tokens, F tokens that follow, L tokens of the future, T tokens.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from .tasks import Sample, generate

QUESTION_PLACES = ("inside", "after")


class Prompt(NamedTuple):
    """What is compressed, what is read behind it, and what follows in a right answer (the oracle's future)."""

    compressed: Int[Tensor, "1 P"]
    follow_up: Int[Tensor, "1 F"]
    future: Int[Tensor, "1 L"]


def encode(tokenizer: Any, sample: Sample, question: str) -> Prompt:
    """The sample as one user turn, and the answer's beginning in the assistant's turn.

    The parts are tokenised apart, so that both places of the question give the same tokens in the same order:

    - "inside": context, question and the end of the turn are compressed; the answer's beginning follows.
    - "after": the context is compressed; the question, the end of the turn and the answer's beginning follow, as when
      someone asks about a document that was read before.

    Models without a chat template get the bare text.

    Raises:
        ValueError: if the chat template does not leave the question as it is.
    """
    text = user_turn(tokenizer, sample.prompt)
    asked = sample.question.strip()
    start = text.rfind(asked)
    if start < 0:
        raise ValueError(f"the model's chat template changes what a user says: it lost {asked!r}")
    parts = [
        token_ids(tokenizer, text[:start], special=tokenizer.chat_template is None),
        token_ids(tokenizer, text[start:]),
        token_ids(tokenizer, sample.answer_prefix),
    ]
    place = 2 if question == "inside" else 1
    follow_up = torch.cat(parts[place:], dim=1)
    right = token_ids(tokenizer, " " + ", ".join(sample.answers))
    return Prompt(torch.cat(parts[:place], dim=1), follow_up, torch.cat([follow_up, right], dim=1))


@dataclass(frozen=True, kw_only=True)
class Exam:
    """The prompts of an evaluation, in the order in which they are asked.

    Attributes:
        num_tokens: length of each, without the chat template's tokens.
        num_samples: prompts per task.
        max_new_tokens: longest answer; None takes each task's own.
        haystack, templates, data: other text, words and questions than the package's own (see `generate`).
    """

    tokenizer: Any
    tasks: tuple[str, ...]
    num_tokens: int
    split: str
    num_samples: int
    max_new_tokens: int | None = None
    haystack: Path | None = None
    templates: Path | None = None
    data: Path | None = None

    @property
    def places(self) -> list[tuple[str, int]]:
        """Task and number of each prompt."""
        return list(product(self.tasks, range(self.num_samples)))

    def sample(self, task: str, index: int) -> Sample:
        """One prompt with its answers, the same at each call."""
        sample = generate(
            task,
            num_tokens=self.num_tokens,
            count_tokens=lambda text: len(self.tokenizer(text, add_special_tokens=False)["input_ids"]),
            split=self.split,
            index=index,
            haystack=self.haystack,
            templates=self.templates,
            data=self.data,
        )
        return sample if self.max_new_tokens is None else replace(sample, max_new_tokens=self.max_new_tokens)

    def check(self) -> None:
        """Refuse what cannot be asked, before anything is.

        Raises:
            ValueError: for numbers below 1, lengths that a task does not fit in, unusable files, and more samples
                than a split's documents give.
        """
        for name in ("num_tokens", "num_samples", "max_new_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        for task in self.tasks:
            if task.startswith("qa_") and self.data is not None:
                self._check_enough(task)
            else:
                self.sample(task, self.num_samples - 1)

    def _check_enough(self, task: str) -> None:
        # real documents come with so many questions; after the last they begin again
        asked = {self.sample(task, index).question for index in range(self.num_samples)}
        if len(asked) < self.num_samples:
            raise ValueError(
                f"{task}: the split {self.split!r} of {self.data} has {len(asked)} questions, {self.num_samples} were "
                "asked for; lower num_samples, or leave data out for invented documents"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What else changes a prompt or its answer, beside task, number and length; files as digests."""
        files = {name: _digest(getattr(self, name)) for name in ("haystack", "templates", "data")}
        return {"split": self.split, "max_new_tokens": self.max_new_tokens, **files}


def user_turn(tokenizer: Any, text: str) -> str:
    """The text as one user turn with the beginning of an answer, bare for a model without a chat template."""
    if tokenizer.chat_template is None:
        return text
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def token_ids(tokenizer: Any, text: str, *, special: bool = False) -> Int[Tensor, "1 T"]:
    """The tokens of a text, with those that a model puts before one if `special`."""
    return torch.tensor([tokenizer(text, add_special_tokens=special)["input_ids"]], dtype=torch.long)


def _digest(path: Path | None) -> str | None:
    """Of a file, or of a folder's files with their names."""
    if path is None:
        return None
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.relative_to(path)}\0".encode())
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:16]
