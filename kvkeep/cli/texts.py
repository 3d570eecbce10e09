"""Texts to read, for the commands that take them."""

from typing import TYPE_CHECKING

from .console import note

if TYPE_CHECKING:
    from kvkeep.corpus import Reading
    from kvkeep.recorder import Item


def texts_of(data: list[str], reading: "Reading") -> "list[Item]":
    """The texts of all sources of data, with a note of those that were passed over."""
    from kvkeep.corpus import harvest

    found = [harvest(source, reading) for source in data]
    for harvested in found:
        if harvested.note:
            note(harvested.note)
    return [item for harvested in found for item in harvested.items]
