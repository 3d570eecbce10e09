"""The pool: of the tokens that have left the recent window, the `size` that a running top-k keeps.

A heads, n tokens of a sequence, m of them that enter the pool one by one, in order of position.

A token's worth falls with its age at the same rate for all tokens of a head, so their order never changes: it is that
of `static_priority`, one number a token. What a pool drops never comes back. Source: KVpop, arXiv 2607.05061.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


class Window(NamedTuple):
    """What never competes: the first `sinks` tokens and the last `recent`."""

    sinks: int
    recent: int

    def pool(self, num_tokens: int) -> slice:
        """Places of the tokens that have left the recent window of a sequence so long."""
        return slice(self.sinks, max(self.sinks, num_tokens - self.recent))


def static_priority(
    scores: Float[Tensor, "*A n"], positions: Int[Tensor, "*_ n"], log_decay: Float[Tensor, "*_ 1"]
) -> Float[Tensor, "*A n"]:
    """Worth by which tokens rank at any time: the score minus position times the logarithm of a step's decay."""
    return scores - positions * log_decay


def ranks(priority: Float[Tensor, "*A m"]) -> Int[Tensor, "*A m"]:
    """Place of each token from the greatest priority (0) to the least; of equal ones the newest is first."""
    m = priority.shape[-1]
    # a stable sort from the newest on
    order = m - 1 - priority.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(m, device=order.device).expand_as(order))


def cutoffs(ranks: Int[Tensor, "A m"], size: int) -> Int[Tensor, "A m"]:
    """Rank of the last token in the pool after each token came: those at most that are held, of the ones so far.

    While fewer than `size` came, all are held. Found for all tokens at once, in a wavelet matrix: level by level, from
    the ranks' first bit to their last, in how many of the tokens so far that bit is 0.
    """
    m = ranks.shape[1]
    place = torch.arange(m, device=ranks.device)
    # the tokens so far stand from `low` to `high` in each level, and the one that is sought is the `nth` of them
    low, high = torch.zeros_like(ranks), (place + 1).expand_as(ranks)
    nth, found, level = high.clamp(max=size) - 1, torch.zeros_like(ranks), ranks
    for bit in reversed(range(max(1, (m - 1).bit_length()))):
        is_one = (level >> bit) & 1
        zeros = pad((1 - is_one).cumsum(-1), (1, 0))
        all_zeros = zeros[:, -1:]
        zeros_low, zeros_high = zeros.gather(1, low), zeros.gather(1, high)
        is_zero = nth < zeros_high - zeros_low
        nth = torch.where(is_zero, nth, nth - (zeros_high - zeros_low))
        low = torch.where(is_zero, zeros_low, all_zeros + low - zeros_low)
        high = torch.where(is_zero, zeros_high, all_zeros + high - zeros_high)
        found = found + torch.where(is_zero, 0, 1 << bit)
        # tokens with this bit 0 first, then the others, each in the order in which they came
        to = torch.where(is_one.bool(), all_zeros + place - zeros[:, :-1], zeros[:, :-1])
        level = torch.empty_like(level).scatter_(1, to, level)
    return found


class Held(NamedTuple):
    """What a pool holds at every moment, in O(n) numbers.

    Attributes:
        window: what is held beside the pool.
        ranks: of every token; of those that never enter the pool they mean nothing.
        last: rank of the last token held, after none, one, two, ... have entered; -1 where none is.
    """

    window: Window
    ranks: Int[Tensor, "A n"]
    last: Int[Tensor, "A m1"]

    def visible(self, queries: Int[Tensor, " t"]) -> Bool[Tensor, "A t n"]:
        """Which tokens the query at each of these places finds when it is read into a cache token by token.

        It sees itself, and what was held once the token before it had come: sinks, recent tokens, and the pool.
        """
        place, (sinks, recent) = torch.arange(self.ranks.shape[1], device=self.ranks.device), self.window
        left = queries[:, None] - recent
        pooled = self.ranks[:, None] <= self.last[:, (left[:, 0] - sinks).clamp(min=0), None]
        always = (place < sinks) | (place >= left)
        return (always | pooled) & (place <= queries[:, None])


def hold(priority: Float[Tensor, "A n"], window: Window, size: int) -> Held:
    """What a pool of `size` holds, by static priorities."""
    entered = window.pool(priority.shape[1])
    ranked = ranks(priority[:, entered])
    last = cutoffs(ranked, size) if size else torch.full_like(ranked, -1)
    return Held(window, pad(ranked, (entered.start, priority.shape[1] - entered.stop)), pad(last, (1, 0), value=-1))


class Newcomers(NamedTuple):
    """What a pool did with each token at the moment it entered.

    Attributes:
        kept: whether it was held.
        boundary: place, among the tokens that enter, of the last one held at that moment.
    """

    kept: Bool[Tensor, "A m"]
    boundary: Int[Tensor, "A m"]


def newcomers(worth: Float[Tensor, "A m"], size: int) -> Newcomers:
    """How a pool of `size` by this worth treats the tokens that enter it."""
    ranked = ranks(worth)
    last = cutoffs(ranked, size)
    place = torch.empty_like(ranked).scatter_(1, ranked, torch.arange(ranked.shape[1]).to(ranked).expand_as(ranked))
    return Newcomers(ranked <= last, place.gather(1, last))
