"""The compiled index for tests: its kernels are loaded once per process."""

from functools import cache

from kvbus_blocks.flash.compiled import Kernels, default_folder, load
from kvbus_blocks.flash.index import FlashIndex


@cache
def kernels() -> Kernels:
    return load(default_folder())


def flash_index(max_blocks: int = 1 << 20) -> FlashIndex:
    return FlashIndex(kernels(), max_blocks)
