"""Which traces to train on, and which to validate on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .fingerprint import refuse_other_model
from .trace import Trace, TraceIndex, Traces


class Prompts(Sequence[Trace]):
    """Traces out of one or several folders; each is read when it is asked for."""

    def __init__(self, places: Sequence["_Place"]):
        self.sources = dict(sorted(Counter(place.source for place in places).items()))
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        return self._places[place].read()


@dataclass(frozen=True, eq=False)
class Data:
    """Prompts to train on and to validate on, and what they share."""

    index: TraceIndex
    prompts: Prompts
    validation: Prompts

    def summary(self) -> dict[str, Any]:
        """What a policy's manifest says of it."""
        return {
            "model": self.index.model,
            "prompts": self.prompts.sources,
            "validation": self.validation.sources,
            "settings": self.index.settings,
            "made_by": self.index.made_by,
        }


class _Place(NamedTuple):
    """Where a trace lies, and what is known of it without reading its tensors."""

    traces: Traces
    number: int
    key: str
    source: str
    split: str
    num_tokens: int

    def read(self) -> Trace:
        return self.traces[self.number]


def open_data(
    folders: Sequence[str | Path],
    *,
    sources: Sequence[str] = (),
    num_prompts: int | None = None,
    least_tokens: int = 0,
    share: float = 0.1,
    seed: int = 0,
) -> Data:
    """The training and validation prompts of folders of traces; test prompts are left alone.

    Args:
        sources: only prompts whose source begins with one of these.
        least_tokens: leave shorter prompts out.
        num_prompts: train on so many, drawn by `seed`; a smaller number draws some of the same.
        share: of the training prompts, to validate on where none were recorded for that.

    Raises:
        ValueError: for folders of different models or layers, and where too few prompts are left.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to validate on must lie between 0 and 1, got {share}")
    opened = [Traces(folder) for folder in folders]
    _refuse_unlike(opened)
    there = [place for place in _places(opened) if place.num_tokens >= least_tokens]
    wanted = [place for place in there if place.source.startswith(tuple(sources) or "")]
    prompts, validation = _split(wanted, share, seed)
    if len(prompts) < max(1, num_prompts or 0) or not validation:
        known = ", ".join(sorted({place.source for place in there}))
        raise ValueError(
            f"wanted are {num_prompts or 'some'} prompts to train on and some to validate on, from "
            f"{', '.join(sources) or 'any source'}, of {least_tokens} tokens or more; "
            f"there are {len(prompts)} and {len(validation)}. Sources: {known}"
        )
    return Data(opened[0].index, Prompts(prompts[:num_prompts]), Prompts(validation))


def _places(opened: Sequence[Traces]) -> Iterator[_Place]:
    for traces in opened:
        for number, trace in enumerate(traces):
            yield _Place(traces, number, trace.key, trace.source, trace.split, trace.num_tokens)


def _split(places: Sequence[_Place], share: float, seed: int) -> tuple[list[_Place], list[_Place]]:
    """Training prompts in an order drawn by `seed`, and validation prompts, held out if there are none."""
    train = [place for place in places if place.split == "train"]
    validation = [place for place in places if place.split == "validation"]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    train = [train[number] for number in order]
    if validation or len(train) < 2:
        return train, validation
    held_out = max(1, round(share * len(train)))
    return train[held_out:], train[:held_out]


def _refuse_unlike(opened: Sequence[Traces]) -> None:
    first = opened[0]
    for other in opened[1:]:
        refuse_other_model(other.fingerprint, first.fingerprint, other.folder)
        if (other.index.layers, other.index.heads) != (first.index.layers, first.index.heads):
            raise ValueError(f"{other.folder} has traces of other layers or heads than {first.folder}")
