"""The index that a replay uses: the compiled one where it can be had, else the plain one, which is slower and knows the same."""

from collections.abc import Callable

from kvbus_blocks.flash import FlashUnavailable, flash_maker
from kvbus_blocks.index import PrefixIndex
from kvbus_blocks.plain_index import PlainIndex


def index_maker(note: Callable[[str], None]) -> Callable[[], PrefixIndex]:
    """``note`` hears why it is the plain one."""
    try:
        return flash_maker()
    except FlashUnavailable as problem:
        note(f"the plain index is used, which is slower: {problem.reason}")
        return PlainIndex
