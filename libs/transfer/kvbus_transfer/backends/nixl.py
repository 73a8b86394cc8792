"""NIXL: the reader reads the owner's registered memory itself (UCX below: cma, RDMA, tcp), and its lease table after that.

There is no progress thread, because it takes a core while nothing happens: both sides call NIXL only while something is under way,
and a reader whose transfer does not finish at once wakes the owner. Small reads are done on the event loop, larger ones in threads.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus_transfer.backends.base import BackendUnavailable, ReadJob
from kvbus_transfer.backends.copy_threads import CopyThreads
from kvbus_transfer.backends.nixl_channel import ENTRY_BYTES, Channel, ChannelFailed, Place, place_of, placed
from kvbus_transfer.backends.nixl_channels import Channels
from kvbus_transfer.backends.nixl_reading import PAUSE_S, TRIES, Reading, carry_out
from kvbus_transfer.copying import address_of
from kvbus_transfer.errors import BackendFailed, GrantRefused, Refusal
from kvbus_transfer.hosts import has_rdma
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Wake
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_AWAKE_S = 0.1


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs: ``metadata`` of the owner's agent, where the region and the lease table lie."""

    metadata: bytes
    address: int
    table: int
    kind: str
    device: int


def load() -> Any:
    """The library. Raise BackendUnavailable."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # it writes to stderr by itself; errors arrive as exceptions, too
    why = ""
    for name in _MODULES:
        try:
            library = importlib.import_module(name)
            _quiet()
            return library
        except (ImportError, OSError) as error:
            why = why or str(error)
    raise BackendUnavailable(f"NIXL is not installed (pip install 'kvbus[nixl]'): {why}")


def _quiet() -> None:
    """It would write to stdout by a handler of its own."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)


class NixlBackend:
    name = "nixl"

    def __init__(self, agent_name: str, table: memoryview, limits: TransferLimits) -> None:
        self._agent_name = agent_name
        self._table = table
        self._api: Any = None
        self._agent: Any = None
        self._registered: dict[int, tuple[Any, Region]] = {}
        self._metadata: bytes | None = None
        self._channels = Channels(self._make_channel)
        self._made = 0
        self._threads = CopyThreads("kvbus-nixl", limits.inline_copy_bytes)
        self._awake_until = 0.0
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> bytes:
        self._api = await asyncio.to_thread(load)
        try:
            self._agent = await asyncio.to_thread(self.make_agent, self._agent_name)
            self._agent.register_memory([(address_of(self._table), self._table.nbytes, 0, "")], "DRAM")
        except Exception as error:  # the library has exceptions of its own without a common root
            raise BackendUnavailable(f"NIXL does not start: {error}") from error
        return b"1"

    def make_agent(self, name: str) -> Any:
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        return self._api.nixl_agent(name, config)

    async def stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
            self._polling = None
        await self._channels.close()
        self._registered.clear()
        self._agent = None
        await self._threads.stop()

    def can_serve(self, region: Region) -> bool:
        return region.kind in ("host", "arena", "cuda")

    def can_reach(self, info: bytes, *, same_host: bool) -> bool:
        """Not over plain tcp: there the owner's UCX copies for us, and its process ends when we are gone in the middle of it."""
        return info == b"1" and (same_host or has_rdma())

    def add_region(self, region: Region) -> None:
        kind, address, device = placed(region)
        handle = self._agent.register_memory([(address, region.size_bytes, device, "")], kind)
        self._registered[region.region_id] = (handle, region)
        self._metadata = None
        self._channels.add_region(region)

    def remove_region(self, region: Region) -> None:
        found = self._registered.pop(region.region_id, None)
        if found is not None and self._agent is not None:
            self._metadata = None
            with contextlib.suppress(Exception):  # a reader is in the middle of it: it fails there, as it should
                self._agent.deregister_memory(found[0])
            self._channels.remove_region(region)

    async def opened(self, region: Region, payload: bytes) -> bytes:
        if self._metadata is None:
            self._metadata = self._agent.get_agent_metadata()
        kind, address, device = placed(region)
        return msgspec.msgpack.encode(Detail(self._metadata, address, address_of(self._table), kind, device))

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        raise BackendFailed("readers read themselves")

    def forget(self, peer: Peer) -> None:
        self._channels.forget(peer)

    async def _make_channel(self, regions: Sequence[Region]) -> Channel:
        self._made += 1
        return await asyncio.to_thread(self._new_channel, f"{self._agent_name}/{self._made}", regions)

    def _new_channel(self, name: str, regions: Sequence[Region]) -> Channel:
        channel = Channel(self.make_agent(name))
        for region in regions:
            channel.add_region(region)
        return channel

    def wake(self) -> None:
        """Owner: look after transfers for a moment; readers that still wait say so again."""
        self._awake_until = time.monotonic() + _AWAKE_S
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll(), name="kvbus-nixl-owner")

    async def _poll(self) -> None:
        tries = 0
        while time.monotonic() < self._awake_until and self._agent is not None:
            self._agent.get_new_notifs()
            tries += 1
            await asyncio.sleep(0 if tries % TRIES else PAUSE_S)

    async def fetch(self, job: ReadJob) -> None:
        entry = b""
        for attempt in (1, 2):
            opened = await job.peer.opened(job.grant, self.name)
            detail = msgspec.msgpack.decode(opened.detail, type=Detail)
            if any(offset < 0 or offset + length > opened.region_size for offset, length in job.segments):
                raise GrantRefused(Refusal.OUT_OF_RANGE, peer=job.peer.info.agent_id)
            try:
                entry = await self._read(job, detail)
                break
            except ChannelFailed as error:
                failed = error.with_traceback(None)  # its frames refer to what must go
            # Also when the owner has registered its memory anew at the same address: NIXL keeps what it knew of it.
            job.peer.forget_opened()
            if attempt == 2 or failed.peer_is_gone:
                raise BackendFailed(str(failed), peer=job.peer.info.agent_id)
        if entry != job.body.lease_id.to_bytes(ENTRY_BYTES, "little"):
            job.peer.forget_opened()
            await job.peer.opened(job.grant, self.name)  # the owner says why
            raise GrantRefused(Refusal.STALE, peer=job.peer.info.agent_id)

    async def _read(self, job: ReadJob, detail: Detail) -> bytes:
        """The entry of the lease table as it was after the copy. Raise ChannelFailed, BackendFailed."""
        local = place_of(job.targets)
        pieces = [
            (local.address(target), detail.address + offset, length)
            for target, (offset, length) in zip(job.targets, job.segments, strict=True)
        ]
        slot = detail.table + job.body.slot * ENTRY_BYTES
        channels = self._channels.of(job.peer)
        channel = await channels.take()
        try:
            with self._threads:
                places = (local, Place(detail.kind, detail.device))
                reading = Reading(channel, detail.metadata, pieces, slot, places)
                in_thread = not reading.is_quickly_prepared or await self._threads.are_for(job.size_bytes)
                threads = self._threads if in_thread else None
                await carry_out(reading, threads, lambda: job.peer.ask(Wake(backend=self.name)))
                return reading.entry()
        except ChannelFailed:
            channels.renew(channel)
            raise
        finally:
            channels.give(channel)
