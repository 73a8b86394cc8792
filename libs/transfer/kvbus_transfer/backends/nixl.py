"""NIXL: the reader reads the owner's registered memory itself (UCX below: cma, RDMA, tcp), and its lease table after that.

There is no progress thread, because it takes a core while nothing happens. Both sides call NIXL on the event loop, in pieces small
enough not to be noticed, and only while something is under way: a reader whose transfer does not finish at once wakes the owner.
"""

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvbus_transfer.backends.base import BackendUnavailable, ReadJob
from kvbus_transfer.copying import address_of
from kvbus_transfer.errors import BackendFailed, GrantRefused, Refusal
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Wake
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import CudaRegion, Region

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_PIECE_BYTES = 2 << 20
_WINDOW = 8
_CHANNELS_KEPT = 32
_AWAKE_S = 0.1
_WAKE_AGAIN_S = 0.04
_ABANDON_S = 0.5
_ENTRY_BYTES = 8

Piece = tuple[int, int, int]
"""(to, from, length): addresses."""


class Place(msgspec.Struct, frozen=True):
    """Kind of memory for NIXL, and device."""

    kind: str = "DRAM"
    device: int = 0

    def address(self, memory: Any) -> int:
        return address_of(memory) if self.kind == "DRAM" else int(memory.data_ptr())


HOST = Place()


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
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            why = why or str(error)
    raise BackendUnavailable(f"NIXL is not installed (pip install 'kvbus[nixl]'): {why}")


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
        self._channels: dict[tuple[str, int], _Channel] = {}
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

    def wake(self) -> None:
        """Owner: look after transfers for a moment; readers that still wait say so again."""
        self._awake_until = time.monotonic() + _AWAKE_S
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll(), name="kvbus-nixl-owner")

    async def _poll(self) -> None:
        while time.monotonic() < self._awake_until and self._agent is not None:
            self._agent.get_new_notifs()
            await asyncio.sleep(0)

    async def fetch(self, job: ReadJob) -> None:
        entry = bytearray(_ENTRY_BYTES)
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
            check = (address_of(entry), detail.table + job.body.slot * _ENTRY_BYTES, _ENTRY_BYTES)
            channel = await self._channel(job.peer, detail.metadata)
            try:
                await channel.read(pieces, check, (local, Place(detail.kind, detail.device)), job.peer)
                break
            except _ChannelFailed as failed:
                # Also when the owner has registered its memory anew at the same address: NIXL keeps what it knew of it.
                self._drop(job.peer, channel)
                job.peer.forget_opened()
                if attempt == 2 or failed.peer_is_gone:
                    raise BackendFailed(str(failed), peer=job.peer.info.agent_id) from failed
            except asyncio.CancelledError:
                if channel.is_broken:
                    self._drop(job.peer, channel)
                raise
        if entry != job.body.lease_id.to_bytes(_ENTRY_BYTES, "little"):
            job.peer.forget_opened()
            await job.peer.opened(job.grant, self.name)  # the owner says why
            raise GrantRefused(Refusal.STALE, peer=job.peer.info.agent_id)

    async def _channel(self, peer: Peer, metadata: bytes) -> "_Channel":
        key = (peer.info.agent_id, peer.info.incarnation)
        channel = self._channels.pop(key, None)
        if channel is None or channel.is_broken:
            self._made += 1
            agent = await asyncio.to_thread(self.make_agent, f"{self._agent_name}/{self._made}")
            other = self._channels.pop(key, None)  # made meanwhile by another read
            channel = other if other is not None else _Channel(agent, [each for _, each in self._registered.values()])
        self._channels[key] = channel
        for old, each in list(self._channels.items()):
            if len(self._channels) <= _CHANNELS_KEPT:
                break
            if each.users == 0 and each is not channel:
                each.close()
                del self._channels[old]
        channel.know(metadata)
        return channel

    def _drop(self, peer: Peer, channel: "_Channel") -> None:
        key = (peer.info.agent_id, peer.info.incarnation)
        if self._channels.get(key) is channel:
            del self._channels[key]
        channel.close()


def placed(region: Region) -> tuple[str, int, int]:
    """Kind of memory for NIXL, address, device."""
    if isinstance(region, CudaRegion):
        return "VRAM", region.address, region.device
    return "DRAM", address_of(region.view(0, region.size_bytes)), 0


def place_of(targets: Sequence[Any]) -> Place:
    """Of all of them. Raise BackendFailed when they lie in different places."""
    places = {
        HOST if isinstance(target, memoryview) else Place("VRAM", int(target.device.index or 0)) for target in targets
    }
    if len(places) > 1:
        raise BackendFailed("targets in more than one kind of memory")
    return next(iter(places), HOST)


class _ChannelFailed(Exception):
    peer_is_gone = False


