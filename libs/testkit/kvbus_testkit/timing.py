"""Waiting for conditions; all timeouts scale by ``KVBUS_TEST_TIMEOUT_FACTOR``."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "KVBUS_TEST_TIMEOUT_FACTOR"
_POLL_S = 0.01


def timeout_factor() -> float:
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> float:
    return seconds * timeout_factor()


async def eventually(
    condition: Callable[[], T | Awaitable[T]], *, timeout_s: float = 15.0, what: str = "the condition"
) -> T:
    """The first truthy value of ``condition``. Raise AssertionError when there is none in time (scaled)."""
    deadline = time.monotonic() + scaled(timeout_s)
    while True:
        value = condition()
        if isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not hold within {scaled(timeout_s):g} s; last value: {value!r}"
        await asyncio.sleep(_POLL_S)


def eventually_sync(condition: Callable[[], T], *, timeout_s: float = 15.0, what: str = "the condition") -> T:
    """`eventually` outside of an event loop."""
    deadline = time.monotonic() + scaled(timeout_s)
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not hold within {scaled(timeout_s):g} s; last value: {value!r}"
        time.sleep(_POLL_S)
