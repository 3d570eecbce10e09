"""The pages' templates: files beside this one, which may include each other."""

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2


def part(name: str) -> str:
    """The text of one of the files that pages are made of."""
    return files("kvkeep.report").joinpath(name).read_text("utf-8")


def environment() -> "jinja2.Environment":
    """Where templates are found; every value in them is escaped, and one that is missing is an error."""
    import jinja2

    return jinja2.Environment(loader=jinja2.FunctionLoader(part), autoescape=True, undefined=jinja2.StrictUndefined)
