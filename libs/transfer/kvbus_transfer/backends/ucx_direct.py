"""One-sided reads by UCX: cma within a host, RDMA between hosts. The owner's processor has no part in them.

The reader reads the blocks, and after them the owner's lease table, the same way: an entry that still holds the id of the lease
held it all the time. The owner only tells where its memory lies (`Place`), and looks after its worker while a connection by RDMA
is made.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from kvbus_transfer.backends.base import ReadJob
from kvbus_transfer.backends.copy_threads import CopyThreads
from kvbus_transfer.backends.ucx_channel import (
    ENTRY_BYTES,
    Channel,
    ChannelFailed,
    Unreachable,
    direct_transports,
)
from kvbus_transfer.backends.ucx_library import NAME, UcxError, UcxLibrary
from kvbus_transfer.copying import address_of
from kvbus_transfer.endings import to_the_end
from kvbus_transfer.errors import BackendFailed, GrantRefused, PeerLost, Refusal
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Wake
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region

log = logging.getLogger(__name__)
_CHANNELS_KEPT = 32
_UNREACHABLE_KEPT = 256
_AWAKE_S = 0.1
_WAKE_AGAIN_S = 0.04
_PROOF_S = 0.5
_ABANDON_S = 0.5
_TRIES = 16
_PAUSE_S = 0.001

_Key = tuple[str, int]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs: the owner's worker, and where the region and the lease table lie, each with its key."""

    worker: bytes
    address: int
    key: bytes
    table: int
    table_key: bytes


class DirectOwner:
    """Memory that others may read. Its worker is called only for a moment when a reader asks for it."""

    def __init__(self, ucx: UcxLibrary, table: memoryview) -> None:
        """Raise OSError, UcxError, and what ucxx raises."""
        self._ucx = ucx
        self._table = table
        self._context: Any = ucx.context((ucx.binding.Feature.RMA,), direct_transports())
        self._worker: Any = ucx.binding.UCXWorker(self._context)
        self._address: bytes = self._worker.address.tobytes()
        self._table_handle, self._table_key = ucx.map(self._context.handle, address_of(table), table.nbytes)
        self._mapped: dict[int, tuple[int, bytes]] = {}
        self._awake_until = 0.0
        self._attending: asyncio.Task[None] | None = None

    def add(self, region: Region) -> None:
        if region.kind not in ("host", "arena"):
            return
        address = address_of(region.view(0, region.size_bytes))
        try:
            handle, key = self._ucx.map(self._context.handle, address, region.size_bytes)
        except UcxError as error:  # readers then ask for messages
            log.warning("ucx_memory_not_mapped", extra={"region": region.region_id, "why": str(error)})
            return
        place = Place(self._address, address, key, address_of(self._table), self._table_key)
        self._mapped[region.region_id] = (handle, msgspec.msgpack.encode(place))

    def remove(self, region: Region) -> None:
        """A reader in the middle of it fails there, or finds that its lease has ended."""
        found = self._mapped.pop(region.region_id, None)
        if found is not None and self._context is not None:
            self._ucx.unmap(self._context.handle, found[0])

    def place(self, region: Region) -> bytes:
        """Empty for memory that cannot be read so."""
        return self._mapped.get(region.region_id, (0, b""))[1]

    def wake(self) -> None:
        self._awake_until = time.monotonic() + _AWAKE_S
        if self._attending is None or self._attending.done():
            self._attending = asyncio.get_running_loop().create_task(self._attend(), name="kvbus-ucx-owner")

    async def _attend(self) -> None:
        tries = 0
        while time.monotonic() < self._awake_until and self._worker is not None:
            self._ucx.progress(self._worker.handle)
            tries += 1
            await asyncio.sleep(0 if tries % _TRIES else _PAUSE_S)

    async def stop(self) -> None:
        if self._attending is not None:
            self._attending.cancel()
            await asyncio.wait([self._attending])
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._context is None:
            return
        for handle in [self._table_handle, *(handle for handle, _ in self._mapped.values())]:
            self._ucx.unmap(self._context.handle, handle)
        self._mapped.clear()
        self._worker = None
        self._context = None


