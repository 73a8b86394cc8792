"""What a worker does: both, prefill (computes prompts for others) or decode (has them computed where that is better)."""

from enum import StrEnum


class Role(StrEnum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