class _Channel:
    """A NIXL agent that reads from one peer. It is thrown away when anything goes wrong."""

    def __init__(self, agent: Any, regions: Sequence[Region]) -> None:
        self.users = 0
        self.is_broken = False
        self._agent = agent
        self._remote = ""
        self._metadata = b""
        self._regions: dict[int, tuple[int, int, Any]] = {}
        for region in regions:
            self.add_region(region)

    def add_region(self, region: Region) -> None:
        """Own memory, as a target: registered once and not per read."""
        kind, address, device = placed(region)
        if self._agent is not None:
            handle = self._agent.register_memory([(address, region.size_bytes, device, "")], kind)
            self._regions[region.region_id] = (address, address + region.size_bytes, handle)

    def remove_region(self, region: Region) -> None:
        found = self._regions.pop(region.region_id, None)
        if found is not None and self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(found[2])

    def know(self, metadata: bytes) -> None:
        if metadata != self._metadata and self._agent is not None:
            try:
                remote = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise BackendFailed(f"NIXL does not take the metadata: {error}") from error
            self._remote = remote.decode() if isinstance(remote, bytes) else remote
            self._metadata = metadata

    def close(self) -> None:
        self.is_broken = True
        if self.users == 0:
            self._agent = None

    async def read(self, pieces: Sequence[Piece], check: Piece, places: tuple[Place, Place], peer: Peer) -> None:
        """The pieces, and when they are there the entry. Raise _ChannelFailed."""
        self.users += 1
        try:
            async with self._registered(pieces, places[0]), self._registered([check], HOST):
                await self._transfer(pieces, places, peer)
                await self._transfer([check], (HOST, HOST), peer)
        finally:
            self.users -= 1
            if self.is_broken and self.users == 0:
                self._agent = None

    @asynccontextmanager
    async def _registered(self, pieces: Sequence[Piece], place: Place) -> AsyncIterator[None]:
        spans = [
            (to, to + length)
            for to, _, length in pieces
            if not any(start <= to and to + length <= end for start, end, _ in self._regions.values())
        ]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        agent = self._agent
        handle = None
        if merged:
            try:
                descs = [(start, end - start, place.device, "") for start, end in merged]
                handle = agent.register_memory(descs, place.kind)
            except Exception as error:
                raise _ChannelFailed(f"NIXL cannot register the targets: {error}") from error
        try:
            yield
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):
                    agent.deregister_memory(handle)

    async def _transfer(self, pieces: Sequence[Piece], places: tuple[Place, Place], peer: Peer) -> None:
        under_way: list[Any] = []
        try:
            for batch in batches(pieces):
                self._post(batch, places, under_way)
                if len(under_way) >= _WINDOW:
                    await self._wait(under_way, peer, leave=_WINDOW - 1)
                elif len(pieces) > 1 or pieces[0][2] > _PIECE_BYTES:
                    await asyncio.sleep(0)
            if under_way:
                await self._wait(under_way, peer, leave=0)
        except BaseException:
            await asyncio.shield(self._abandon(under_way))
            raise

    def _post(self, batch: Sequence[Piece], places: tuple[Place, Place], under_way: list[Any]) -> None:
        agent = self._agent
        if agent is None:
            raise _ChannelFailed("the channel was closed")
        try:
            (to_place, from_place) = places
            local = agent.get_xfer_descs([(to, length, to_place.device) for to, _, length in batch], to_place.kind)
            remote = agent.get_xfer_descs(
                [(source, length, from_place.device) for _, source, length in batch], from_place.kind
            )
            handle = agent.initialize_xfer("READ", local, remote, self._remote)
            state = agent.transfer(handle)
        except Exception as error:
            raise self._failure(error) from error
        self._take(handle, state, under_way)

    def _take(self, handle: Any, state: str, under_way: list[Any]) -> bool:
        if state == "PROC":
            under_way.append(handle)
            return False
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise _ChannelFailed(f"NIXL ended a transfer with {state}")
        return True

    async def _wait(self, under_way: list[Any], peer: Peer, *, leave: int) -> None:
        waking: asyncio.Task[Any] | None = None
        wake_at = 0.0
        try:
            while len(under_way) > leave:
                handles, under_way[:] = under_way[:], []
                for at, handle in enumerate(handles):
                    try:
                        state = self._agent.check_xfer_state(handle)
                    except Exception as error:
                        under_way.extend(handles[at + 1 :])
                        raise self._failure(error) from error
                    self._take(handle, state, under_way)
                if waking is not None and waking.done():
                    waking.result()
                    waking = None
                if len(under_way) > leave and waking is None and time.monotonic() >= wake_at:
                    wake_at = time.monotonic() + _WAKE_AGAIN_S
                    waking = asyncio.get_running_loop().create_task(peer.ask(Wake(backend="nixl")))
                await asyncio.sleep(0)
        finally:
            if waking is not None:
                waking.cancel()
                await asyncio.wait([waking])
                if not waking.cancelled():
                    waking.exception()

    async def _abandon(self, under_way: list[Any]) -> None:
        """Nothing may write to the targets any more: let it end, or destroy the agent that does it."""
        until = time.monotonic() + _ABANDON_S
        while under_way and time.monotonic() < until and self._agent is not None:
            for handle in list(under_way):
                try:
                    if self._agent.check_xfer_state(handle) == "PROC":
                        continue
                    self._agent.release_xfer_handle(handle)
                except Exception:  # noqa: S110 (it has ended, whichever way)
                    pass
                under_way.remove(handle)
            await asyncio.sleep(0)
        if under_way:
            self.is_broken = True
            under_way.clear()
            self._agent = None

    def _failure(self, error: Exception) -> _ChannelFailed:
        failed = _ChannelFailed(f"NIXL: {error}")
        failed.peer_is_gone = type(error).__name__ == "nixlRemoteDisconnectError"
        return failed


def batches(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Lists of at most 2 MiB together: what one call may copy while the loop waits."""
    found: list[list[Piece]] = []
    held = _PIECE_BYTES
    for to, source, length in pieces:
        at = 0
        while at < length:
            if held >= _PIECE_BYTES:
                found.append([])
                held = 0
            part = min(length - at, _PIECE_BYTES - held)
            found[-1].append((to + at, source + at, part))
            at += part
            held += part
    return found
