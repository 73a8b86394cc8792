"""NIXL: the reader reads the owner's registered memory itself (UCX below: cma, RDMA, tcp), and its lease table after that.

There is no progress thread, because it takes a core while nothing happens. Both sides call NIXL on the event loop, in pieces small
enough not to be noticed, and only while something is under way: a reader whose transfer does not finish at once wakes the owner.
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
from kvbus_transfer.backends.nixl_channel import (
    ENTRY_BYTES,
    PAUSE_S,
    TRIES,
    Channel,
    ChannelFailed,
    Place,
    place_of,
    placed,
)
from kvbus_transfer.copying import address_of
from kvbus_transfer.errors import BackendFailed, GrantRefused, Refusal
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import Region

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_CHANNELS_KEPT = 32
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
        self._limits = limits
        self._api: Any = None
        self._agent: Any = None
        self._registered: dict[int, tuple[Any, Region]] = {}
        self._metadata: bytes | None = None
        self._channels: dict[tuple[str, int], Channel] = {}
        self._made = 0
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
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._registered.clear()
        self._agent = None

    def can_serve(self, region: Region) -> bool:
        return region.kind in ("host", "arena", "cuda")

    def can_reach(self, info: bytes, *, same_host: bool) -> bool:
        return info == b"1"

    def add_region(self, region: Region) -> None:
        kind, address, device = placed(region)
        handle = self._agent.register_memory([(address, region.size_bytes, device, "")], kind)
        self._registered[region.region_id] = (handle, region)
        self._metadata = None
        for channel in self._channels.values():
            channel.add_region(region)

    def remove_region(self, region: Region) -> None:
        found = self._registered.pop(region.region_id, None)
        if found is not None and self._agent is not None:
            self._metadata = None
            with contextlib.suppress(Exception):  # a reader is in the middle of it: it fails there, as it should
                self._agent.deregister_memory(found[0])
            for channel in self._channels.values():
                channel.remove_region(region)

    async def opened(self, region: Region, payload: bytes) -> bytes:
        if self._metadata is None:
            self._metadata = self._agent.get_agent_metadata()
        kind, address, device = placed(region)
        return msgspec.msgpack.encode(Detail(self._metadata, address, address_of(self._table), kind, device))

    async def push(self, payload: bytes, views: Sequence[Any]) -> None:
        raise BackendFailed("readers read themselves")

    def forget(self, peer: Peer) -> None:
        channel = self._channels.pop((peer.info.agent_id, peer.info.incarnation), None)
        if channel is not None:
            channel.close()

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
            local = place_of(job.targets)
            pieces = [
                (local.address(target), detail.address + offset, length)
                for target, (offset, length) in zip(job.targets, job.segments, strict=True)
            ]
            slot = detail.table + job.body.slot * ENTRY_BYTES
            channel = await self._channel(job.peer)
            try:
                channel.know(detail.metadata)
                entry = await channel.read(pieces, slot, (local, Place(detail.kind, detail.device)), job.peer)
                break
            except ChannelFailed as failed:
                # Also when the owner has registered its memory anew at the same address: NIXL keeps what it knew of it.
                self._drop(job.peer, channel)
                job.peer.forget_opened()
                if attempt == 2 or failed.peer_is_gone:
                    raise BackendFailed(str(failed), peer=job.peer.info.agent_id) from failed
            except asyncio.CancelledError:
                if channel.is_broken:
                    self._drop(job.peer, channel)
                raise
        if entry != job.body.lease_id.to_bytes(ENTRY_BYTES, "little"):
            job.peer.forget_opened()
            await job.peer.opened(job.grant, self.name)  # the owner says why
            raise GrantRefused(Refusal.STALE, peer=job.peer.info.agent_id)

    async def _channel(self, peer: Peer) -> Channel:
        key = (peer.info.agent_id, peer.info.incarnation)
        channel = self._channels.pop(key, None)
        if channel is None or channel.is_broken:
            self._made += 1
            agent = await asyncio.to_thread(self.make_agent, f"{self._agent_name}/{self._made}")
            other = self._channels.pop(key, None)  # made meanwhile by another read
            channel = other if other is not None else Channel(agent, [each for _, each in self._registered.values()])
        self._channels[key] = channel
        for old, each in list(self._channels.items()):
            if len(self._channels) <= _CHANNELS_KEPT:
                break
            if each.users == 0 and each is not channel:
                each.close()
                del self._channels[old]
        return channel

    def _drop(self, peer: Peer, channel: Channel) -> None:
        key = (peer.info.agent_id, peer.info.incarnation)
        if self._channels.get(key) is channel:
            del self._channels[key]
        channel.close()
