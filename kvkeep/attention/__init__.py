"""Attention over slots and over codes, and the attention mass that each slot or window receives."""

from .coded import CodedAttention, CodedTokens, read_coded
from .parts import Part
from .shared import attend_shared
from .streamed import AttentionMass, attend

__all__ = ["AttentionMass", "CodedAttention", "CodedTokens", "Part", "attend", "attend_shared", "read_coded"]
