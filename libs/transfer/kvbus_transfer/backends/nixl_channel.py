"""One NIXL agent that reads from one peer."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus_transfer.copying import address_of
from kvbus_transfer.endings import to_the_end
from kvbus_transfer.errors import BackendFailed
from kvbus_transfer.messages import Wake
from kvbus_transfer.peers import Peer
from kvbus_transfer.regions import CudaRegion, Region

_PIECE_BYTES = 4 << 20
_WINDOW = 8
_WAKE_AGAIN_S = 0.04
_ABANDON_S = 0.5
TRIES = 16
PAUSE_S = 0.001
"""NIXL has nothing that could be waited for. Who asks it all the time takes the core from the other side, when cores are few."""
ENTRY_BYTES = 8
"""Of the lease table."""
_ENTRIES = 64

Piece = tuple[int, int, int]
"""(to, from, length): addresses."""


class Place(msgspec.Struct, frozen=True):
    """Kind of memory for NIXL, and device."""

    kind: str = "DRAM"
    device: int = 0

    def address(self, memory: Any) -> int:
        return address_of(memory) if self.kind == "DRAM" else int(memory.data_ptr())


HOST = Place()


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


class ChannelFailed(Exception):
    peer_is_gone = False


class Channel:
    """A NIXL agent that reads from one peer. It is thrown away when anything goes wrong."""

    def __init__(self, agent: Any, regions: Sequence[Region]) -> None:
        self.users = 0
        self.is_broken = False
        self._agent = agent
        self._remote = ""
        self._metadata = b""
        self._known: dict[int, tuple[int, int, Any]] = {}
        self._entries = memoryview(bytearray(_ENTRIES * ENTRY_BYTES))
        self._free = [at * ENTRY_BYTES for at in range(_ENTRIES)]
        start = address_of(self._entries)
        handle = agent.register_memory([(start, self._entries.nbytes, 0, "")], "DRAM")
        self._known[0] = (start, start + self._entries.nbytes, handle)  # regions count from 1
        for region in regions:
            self.add_region(region)

    def add_region(self, region: Region) -> None:
        """Own memory, as a target: registered once and not per read."""
        kind, address, device = placed(region)
        if self._agent is not None:
            handle = self._agent.register_memory([(address, region.size_bytes, device, "")], kind)
            self._known[region.region_id] = (address, address + region.size_bytes, handle)

    def remove_region(self, region: Region) -> None:
        found = self._known.pop(region.region_id, None)
        if found is not None and self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(found[2])

    def know(self, metadata: bytes) -> None:
        if metadata != self._metadata and self._agent is not None:
            try:
                remote = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise ChannelFailed(f"NIXL does not take the metadata: {error}") from error
            self._remote = remote.decode() if isinstance(remote, bytes) else remote
            self._metadata = metadata

    def close(self) -> None:
        self.is_broken = True
        if self.users == 0:
            self._agent = None

    async def read(self, pieces: Sequence[Piece], slot: int, places: tuple[Place, Place], peer: Peer) -> bytes:
        """The pieces, and when they are there the entry at ``slot``: returned. Raise ChannelFailed."""
        self.users += 1
        free = self._free.pop() if self._free else None
        entry = bytearray(ENTRY_BYTES) if free is None else self._entries[free : free + ENTRY_BYTES]
        check = (address_of(entry), slot, ENTRY_BYTES)
        agent = self._agent
        handles: list[Any] = []
        try:
            self._register(pieces, places[0], handles)
            self._register([check], HOST, handles)
            await self._transfer(pieces, places, peer)
            await self._transfer([check], (HOST, HOST), peer)
            return bytes(entry)
        finally:
            for handle in handles:
                with contextlib.suppress(Exception):
                    agent.deregister_memory(handle)
            if free is not None:
                self._free.append(free)
            self.users -= 1
            if self.is_broken and self.users == 0:
                self._agent = None

    def _register(self, pieces: Sequence[Piece], place: Place, handles: list[Any]) -> None:
        """Targets that are no memory of this agent are registered for one read."""
        known = list(self._known.values())
        spans = [
            (to, to + length)
            for to, _, length in pieces
            if not any(start <= to and to + length <= end for start, end, _ in known)
        ]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        if not merged:
            return
        try:
            descs = [(start, end - start, place.device, "") for start, end in merged]
            handles.append(self._agent.register_memory(descs, place.kind))
        except Exception as error:
            raise ChannelFailed(f"NIXL cannot register the targets: {error}") from error

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
            await to_the_end(self._abandon(under_way))
            raise

    def _post(self, batch: Sequence[Piece], places: tuple[Place, Place], under_way: list[Any]) -> None:
        agent = self._agent
        if agent is None:
            raise ChannelFailed("the channel was closed")
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
            raise ChannelFailed(f"NIXL ended a transfer with {state}")
        return True

    async def _wait(self, under_way: list[Any], peer: Peer, *, leave: int) -> None:
        waking: asyncio.Task[Any] | None = None
        wake_at = 0.0
        tries = 0
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
                tries += 1
                await asyncio.sleep(0 if tries % TRIES else PAUSE_S)
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

    def _failure(self, error: Exception) -> ChannelFailed:
        failed = ChannelFailed(f"NIXL: {error}")
        failed.peer_is_gone = type(error).__name__ == "nixlRemoteDisconnectError"
        return failed


def batches(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Lists of at most 4 MiB together: what one call may copy while the loop waits."""
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
