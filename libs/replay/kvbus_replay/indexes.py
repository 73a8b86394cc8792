"""The index that a replay uses: the compiled one where it can be had, else the plain one, which is slower and knows the same."""

from collections.abc import Callable

from kvbus_blocks.index import PrefixIndex
from kvbus_blocks.plain_index import PlainIndex


def index_maker(note: Callable[[str], None]) -> Callable[[], PrefixIndex]:
    """``note`` hears why it is the plain one."""
    try:
        from kvbus_blocks.flash.compiled import CannotCompile, default_folder, load
        from kvbus_blocks.flash.index import FlashIndex
    except ImportError as problem:
        note(f"the plain index is used, which is slower ({problem}): pip install 'kvbus[index]'")
        return PlainIndex
    try:
        kernels = load(default_folder())
    except CannotCompile as problem:
        note(f"the plain index is used, which is slower: {problem.reason}")
        return PlainIndex
    return lambda: FlashIndex(kernels)
