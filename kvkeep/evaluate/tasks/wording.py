"""The words around a task: our own, or those of a file in the form of RULER's templates."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

OWN = Path(__file__).with_name("wording.json")
# what each part may fill in, besides {context} in the first five
FIELDS: dict[str, frozenset[str]] = {
    "niah": frozenset({"type_needle_v", "query"}),
    "variable_tracking": frozenset({"query", "num_v"}),
    "common_words_extraction": frozenset(),
    "freq_words_extraction": frozenset(),
    "qa": frozenset({"query"}),
    "_noise_haystack": frozenset(),
    "_needle": frozenset({"type_needle_v", "key", "value"}),
}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt with its answers, before it is known whether it has the right length."""

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that is counted."""
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True, kw_only=True)
class Template:
    """The text before and after the context, and what the answer begins with; {fields} are still open."""

    before: str
    after: str
    answer_prefix: str
    max_new_tokens: int

    def singular(self) -> "Template":
        """The same words for a task with one answer: "Some ... are" becomes "A ... is"."""
        before, after, prefix = map(_singular, (self.before, self.after, self.answer_prefix))
        return Template(before=before, after=after, answer_prefix=prefix, max_new_tokens=self.max_new_tokens)

    def draft(self, context: str, answers: list[str], *, example: str = "", **fields: str) -> Draft:
        """The prompt around `context`, with an answered example before it if one is given."""
        before, question, prefix = (text.format(**fields) for text in (self.before, self.after, self.answer_prefix))
        return Draft(
            context=example + before + context, question=question, answer_prefix=prefix, answers=tuple(answers)
        )


@dataclass(frozen=True)
class Wording:
    """The parts of one file. ValueError, naming file and part, for what is missing or cannot be filled in."""

    source: Path
    parts: dict[str, Any]

    @classmethod
    def read(cls, path: Path | None) -> "Wording":
        """The wording in a JSON file (docs/tasks.md shows the form), or the package's own."""
        source = path or OWN
        try:
            parts = json.loads(source.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read templates from {source}: {error}; {_way_out()}") from error
        if not isinstance(parts, dict):
            raise ValueError(f"templates in {source} are a {type(parts).__name__}, not an object; {_way_out()}")
        return cls(source, parts)

    def template(self, part: str) -> Template:
        """The template of a family of tasks."""
        raw = self._part(part, dict)
        text, prefix, length = (raw.get(key) for key in ("template", "answer_prefix", "tokens_to_generate"))
        if not isinstance(text, str) or not isinstance(prefix, str) or type(length) is not int or length < 1:
            raise self._error(
                part, 'needs "template" and "answer_prefix" as text and "tokens_to_generate" as a number above 0'
            )
        if text.count("{context}") != 1:
            raise self._error(
                part, f"needs {{context}} once in its template, it has it {text.count('{context}')} times"
            )
        before, after = text.split("{context}")
        for piece in (before, after, prefix):
            self._check_fields(part, piece)
        return Template(before=before, after=after, answer_prefix=prefix, max_new_tokens=length)

    def line(self, part: str) -> str:
        """A single line, such as "_needle", its fields still open."""
        line = self._part(part, str)
        self._check_fields(part, line)
        return line

    def _part(self, part: str, kind: type) -> Any:
        if not isinstance(self.parts.get(part), kind):
            raise self._error(part, f"is missing or no {'object' if kind is dict else 'text'}")
        return self.parts[part]

    def _check_fields(self, part: str, text: str) -> None:
        try:
            used = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        except ValueError as error:
            raise self._error(part, f"has braces that do not match ({error})") from error
        if used - FIELDS[part]:
            allowed = ", ".join(f"{{{name}}}" for name in sorted(FIELDS[part])) or "no field"
            raise self._error(part, f"uses {', '.join(sorted(used - FIELDS[part]))!r}; it may use {allowed}")

    def _error(self, part: str, what: str) -> ValueError:
        return ValueError(f"{part!r} in the templates of {self.source} {what}; {_way_out()}")


def _singular(text: str) -> str:
    text = re.sub(r"\bSome\b", "A", text)
    return re.sub(r"\bare( all)?\b", "is", text)


def _way_out() -> str:
    return f"leave templates out for the package's own, or see {OWN.name} in {__package__} for the form"
