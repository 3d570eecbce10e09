"""Attention over slots, and the attention mass each slot receives."""

from .shared import attend_shared
from .streamed import AttentionMass, attend

__all__ = ["AttentionMass", "attend", "attend_shared"]
