"""How a change tells running matches that what they have come across is about to mean something else."""

from kvbus_blocks.flash.kernels.compiling import Words, fence, inner
from kvbus_blocks.flash.layout import EPOCH


@inner
def announce(h: Words) -> None:
    """Call it before the number of a node or of an owner set that matches may still know is used again."""
    fence()
    h[EPOCH] += 1
    fence()
