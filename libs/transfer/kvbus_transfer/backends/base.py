"""The seam between the agent and a way to move blocks."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvbus_transfer.errors import TransferError
from kvbus_transfer.grants import GrantBody
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region


class BackendUnavailable(TransferError):
    """The library or the system lacks something; ``detail`` says what."""

    code = "backend_unavailable"


class ReadJob(msgspec.Struct, frozen=True):
    """Bring ``segments`` (numbers ``indices`` of the grant) to ``targets``, of the same lengths: memoryviews, and for backends
    of `devices.DIRECT` tensors of bytes. ``until``: the deadline, on the clock
    of the loop."""

    peer: Peer
    grant: bytes
    body: GrantBody
    indices: list[int]
    segments: list[tuple[int, int]]
    targets: Sequence[Any]
    until: float
    same_host: bool

    @property
    def size_bytes(self) -> int:
        return sum(length for _, length in self.segments)

    @property
    def deadline_s(self) -> float:
        """What is left of it, for requests to the owner, which has a clock of its own."""
        return max(0.0, self.until - asyncio.get_running_loop().time())


class Backend(Protocol):
    """One way. All methods run on the loop's thread."""

    name: str

    async def start(self) -> bytes:
        """Become ready; the bytes go into the agent's info. Raise BackendUnavailable."""

    async def stop(self) -> None:
        """Free everything. Idempotent."""

    def can_serve(self, region: Region) -> bool:
        """Can peers read this region this way?"""

    def can_reach(self, info: bytes, *, same_host: bool) -> bool:
        """Can this agent read from a peer whose info has these bytes for this backend?"""

    def add_region(self, region: Region) -> None: ...

    def remove_region(self, region: Region) -> None: ...

    async def opened(self, region: Region, payload: bytes) -> bytes:
        """Owner: what a reader needs for this region, ``payload`` being what the reader said."""

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        """Owner, of two-sided backends: send the bytes to who ``payload`` says. Raise TransferError."""

    def forget(self, peer: Peer) -> None:
        """Reader: this owner is gone, or was not used for long; nothing is under way with it."""

    def wake(self) -> None:
        """Owner, of backends that need its help: look after transfers for a moment."""

    async def fetch(self, job: ReadJob) -> None:
        """Reader: all bytes are there when it returns, and the lease ran to the end. Raise TransferError.

        However it ends, cancelled too: when it has ended, nothing writes to the targets any more.
        """
