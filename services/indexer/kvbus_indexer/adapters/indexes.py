"""Which implementation of the prefix index is used: the compiled one where it can be had."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvbus_blocks.flash import FlashUnavailable, flash_maker
from kvbus_blocks.index import PrefixIndex
from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.limits import Limits
from kvbus_runtime.settings import BadSettings

MakeIndex = Callable[[], PrefixIndex]

_MARGIN_BLOCKS = 1 << 17
"""Beside the entries: blocks of one query's length, below a parent that nobody holds."""


async def index_maker(kind: str, limits: Limits, log: Any) -> MakeIndex:
    """``kind``: flash, plain, or auto (flash if it can be loaded). Returns when the code is compiled. Raise BadSettings."""
    if kind == "plain":
        return PlainIndex
    try:
        return await asyncio.to_thread(flash_maker, _max_blocks(limits))
    except FlashUnavailable as problem:
        if kind == "flash":
            raise BadSettings(f"the compiled index cannot be used: {problem}") from problem
        log.warning("compiled_index_unavailable", reason=problem.reason)
        return PlainIndex


def _max_blocks(limits: Limits) -> int:
    """Twice the entries: a block that nobody holds is kept while one below it is held. Twice the predicted keys: a prediction is
    entered before older ones go for it."""
    return 2 * max(limits.max_entries, limits.max_predicted_keys) + _MARGIN_BLOCKS
