"""The fast prefix index.

`layout` says where everything lies, `kernels` is the compiled part, `index` the class around it. numba and llvmlite come with an
extra (``kvbus[index]``), so whoever uses this goes through `flash_maker`, and has `PlainIndex` where that fails.

Errors: `FlashUnavailable`.
"""

from collections.abc import Callable

from kvbus_blocks.flash.layout import MAX_BLOCKS
from kvbus_blocks.index import PrefixIndex


class FlashUnavailable(Exception):
    """``reason`` for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def flash_maker(max_blocks: int | None = None) -> Callable[[], PrefixIndex]:
    """What makes compiled indexes, for ``max_blocks`` distinct blocks each (None: the default of `FlashIndex`).

    Takes seconds where nothing is compiled yet; once per process is enough. Raise FlashUnavailable.
    """
    if max_blocks is not None and max_blocks > MAX_BLOCKS:
        raise FlashUnavailable(f"it takes {MAX_BLOCKS} blocks, not {max_blocks}")
    try:
        from kvbus_blocks.flash.compiled import CannotCompile, default_folder, load
        from kvbus_blocks.flash.index import DEFAULT_MAX_BLOCKS, FlashIndex
    except ImportError as problem:
        raise FlashUnavailable(f"{problem}: pip install 'kvbus[index]'") from problem
    try:
        kernels = load(default_folder())
    except CannotCompile as problem:
        raise FlashUnavailable(problem.reason) from problem
    return lambda: FlashIndex(kernels, max_blocks or DEFAULT_MAX_BLOCKS)
