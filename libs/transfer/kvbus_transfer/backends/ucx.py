"""UCX, by ucxx: the reader reads the owner's memory itself where UCX can do that without the owner's processor (`ucx_direct`: cma,
RDMA), and is sent tagged messages where it cannot (`ucx_tagged`: tcp, device memory).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from kvbus_transfer.backends.base import BackendUnavailable, ReadJob
from kvbus_transfer.backends.ucx_channel import direct_transports
from kvbus_transfer.backends.ucx_direct import DirectOwner, DirectReader
from kvbus_transfer.backends.ucx_library import NAME, UcxLibrary, load
from kvbus_transfer.backends.ucx_tagged import TaggedMessages
from kvbus_transfer.errors import BackendFailed
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region

__all__ = ["UcxBackend", "load"]
log = logging.getLogger(__name__)


class UcxBackend:
    name = NAME

    def __init__(self, table: memoryview, limits: TransferLimits) -> None:
        self._table = table
        self._limits = limits
        self._tagged: TaggedMessages | None = None
        self._owner: DirectOwner | None = None
        self._reader: DirectReader | None = None

    async def start(self) -> bytes:
        ucx = await asyncio.to_thread(load)
        try:
            self._tagged = await asyncio.to_thread(TaggedMessages, ucx, self._limits)
        except Exception as error:  # the library has exceptions of its own without a common root
            raise BackendUnavailable(f"UCX does not start: {error}") from error
        if direct_transports():
            await self._start_direct(ucx)
        return self._tagged.info

    async def _start_direct(self, ucx: UcxLibrary) -> None:
        try:
            self._owner = await asyncio.to_thread(DirectOwner, ucx, self._table)
        except Exception as error:  # as above
            log.info("ucx_not_one_sided", extra={"why": str(error)})
        else:
            self._reader = DirectReader(ucx, self._limits)

    async def stop(self) -> None:
        if self._reader is not None:
            await self._reader.stop()
        if self._owner is not None:
            await self._owner.stop()
        if self._tagged is not None:
            self._tagged.stop()
        self._reader = self._owner = self._tagged = None

    def can_serve(self, region: Region) -> bool:
        return region.kind in ("host", "arena", "cuda")

    def can_reach(self, info: bytes, *, same_host: bool) -> bool:
        return bool(info)

    def add_region(self, region: Region) -> None:
        if self._owner is not None:
            self._owner.add(region)

    def remove_region(self, region: Region) -> None:
        if self._owner is not None:
            self._owner.remove(region)

    async def opened(self, region: Region, payload: bytes) -> bytes:
        return self._owner.place(region) if self._owner is not None else b""

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        await self._messages().push(payload, views)

    def forget(self, peer: Peer) -> None:
        if self._reader is not None:
            self._reader.forget(peer)

    def wake(self) -> None:
        if self._owner is not None:
            self._owner.wake()

    async def fetch(self, job: ReadJob) -> None:
        if self._reader is None or not await self._reader.fetch(job):
            await self._messages().fetch(job)

    def _messages(self) -> TaggedMessages:
        if self._tagged is None:
            raise BackendFailed("UCX was stopped")
        return self._tagged
