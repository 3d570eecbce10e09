"""Questions over numbered documents, most of which have nothing to do with them."""

from dataclasses import dataclass
from typing import ClassVar

from . import datasets, invented
from .recipe import Recipe
from .wording import Draft


@dataclass(frozen=True)
class Documents(Recipe):
    """A question whose answer stands in one document, or in a second one that the first leads to."""

    num_hops: int = 1
    family: ClassVar[str] = "qa"
    smallest: ClassVar[int] = 0

    def build(self, size: int) -> Draft:
        draw, data = self.setting.draw, self.setting.data
        if data is None:
            case = invented.ask(draw, self.num_hops, size)
        else:
            case = datasets.ask(draw, data, self.num_hops, self.setting.index, size)
        documents = [*case.documents, *case.others]
        draw.random.shuffle(documents)
        context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, 1))
        return self.template.draft(context, case.answers, query=case.question)
