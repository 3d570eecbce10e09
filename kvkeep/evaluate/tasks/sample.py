"""A sample, the splits that samples belong to, and how an answer is scored."""

from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One long prompt with its answers.

    `context` is the document with its instruction, complete without the question. `question` follows it directly (it
    begins with its own line break), and `answer_prefix` is what the answer begins with, or "". `answers` must occur in
    the output. `num_tokens` counts context, question and answer prefix as one text. Samples of different splits never
    have the same `seed`.
    """

    task: str
    split: str
    index: int
    seed: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    num_tokens: int

    @property
    def prompt(self) -> str:
        """Context and question as one text."""
        return self.context + self.question


def score(sample: Sample, output: str) -> float:
    """Share of the answers that occur in `output`, in any case; for questions over documents, 1 if any does.

    The two string matches of RULER (https://arxiv.org/abs/2404.06654).
    """
    found = [answer.lower() in output.lower() for answer in sample.answers]
    if sample.task.startswith("qa_"):
        return float(any(found))
    return sum(found) / len(found)
