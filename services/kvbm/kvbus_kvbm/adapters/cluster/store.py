"""What G4 needs of a store."""

from collections.abc import Sequence
from typing import Protocol


class StoreFailed(Exception):
    """The store has trouble. ``refused``: it answers, and does not let us; waiting does not help. ``full``: it has no room."""

    def __init__(self, message: str, *, refused: bool = False, full: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.full = full


class ClusterStore(Protocol):
    """Objects by name (segments of letters, digits, dots and hyphens, joined by ``/``). All methods raise StoreFailed. None has
    a deadline of its own: the caller may cancel each at any time, and nothing of the caller's is used after that."""

    @property
    def place(self) -> str:
        """For people; no credentials in it."""

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """Whole or not at all, in place of what was there."""

    async def get(self, name: str, limit_bytes: int) -> memoryview | None:
        """None: not there. Of a larger object the first ``limit_bytes + 1`` bytes at least."""

    async def size(self, name: str) -> int | None:
        """None: not there."""

    async def delete(self, names: Sequence[str]) -> None:
        """Those that are there."""

    async def names(self, prefix: str) -> list[str]:
        """Names of all objects below a prefix that ends at a ``/``, in order."""

    async def close(self) -> None:
        """Idempotent."""
