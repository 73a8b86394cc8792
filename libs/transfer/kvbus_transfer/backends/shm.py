"""Shared memory: the reader maps the owner's arena (read-only) and copies once. The owner does nothing per transfer.

That the lease ran to the end of the copy shows in the owner's lease table, which is mapped, too: an entry that still holds the id
of the lease after the copy held it all the time, for ids are never used again.
"""

import asyncio
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvbus_transfer.arena import Arena
from kvbus_transfer.backends.base import ReadJob
from kvbus_transfer.backends.copy_threads import CopyThreads
from kvbus_transfer.copying import Pieces, address_of, copy_pieces
from kvbus_transfer.errors import BackendFailed, GrantRefused, Refusal
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import ArenaRegion, Region
from kvbus_transfer.streaming import fastest_copy

_MAPPINGS_KEPT = 64
# Small copies stay in the cache, where whoever wanted them reads them next.
_STREAM_BYTES = 512 << 10


class SharedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the owner, told in full: the name alone could be another file in another container."""

    path: str
    device: int
    inode: int
    size_bytes: int

    @classmethod
    def of(cls, arena: Arena) -> "SharedFile":
        status = arena.path.stat()
        return cls(str(arena.path), status.st_dev, status.st_ino, arena.size_bytes)


class _Mapping:
    def __init__(self, file: SharedFile) -> None:
        """Raise OSError, also when it is not the file that the owner means."""
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino, status.st_size) != (
                file.device,
                file.inode,
                file.size_bytes,
            ):
                raise OSError(f"{file.path} is another file here")
            self._memory = mmap.mmap(fd, file.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.view = memoryview(self._memory)
        self.address = address_of(self.view)
        self.size_bytes = file.size_bytes


class ShmBackend:
    name = "shm"

    def __init__(self, leases: Arena, limits: TransferLimits) -> None:
        self._leases = leases
        self._limits = limits
        self._files: dict[int, bytes] = {}
        self._mappings: dict[bytes, _Mapping] = {}
        self._of_peer: dict[tuple[str, int], set[bytes]] = {}
        self._streaming: asyncio.Task[Callable[[Pieces], None]] | None = None
        self._threads = CopyThreads("kvbus-shm", limits.inline_copy_bytes)

    async def start(self) -> bytes:
        return msgspec.msgpack.encode(SharedFile.of(self._leases))

    async def stop(self) -> None:
        self._mappings.clear()
        self._of_peer.clear()
        await self._threads.stop()
        if self._streaming is not None:
            await self._streaming

    def can_serve(self, region: Region) -> bool:
        return region.kind == "arena"

    def can_reach(self, info: bytes, *, same_host: bool) -> bool:
        if not same_host:
            return False
        if info in self._mappings:
            return True
        file = msgspec.msgpack.decode(info, type=SharedFile)
        try:
            status = Path(file.path).stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (file.device, file.inode)

    def add_region(self, region: Region) -> None:
        if isinstance(region, ArenaRegion):
            self._files[region.region_id] = msgspec.msgpack.encode(SharedFile.of(region.arena))

    def remove_region(self, region: Region) -> None:
        self._files.pop(region.region_id, None)

    async def opened(self, region: Region, payload: bytes) -> bytes:
        file = self._files.get(region.region_id)
        if file is None:
            raise BackendFailed("the region is no arena")
        return file

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        raise BackendFailed("readers copy themselves")

    def forget(self, peer: Peer) -> None:
        for name in self._of_peer.pop((peer.info.agent_id, peer.info.incarnation), ()):
            self._mappings.pop(name, None)

    def wake(self) -> None:
        pass

    def mapped_bytes(self) -> int:
        """Memory of owners that this process keeps alive."""
        return sum(mapping.size_bytes for mapping in self._mappings.values())

    async def fetch(self, job: ReadJob) -> None:
        opened = await job.peer.opened(job.grant, self.name)
        table = self._mapped(job.peer, job.peer.info.backends[self.name])
        memory = self._mapped(job.peer, opened.detail)
        if any(offset < 0 or offset + length > memory.size_bytes for offset, length in job.segments):
            raise GrantRefused(Refusal.OUT_OF_RANGE, peer=job.peer.info.agent_id)
        source = memory.address
        pieces = [
            (address_of(target), source + offset, length)
            for target, (offset, length) in zip(job.targets, job.segments, strict=True)
        ]
        copy = self._large_copy() if job.size_bytes >= _STREAM_BYTES else copy_pieces
        if job.size_bytes <= self._limits.inline_copy_bytes:
            copy(pieces)
        else:
            await self._threads.do(partial(copy, pieces))
        entry = job.body.slot * 8
        if table.view[entry : entry + 8] != job.body.lease_id.to_bytes(8, "little"):
            job.peer.forget_opened()
            await job.peer.opened(job.grant, self.name)  # the owner says why
            raise GrantRefused(Refusal.STALE, peer=job.peer.info.agent_id)

    def _mapped(self, peer: Peer, encoded: bytes) -> _Mapping:
        known = self._mappings.pop(encoded, None)
        if known is None:
            try:
                known = _Mapping(msgspec.msgpack.decode(encoded, type=SharedFile))
            except (OSError, ValueError) as error:
                raise BackendFailed(f"cannot map the arena: {error}") from error
            self._of_peer.setdefault((peer.info.agent_id, peer.info.incarnation), set()).add(encoded)
            while len(self._mappings) >= _MAPPINGS_KEPT:
                del self._mappings[next(iter(self._mappings))]
        self._mappings[encoded] = known
        return known

    def _large_copy(self) -> Callable[[Pieces], None]:
        """Compiled once a large read asks for it, which goes on with memcpy: LLVM takes memory that only readers should pay."""
        if self._streaming is None:
            self._streaming = asyncio.create_task(self._threads.do(fastest_copy))
        return self._streaming.result() if self._streaming.done() else copy_pieces