class DirectReader:
    def __init__(self, ucx: UcxLibrary, limits: TransferLimits) -> None:
        self._ucx = ucx
        self._turns = asyncio.Semaphore(limits.connections)
        self._threads = CopyThreads("kvbus-ucx", limits.inline_copy_bytes)
        self._making = ThreadPoolExecutor(1, thread_name_prefix="kvbus-ucx-channels")  # and ending
        self._idle: dict[_Key, list[Channel]] = {}
        self._unreachable: dict[_Key, float] = {}
        self._rest_s = limits.backend_rest_s
        self._is_stopped = False

    async def stop(self) -> None:
        self._is_stopped = True
        for key in list(self._idle):
            self._forget(key)
        await self._threads.stop()
        await asyncio.to_thread(self._making.shutdown)

    def forget(self, peer: Peer) -> None:
        key = _key(peer)
        self._unreachable.pop(key, None)
        self._forget(key)

    def _forget(self, key: _Key) -> None:
        for channel in self._idle.pop(key, ()):
            self._making.submit(channel.close)

    async def fetch(self, job: ReadJob) -> bool:
        """False: these blocks cannot be read so. Raise TransferError."""
        peer = job.peer
        if not all(isinstance(target, memoryview) for target in job.targets):
            return False
        if time.monotonic() < self._unreachable.get(_key(peer), 0.0):
            return False
        entry = b""
        for attempt in (1, 2):
            opened = await peer.opened(job.grant, NAME)
            if not opened.detail:
                return False
            if any(offset < 0 or offset + length > opened.region_size for offset, length in job.segments):
                raise GrantRefused(Refusal.OUT_OF_RANGE, peer=peer.info.agent_id)
            try:
                entry = await self._read(job, msgspec.msgpack.decode(opened.detail, type=Place))
                break
            except Unreachable as error:
                log.info("ucx_not_one_sided", extra={"peer": peer.info.agent_id, "why": str(error)})
                self._unreachable.pop(_key(peer), None)
                self._unreachable[_key(peer)] = time.monotonic() + self._rest_s
                while len(self._unreachable) > _UNREACHABLE_KEPT:
                    del self._unreachable[next(iter(self._unreachable))]
                return False
            except ChannelFailed as failed:
                peer.forget_opened()  # whether the owner still honours the grant, it says when it is asked again
                if attempt == 2:
                    raise BackendFailed(str(failed), peer=peer.info.agent_id) from failed
        if peer.is_gone:  # its process id may be another's by now
            raise PeerLost("the owner has gone", peer=peer.info.agent_id)
        if entry != job.body.lease_id.to_bytes(ENTRY_BYTES, "little"):
            peer.forget_opened()
            await peer.opened(job.grant, NAME)  # the owner says why
            raise GrantRefused(Refusal.STALE, peer=peer.info.agent_id)
        return True

    async def _read(self, job: ReadJob, place: Place) -> bytes:
        """The blocks, then the entry of the lease. Raise ChannelFailed."""
        entry = (place.table + job.body.slot * ENTRY_BYTES, place.table_key)
        async with self._turns:
            channel = await self._take(job.peer, place)
            try:
                pieces = [
                    (address_of(target), place.address + offset, length)
                    for target, (offset, length) in zip(job.targets, job.segments, strict=True)
                ]
                read = partial(channel.read, pieces, place.key, entry)
                with self._threads:
                    done = await self._threads.do(read) if await self._threads.are_for(job.size_bytes) else read()
                if not done:
                    await self._settle(channel, job.peer)
                    channel.post_entry(*entry)
                    await self._settle(channel, job.peer)
                return channel.entry()
            finally:
                await self._give(job.peer, channel)

    async def _take(self, peer: Peer, place: Place) -> Channel:
        """Raise Unreachable."""
        if idle := self._idle.get(_key(peer)):
            return idle.pop()
        making = asyncio.get_running_loop().run_in_executor(self._making, Channel, self._ucx, place.worker)
        try:
            channel = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._close_unwanted)
            raise
        try:
            await self._prove(channel, peer, place)
        except BaseException:
            await self._give(peer, channel)
            raise
        return channel

    def _close_unwanted(self, making: "asyncio.Future[Channel]") -> None:
        if not making.cancelled() and making.exception() is None and not self._is_stopped:
            self._making.submit(making.result().close)

    async def _prove(self, channel: Channel, peer: Peer, place: Place) -> None:
        """The kernel may not allow it, a network may not lead there. Raise Unreachable."""
        try:
            async with asyncio.timeout(_PROOF_S):
                channel.post_entry(place.table, place.table_key)
                await self._settle(channel, peer)
        except (ChannelFailed, TimeoutError) as error:
            raise Unreachable(f"its lease table cannot be read: {error or 'no answer'}") from error

    async def _give(self, peer: Peer, channel: Channel) -> None:
        """One that may still write to targets is closed before they are given back."""
        if channel.is_good and not self._is_stopped and not peer.is_gone:
            self._idle[_key(peer)] = [*self._idle.pop(_key(peer), ()), channel]
            while sum(map(len, self._idle.values())) > _CHANNELS_KEPT:
                self._forget(next(iter(self._idle)))
            return
        await to_the_end(self._end(channel))

    async def _end(self, channel: Channel) -> None:
        until = time.monotonic() + _ABANDON_S
        try:
            while channel.progress() and time.monotonic() < until:  # noqa: ASYNC110 (there is nothing to wait for)
                await asyncio.sleep(_PAUSE_S)
        except ChannelFailed:
            pass
        await asyncio.to_thread(channel.close)

    async def _settle(self, channel: Channel, peer: Peer) -> None:
        """Until nothing is under way. Raise ChannelFailed, and TransferError when the owner has gone."""
        waking: asyncio.Task[Any] | None = None
        wake_at = 0.0
        tries = 0
        try:
            while channel.progress():
                if waking is not None and waking.done():
                    waking.result()
                    waking = None
                if waking is None and time.monotonic() >= wake_at:
                    wake_at = time.monotonic() + _WAKE_AGAIN_S
                    waking = asyncio.get_running_loop().create_task(peer.ask(Wake(backend=NAME)))
                tries += 1
                await asyncio.sleep(0 if tries % _TRIES else _PAUSE_S)
        finally:
            if waking is not None:
                waking.cancel()
                await asyncio.wait([waking])
                if not waking.cancelled():
                    waking.exception()


def _key(peer: Peer) -> _Key:
    return peer.info.agent_id, peer.info.incarnation
