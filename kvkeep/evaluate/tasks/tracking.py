"""Variable tracking: a value is copied from variable to variable, among noise."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from .draw import Draw, insert
from .recipe import Recipe
from .wording import Draft

HOPS = 4
# the example's names are shorter, so that none of them is an answer
NAME, EXAMPLE_NAME = 5, 3
EXAMPLE_LINES = 10


@dataclass(frozen=True)
class Tracking(Recipe):
    """One variable gets a number and four more copy it in a chain; the question asks for all that hold the number."""

    family: ClassVar[str] = "variable_tracking"
    smallest: ClassVar[int] = HOPS + 1

    def build(self, size: int) -> Draft:
        draw = self.setting.draw
        example = ""
        if self.with_example:
            shown = self._chain(draw, EXAMPLE_LINES, EXAMPLE_NAME)
            example = f"{shown.text} {' '.join(shown.answers)}\n\n\n\n"
        return self._chain(draw, size, NAME, example)

    def _chain(self, draw: Draw, num_lines: int, letters: int, example: str = "") -> Draft:
        names = draw.distinct(HOPS + 1, lambda: draw.code(letters, upper=True))
        value = draw.number(5)
        copies = [f"VAR {name} = VAR {source}" for source, name in pairwise(names)]
        noise = f"{self.setting.wording.line('_noise_haystack')}\n"
        depths = sorted(draw.depths(len(names)))
        mixed = insert([noise] * num_lines, [f"VAR {names[0]} = {value}", *copies], depths)
        return self.template.draft(" ".join(mixed), names, example=example, query=value, num_v=str(len(names)))
