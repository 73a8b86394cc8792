"""One NIXL agent that reads from one peer."""

import contextlib
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbus_transfer.copying import address_of
from kvbus_transfer.errors import BackendFailed
from kvbus_transfer.regions import CudaRegion, Region

ENTRY_BYTES = 8
"""Of the lease table."""
_ENTRIES_KEPT = 64
_METADATA_KEPT = 64

Piece = tuple[int, int, int]
"""(to, from, length): addresses."""


class Place(msgspec.Struct, frozen=True):
    """Kind of memory for NIXL, and device."""

    kind: str = "DRAM"
    device: int = 0

    def address(self, memory: Any) -> int:
        """Of a target: it is writable, and not empty."""
        if self.kind == "DRAM":
            return ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return int(memory.data_ptr())


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
    """``peer_is_gone``: NIXL says so. It never has what NIXL raised as its cause: that refers to the agent, and an agent is
    destroyed when nothing refers to it."""

    peer_is_gone = False

    @classmethod
    def by(cls, error: Exception, doing: str) -> "ChannelFailed":
        failed = cls(f"NIXL {doing}: {error}")
        failed.peer_is_gone = type(error).__name__ == "nixlRemoteDisconnectError"
        return failed


class Channel:
    """It has one user at a time, who may call it in any thread, and is thrown away when anything goes wrong.

    What the loop wants of it meanwhile (`add_region`, `remove_region`, `close`) is done when it is given back (`rest`).
    """

    def __init__(self, agent: Any, generation: int = 0) -> None:
        self.generation = generation
        self.in_use = False
        self.is_broken = False
        self._agent = agent
        self._remote = ""
        self._metadata: set[bytes] = set()
        self._own: dict[int, tuple[int, int, Any]] = {}
        self._later: list[Callable[[], None]] = []
        self._entry = memoryview(bytearray(ENTRY_BYTES))
        self._entry_address = address_of(self._entry)
        self._entries: OrderedDict[int, Any] = OrderedDict()
        self._agent.register_memory([(self._entry_address, ENTRY_BYTES, 0, "")], "DRAM")

    # On the loop.

    def add_region(self, region: Region) -> None:
        """Own memory, as a target: registered once and not per read."""
        if self.in_use:
            self._later.append(lambda: self._add(region))
        else:
            self._add(region)

    def remove_region(self, region: Region) -> None:
        """It keeps the memory alive until NIXL has let go of it."""
        if self.in_use:
            self._later.append(lambda: self._remove(region))
        else:
            self._remove(region)

    def rest(self) -> None:
        """Its user is done."""
        self.in_use = False
        later, self._later = self._later, []
        for each in later:
            if not self.is_broken:
                each()

    def close(self) -> None:
        """Nothing is written by it any more once it has no user."""
        self.is_broken = True
        if not self.in_use:
            self.destroy()

    # By its user.

    def knows(self, metadata: bytes) -> bool:
        return metadata in self._metadata

    def know(self, metadata: bytes) -> None:
        """It takes 10 ms, mostly for the connection. Raise ChannelFailed."""
        if metadata in self._metadata:
            return
        self._entries.clear()  # they were made with what was known before
        remote = self._call("does not take the metadata", "add_remote_agent", metadata)
        self._remote = remote.decode() if isinstance(remote, bytes) else remote
        if len(self._metadata) >= _METADATA_KEPT:
            self._metadata.clear()
        self._metadata.add(metadata)

    def strangers(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        """Targets that are no memory of this agent: (start, end), in order."""
        start = end = 0
        spans: list[tuple[int, int]] = []
        for to, _, length in pieces:
            if start <= to and to + length <= end:
                continue
            for first, last, _ in self._own.values():
                if first <= to and to + length <= last:
                    start, end = first, last
                    break
            else:
                spans.append((to, to + length))
        return _merged(spans)

    def register(self, spans: Sequence[tuple[int, int]], place: Place) -> Any:
        """For one read: a handle for `deregister`. Raise ChannelFailed."""
        descs = [(start, end - start, place.device, "") for start, end in spans]
        return self._call("cannot register the targets", "register_memory", descs, place.kind)

    def deregister(self, handle: Any) -> None:
        with contextlib.suppress(ChannelFailed):
            self._call("cannot let go of the targets", "deregister_memory", handle)

    def transfer(self, pieces: Sequence[Piece], places: tuple[Place, Place]) -> Any:
        """One that is to be posted; `let_go` of it in the end. Raise ChannelFailed."""
        to_place, from_place = places
        local = [(to, length, to_place.device) for to, _, length in pieces]
        remote = [(source, length, from_place.device) for _, source, length in pieces]
        here = self._call("cannot begin", "get_xfer_descs", local, to_place.kind)
        there = self._call("cannot begin", "get_xfer_descs", remote, from_place.kind)
        return self._call("cannot begin", "initialize_xfer", "READ", here, there, self._remote)

    def entry_transfer(self, address: int) -> Any:
        """Of an entry of the lease table. It stays with the channel: a lease is read from more than once."""
        handle = self._entries.pop(address, None)
        if handle is None:
            handle = self.transfer([(self._entry_address, address, ENTRY_BYTES)], (HOST, HOST))
            while len(self._entries) >= _ENTRIES_KEPT:
                self._entries.popitem(last=False)
        self._entries[address] = handle
        self._entry[:] = bytes(ENTRY_BYTES)
        return handle

    def post(self, handle: Any) -> str:
        """Begin it: DONE, PROC or ERR. Raise ChannelFailed."""
        state: str = self._call("cannot read", "transfer", handle)
        return state

    def entry(self) -> bytes:
        """What the last entry was; zeros, which no lease has, before it has come."""
        return bytes(self._entry)

    def state(self, handle: Any) -> str:
        """Raise ChannelFailed."""
        state: str = self._call("cannot read", "check_xfer_state", handle)
        return state

    def let_go(self, handle: Any) -> None:
        """Of a transfer that has ended, not of an entry's."""
        with contextlib.suppress(ChannelFailed):
            self._call("cannot let go", "release_xfer_handle", handle)

    def destroy(self) -> None:
        """Nothing is written by it any more."""
        self.is_broken = True
        self._later.clear()
        self._entries.clear()
        self._own.clear()
        self._agent = None

    # Inside.

    def _add(self, region: Region) -> None:
        kind, address, device = placed(region)
        try:
            handle = self._call("cannot register", "register_memory", [(address, region.size_bytes, device, "")], kind)
        except ChannelFailed:
            self.is_broken = True
            return
        self._own[region.region_id] = (address, address + region.size_bytes, handle)

    def _remove(self, region: Region) -> None:
        found = self._own.pop(region.region_id, None)
        if found is not None:
            self.deregister(found[2])

    def _call(self, doing: str, name: str, *arguments: Any) -> Any:
        """A method of NIXL's. Raise ChannelFailed."""
        if self._agent is None:
            raise ChannelFailed("the channel was closed")
        try:
            return getattr(self._agent, name)(*arguments)
        except Exception as error:  # the library has exceptions of its own without a common root
            failed = ChannelFailed.by(error, doing)
        try:
            raise failed  # outside of the handler: `error` has frames that refer to the agent
        finally:
            del failed, arguments  # so has this one


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
