"""Problems with known answers, from JSON lines such as those of GSM8K, MATH-500, AIME and HMMT."""

from pathlib import Path

from ..evaluate.solving import Problem
from .lines import PROMPTS, each_line, first_of, object_of

STATEMENTS = ("problem", *PROMPTS)
# GSM8K puts its answer behind the way to it
_BEHIND = "####"


def problems_of(path: Path, most: int | None = None) -> list[Problem]:
    """The first problems of a file: a line holds a statement (STATEMENTS) and an `answer`, a text or a number.

    Args:
        most: how many; None takes all.

    Raises:
        ValueError: for a file without lines, and a line without statement or answer.
        FileNotFoundError: for a file that is not there.
    """

    def build(name: str, line: str) -> Problem:
        record = object_of(line)
        statement, answer = first_of(record, STATEMENTS), record.get("answer")
        if not isinstance(statement, str) or not isinstance(answer, str | int | float):
            raise ValueError(f"it needs a {' or '.join(STATEMENTS)} and an answer; it has {', '.join(record)}")
        return Problem(source=path.stem, name=name, statement=statement, answer=str(answer).split(_BEHIND)[-1].strip())

    return list(each_line(path, build))[:most]
