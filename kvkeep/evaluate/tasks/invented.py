"""Documents about invented towns, people and companies, and questions that only they can answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from .draw import Draw
from .vocabulary import adjectives_and_nouns


class Case(NamedTuple):
    """A question, what answers it, the documents that hold the answer and others that do not."""

    question: str
    answers: list[str]
    documents: list[str]
    others: list[str]


class Link(NamedTuple):
    """What a field names: a thing of that kind, and words for it, such as "the town where {name} was born"."""

    kind: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of document: its text, a question for each field that can be asked for, and what its fields lead to."""

    text: str
    questions: dict[str, str]
    links: dict[str, Link]

    @cached_property
    def fields(self) -> list[str]:
        """The fields of the text, in alphabetical order: what is drawn must not depend on the order in a set."""
        return sorted({name for _, name, _, _ in Formatter().parse(self.text) if name} - {"name"})


_RAW = json.loads(Path(__file__).with_name("invented.json").read_text(encoding="utf-8"))
LISTS: dict[str, list[str]] = {name: words.split() for name, words in _RAW["lists"].items()}
KINDS = {
    name: Kind(
        text=raw["text"],
        questions=raw["questions"],
        links={field: Link(**link) for field, link in raw["links"].items()},
    )
    for name, raw in _RAW["kinds"].items()
}
LINKS = [(kind, field) for kind, source in KINDS.items() for field in source.links]


def ask(draw: Draw, num_hops: int, num_others: int) -> Case:
    """A question over one document, or two of which the first names the second, and `num_others` further documents."""
    if num_hops == 1:
        kind = draw.random.choice(list(KINDS))
        things = [_thing(draw, kind)]
        about = things[0]["name"]
    else:
        source, field = draw.random.choice(LINKS)
        kind, words = KINDS[source].links[field]
        things = [_thing(draw, source), _thing(draw, kind)]
        things[0][field] = things[1]["name"]
        about = words.format(**things[0])
    asked = draw.random.choice(list(KINDS[kind].questions))
    question = KINDS[kind].questions[asked].format(name=about)
    others = _others(draw, {thing["name"] for thing in things}, num_others)
    return Case(question, [things[-1][asked]], [_text(thing) for thing in things], others)


def _others(draw: Draw, taken: set[str], count: int) -> list[str]:
    """Documents about things of other names."""
    documents: list[str] = []
    while len(documents) < count:
        thing = _thing(draw, draw.random.choice(list(KINDS)))
        if thing["name"] not in taken:
            taken.add(thing["name"])
            documents.append(_text(thing))
    return documents


def _thing(draw: Draw, kind: str) -> dict[str, str]:
    """All fields of one thing of that kind."""
    return {"kind": kind, "name": NAMES[kind](draw), **{field: FIELDS[field](draw) for field in KINDS[kind].fields}}


def _text(thing: dict[str, str]) -> str:
    return KINDS[thing["kind"]].text.format(**thing)


def _word(draw: Draw, ends: str) -> str:
    """A name of three syllables; the first is the split's own."""
    pick = draw.random.choice
    return pick(draw.own(LISTS["starts"])) + pick(LISTS["middles"]) + pick(LISTS[ends])


def _person(draw: Draw) -> str:
    return f"{draw.random.choice(LISTS['first_names'])} {_word(draw, 'surnames')}"


def _emblem(draw: Draw) -> str:
    adjectives, nouns = adjectives_and_nouns(None)
    return f"{draw.random.choice(draw.own(adjectives))} {draw.random.choice(nouns)}".title()


def _company(draw: Draw) -> str:
    return f"{_word(draw, 'surnames')} and Sons"


def _place(draw: Draw) -> str:
    return _word(draw, "places")


def _between(low: int, high: int) -> Callable[[Draw], str]:
    return lambda draw: str(draw.random.randrange(low, high))


def _one_of(name: str) -> Callable[[Draw], str]:
    return lambda draw: draw.random.choice(LISTS[name])


FIELDS: dict[str, Callable[[Draw], str]] = {
    "river": lambda draw: _word(draw, "rivers"),
    "year": _between(1500, 1950),
    "people": _between(1100, 9900),
    "metres": _between(20, 90),
    "month": _one_of("months"),
    "goods": _one_of("goods"),
    "trade": _one_of("trades"),
    "work": lambda draw: f"The {_emblem(draw)}",
    "owner": _company,
    **dict.fromkeys(("birthplace", "seat", "place"), _place),
    **dict.fromkeys(("architect", "teacher", "founder", "captain", "donor"), _person),
}
NAMES: dict[str, Callable[[Draw], str]] = {
    "town": _place,
    "person": _person,
    "company": _company,
    "ship": _emblem,
    "museum": lambda draw: _word(draw, "surnames"),
}
