"""Which implementation of the prefix index is used: the compiled one where it can be had."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvbus_blocks.index import PrefixIndex
from kvbus_blocks.plain_index import PlainIndex
from kvbus_runtime.settings import BadSettings

MakeIndex = Callable[[], PrefixIndex]

_MARGIN_BLOCKS = 1 << 17
"""Beside the entries: blocks of one query's length, below a parent that nobody holds."""


async def index_maker(kind: str, max_entries: int, log: Any) -> MakeIndex:
    """``kind``: flash, plain, or auto (flash if it can be loaded). Returns when the code is compiled. Raise BadSettings."""
    if kind == "plain":
        return PlainIndex
    try:
        return await asyncio.to_thread(_flash, 2 * max_entries + _MARGIN_BLOCKS)
    except _Unavailable as problem:
        if kind == "flash":
            raise BadSettings(f"the compiled index cannot be used: {problem}") from problem
        log.warning("compiled_index_unavailable", reason=str(problem), hint="pip install 'kvbus[index]'")
        return PlainIndex


class _Unavailable(Exception):
    """The reason is for people."""


def _flash(max_blocks: int) -> MakeIndex:
    """A block that nobody holds is kept while one below it is held, hence twice the entries at most."""
    try:
        from kvbus_blocks.flash.compiled import CannotCompile, default_folder, load
        from kvbus_blocks.flash.index import FlashIndex
    except ImportError as problem:
        raise _Unavailable(str(problem)) from problem
    try:
        kernels = load(default_folder())
    except CannotCompile as problem:
        raise _Unavailable(problem.reason) from problem
    return lambda: FlashIndex(kernels, max_blocks)
