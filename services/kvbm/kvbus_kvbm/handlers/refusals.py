"""Errors of the core as replies."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvbus_kvbm.core.errors import KvbmError
from kvbus_runtime.errors import RequestFailed


@contextmanager
def refusals() -> Iterator[None]:
    """Map the core's errors, here only."""
    try:
        yield
    except KvbmError as error:
        raise RequestFailed(error.reply) from error
