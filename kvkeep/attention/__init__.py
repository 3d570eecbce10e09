"""Attention over slots, and the attention mass each slot receives."""

from .streamed import AttentionMass, attend

__all__ = ["AttentionMass", "attend"]
