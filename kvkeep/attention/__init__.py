"""Attention over slots and over codes, and the attention mass that each slot or window receives."""

from .coded import CodedAttention, CodedPart, CodedTokens, WindowAttention, coded_part, read_blocks, read_coded
from .parts import Part
from .shared import attend_shared
from .streamed import AttentionMass, attend

__all__ = [
    "AttentionMass",
    "CodedAttention",
    "CodedPart",
    "CodedTokens",
    "Part",
    "WindowAttention",
    "attend",
    "attend_shared",
    "coded_part",
    "read_blocks",
    "read_coded",
]
