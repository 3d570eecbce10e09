"""Fill a length: the largest draft that does not exceed it."""

from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

from .wording import Draft


class Fitted(NamedTuple):
    """A draft and its length in tokens."""

    draft: Draft
    num_tokens: int


def fit(build: Callable[[int], Draft], count_tokens: Callable[[str], int], limit: int, smallest: int) -> Fitted:
    """The largest of `build(smallest)`, `build(smallest + 1)`, ... that has at most `limit` tokens.

    Drafts must grow with their size. Some ten to fifteen are counted.

    Raises:
        ValueError: if even the smallest is too long, with the length that it needs.
    """

    def counted(size: int) -> Fitted:
        draft = build(size)
        return Fitted(draft, count_tokens(draft.text))

    low, best = smallest, counted(smallest)
    if best.num_tokens > limit:
        raise ValueError(f"num_tokens={limit} is too small; with this tokenizer it takes at least {best.num_tokens}")
    high, above = _bracket(counted, limit, smallest)
    for interpolate in cycle((True, False)):
        if high - low <= 1 or best.num_tokens == limit:
            break
        share = (limit - best.num_tokens) / (above - best.num_tokens) if interpolate else 0.5
        size = min(max(low + int(share * (high - low)), low + 1), high - 1)
        tried = counted(size)
        if tried.num_tokens <= limit:
            low, best = size, tried
        else:
            high, above = size, tried.num_tokens
    return best


def _bracket(counted: Callable[[int], Fitted], limit: int, smallest: int) -> tuple[int, int]:
    """A size whose draft is too long, and its length."""
    size = 2 * smallest + 8
    while (tokens := counted(size).num_tokens) <= limit:
        # a counter that does not grow with its text would have us double for ever
        if size > 64 * (limit + smallest):
            raise ValueError(f"count_tokens gives {tokens} for a text of {size} pieces; every piece must count")
        size *= 2
    return size, tokens
