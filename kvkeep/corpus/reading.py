"""How data becomes prompts and futures, and what every kind of data hands on.

n prompt tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..budget import Budget
from ..evaluate.tasks import SPLITS
from ..names import nearest
from ..recorder import Branch

DATA, GREEDY = "data", "greedy"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt and what may follow it.

    Attributes:
        source: as in `Trace`.
        name: tells it from others of its source.
        given: whole futures that the data say.
        leads: what stands between the prompt and the model's own answer, such as a question; each gives one future.
        num_new: longest answer that makes sense.
    """

    source: str
    name: str
    token_ids: Int[Tensor, "1 n"]
    given: Sequence[Int[Tensor, "1 _"]] = ()
    leads: Sequence[Int[Tensor, "1 _"]] = field(default_factory=lambda: [torch.zeros(1, 0, dtype=torch.long)])
    num_new: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How data becomes prompts and futures.

    Attributes:
        split: "train", "validation" or "test". What the task generator does not split itself is split 8 : 1 : 1, by a
            digest of each piece.
        num_tokens: most tokens of a prompt (for tasks without the chat template's); tasks and text have about as many.
        num_prompts: most prompts from each source of data.
        futures: "data" (what the data say follows, else the model's greedy answer), "greedy", or a number of
            continuations to sample.
        future_tokens: most tokens of a future; a question behind the prompt is not counted.
        least_tokens, least_future: fewest tokens of a prompt, and of a future that the data say; shorter ones are
            passed over.
        seed: of where conversations are cut.
        haystack, templates, documents: other text, words and questions for tasks (see `tasks.generate`).

    Raises:
        ValueError: for what is not known, and for numbers that leave nothing to learn from.
    """

    tokenizer: Any
    split: str = "train"
    num_tokens: int = 1500
    num_prompts: int = 100
    futures: str = DATA
    future_tokens: int = 64
    least_tokens: int = 0
    least_future: int = 1
    seed: int = 0
    haystack: Path | None = None
    templates: Path | None = None
    documents: Path | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split {self.split!r} is not known: {nearest(self.split, SPLITS)}")
        if self.num_prompts < 1 or self.future_tokens < 1:
            raise ValueError(
                f"prompts and tokens of a future must be at least 1, got {self.num_prompts} and {self.future_tokens}"
            )
        if not 1 <= self.least_future <= self.future_tokens:
            raise ValueError(
                f"the shortest future must have 1 to {self.future_tokens} tokens, the longest, got {self.least_future}"
            )
        if self.num_tokens < self.fewest:
            raise ValueError(
                f"a prompt of {self.num_tokens} tokens is {self._too_few}; give a length of {self.fewest} or more"
            )
        if self.futures not in (DATA, GREEDY) and not self.sampled:
            raise ValueError(f"futures are data, greedy or how many to sample, got {self.futures!r}")

    @property
    def fewest(self) -> int:
        """Tokens of the shortest prompt that is wanted and in which there is something to choose."""
        return max(Budget().floor + 1, self.least_tokens)

    @property
    def _too_few(self) -> str:
        return "protected as a whole" if self.fewest > self.least_tokens else "shorter than the shortest wanted"

    @property
    def most(self) -> int:
        """Tokens of the longest prompt, a chat template's included."""
        return self.num_tokens + 64

    @property
    def sampled(self) -> int:
        """Continuations to sample; 0 for none."""
        return int(self.futures) if self.futures.isdecimal() else 0

    def branches(self, draft: Draft) -> list[Branch]:
        """The futures of a prompt; none if the data say that nothing follows."""
        if self.futures == DATA and draft.given:
            given = [Branch(future[:, : self.future_tokens]) for future in draft.given]
            return [branch for branch in given if branch.longest >= self.least_future]
        num_new = min(self.future_tokens, draft.num_new or self.future_tokens)
        return [Branch(lead, num_new) for lead in draft.leads for _ in range(self.sampled or 1)]


def cut(source: str, name: str, token_ids: Int[Tensor, "1 n"], at: int) -> Draft:
    """A text whose first `at` tokens are the prompt and whose others are its future."""
    return Draft(source=source, name=name, token_ids=token_ids[:, :at], given=[token_ids[:, at:]])


def split_of(text: str) -> str:
    """Of ten pieces about eight are for training, one for validation and one for tests."""
    train, validation, test = SPLITS
    return [*[train] * 8, validation, test][int(digest(text)[:8], 16) % 10]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it first, e.g. with iconv") from error
