"""What a task is made from, and what every task has to say."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from .draw import Draw
from .wording import Draft, Template, Wording

# from this length on there is room for an answered example before the task
EXAMPLE_FROM = 1024


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sample asked for: where it stands, how long it is, and from what text it is made."""

    split: str
    index: int
    seed: int
    num_tokens: int
    wording: Wording
    haystack: Path | None = None
    data: Path | None = None

    @property
    def draw(self) -> Draw:
        """The sample's random things, from the start."""
        return Draw(self.split, self.seed)


@dataclass(frozen=True)
class Recipe(ABC):
    """One task in one setting: builds its prompt in any size.

    `build(size)` draws the same things for every size and grows with it. `family` names the task's words in a template
    file, `smallest` is the smallest size that makes sense.
    """

    setting: Setting
    family: ClassVar[str]
    smallest: ClassVar[int] = 1

    @abstractmethod
    def build(self, size: int) -> Draft:
        """The prompt with `size` units of filling."""

    @cached_property
    def template(self) -> Template:
        """The family's words."""
        return self.setting.wording.template(self.family)

    @property
    def with_example(self) -> bool:
        """Whether an answered example comes first."""
        return self.setting.num_tokens >= EXAMPLE_FROM
