"""A real chapter with invented facts in it, for the demo."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from .fitting import fit
from .prose import BUNDLED, HEADING, paragraphs, sentences
from .wording import Draft

NUM_FACTS = 6


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A question, its short answer, and the sentence that gives it."""

    question: str
    answer: str
    sentence: str


# a sentence, its question in the same words, because small models find those best, and answers that neither the bundled
# text nor another answer holds
FORMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "The number painted on the old lighthouse door is {}.",
        "What is the number painted on the old lighthouse door?",
        tuple(str(number) for number in range(10_347, 100_000, 1_123)),
    ),
    (
        "The price of the silver clock is {}.",
        "What is the price of the silver clock?",
        tuple(f"{number} dollars" for number in range(207, 1_000, 31)),
    ),
    (
        "The registration of the green delivery van is {}.",
        "What is the registration of the green delivery van?",
        tuple(f"KX{number}" for number in range(207, 1_000, 17)),
    ),
    (
        "The hobby of the station master is {}.",
        "What is the hobby of the station master?",
        ("origami", "juggling", "falconry", "topiary", "pottery", "calligraphy"),
    ),
    (
        "The favourite dessert of the duchess is {}.",
        "What is the favourite dessert of the duchess?",
        ("tiramisu", "baklava", "cheesecake", "marzipan", "sorbet", "meringue"),
    ),
    (
        "The colour of the ambassador's umbrella is {}.",
        "What is the colour of the ambassador's umbrella?",
        ("turquoise", "magenta", "ochre", "maroon", "khaki", "indigo"),
    ),
    (
        "The ship that brought the piano is called the {}.",
        "What is the ship that brought the piano called?",
        ("Albatross", "Walrus", "Cormorant", "Narwhal", "Kingfisher", "Pelican"),
    ),
    (
        "The birthplace of the mapmaker is {}.",
        "What is the birthplace of the mapmaker?",
        ("Montevideo", "Reykjavik", "Valparaiso", "Ljubljana", "Casablanca", "Tallinn"),
    ),
    (
        "The animal on the seal of the old guild is a {}.",
        "What is the animal on the seal of the old guild?",
        ("hedgehog", "rhinoceros", "salamander", "porcupine", "flamingo", "pangolin"),
    ),
)


def demo_document(num_tokens: int, count_tokens: Callable[[str], int], seed: int) -> tuple[str, list[Fact]]:
    """A chapter of at most `num_tokens` tokens with six facts in it, spread from front to back, and the facts.

    Raises:
        ValueError: if so few tokens cannot hold the facts.
    """
    random = Random(seed)
    units = _chapter_units(random)
    facts = [_fact(random, *form) for form in random.sample(FORMS, NUM_FACTS)]
    jitter = [random.random() for _ in facts]

    def build(size: int) -> Draft:
        return _draft(plant(_cut(units, size), facts, jitter))

    return fit(build, count_tokens, num_tokens, 1).draft.context, facts


def chapter(num_tokens: int, count_tokens: Callable[[str], int], seed: int) -> str:
    """Unbroken text of at most `num_tokens` tokens from the beginning of a chapter of the bundled books."""
    units = _chapter_units(Random(seed))
    return fit(lambda size: _draft("".join(_cut(units, size))), count_tokens, num_tokens, 1).draft.context


def plant(units: Sequence[str], facts: Sequence[Fact], jitter: Sequence[float]) -> str:
    """The units (see `_units`) with every fact as a paragraph of its own, or between sentences in a longer one.

    Fact i stands in the i-th of as many equal stretches of the text, as far into it as `jitter[i]` (0 to 1) says.
    """
    mixed = list(units)
    for order, fact in reversed(list(enumerate(facts))):
        place = int((order + jitter[order]) / len(facts) * len(units))
        starts_paragraph = place == 0 or units[place - 1].endswith("\n")
        mixed.insert(place, fact.sentence + ("\n\n" if starts_paragraph else " "))
    return "".join(mixed).rstrip()


def _fact(random: Random, sentence: str, question: str, answers: Sequence[str]) -> Fact:
    answer = random.choice(answers)
    return Fact(question=question, answer=answer, sentence=sentence.format(answer))


def _draft(text: str) -> Draft:
    return Draft(context=text.rstrip(), question="", answer_prefix="", answers=())


def _cut(units: Sequence[str], size: int) -> list[str]:
    """The first units, from the front again if there are not enough."""
    return [units[at % len(units)] for at in range(size)]


def _chapter_units(random: Random) -> list[str]:
    """The units of a book, from one of its chapters on and round to where it began."""
    units = random.choice(_books())
    start = random.choice([at for at, unit in enumerate(units) if unit.startswith(HEADING)])
    rounded = [*units[start:], *units[:start]]
    return [unit.removeprefix(HEADING) for unit in rounded]


@lru_cache(maxsize=1)
def _books() -> tuple[tuple[str, ...], ...]:
    return tuple(_units(paragraphs(file)) for file in sorted(BUNDLED.glob("*.txt")))


def _units(lines: Sequence[str]) -> tuple[str, ...]:
    """Sentences, each with the space or the empty line that follows it."""
    cut = [sentences(line) for line in lines]
    return tuple(f"{one}{' ' if one is not line[-1] else chr(10) * 2}" for line in cut for one in line)
