"""This worker's transfer agent, and the memory from which others read: blocks are staged there under leases."""

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvbus_transfer import Arena, Granted, Region, TransferAgent, TransferLimits, host_memory, remove_stale
from kvbus_transfer.hosts import host_identity, shm_folder
from kvbus_worker.settings import WorkerSettings

_STAGING_FILES = "kvbus-staging-*.arena"


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``backends``: in the order of preference; ``advertise``: the host name that others connect to (empty: ``host``)."""

    backends: tuple[str, ...]
    secret: bytes
    host: str
    port: int
    advertise: str
    staging_bytes: int

    @classmethod
    def of(cls, settings: WorkerSettings) -> "TransferSettings":
        return cls(
            backends=settings.transfer_names,
            secret=settings.transfer_secret.encode(),
            host=settings.transfer_host,
            port=settings.transfer_port,
            advertise=settings.transfer_advertise,
            staging_bytes=settings.staging_bytes,
        )


class Reader(Protocol):
    """What reads blocks that others have granted: `TransferLink`."""

    async def read(
        self, grant: bytes, indices: Sequence[int], targets: Sequence[Any], *, deadline_s: float, layout: str
    ) -> str: ...

    async def finish(self, grant: bytes) -> None: ...


class TransferLink:
    """``names``: the ways that this worker has; empty before `start`, and where transfers are off. ``slots``: blocks that can be
    staged at a time. ``on_lease_end`` is told of each lease that this worker has granted."""

    def __init__(self, agent_id: str, settings: TransferSettings, *, block_bytes: int, layout: str, log: Any) -> None:
        self.agent_id = agent_id
        self._settings = settings
        self._block_bytes = block_bytes
        self._layout = layout
        self._log = log
        self._started: TransferAgent | None = None
        self._arena: Arena | None = None
        self._memory = memoryview(b"")
        self._region: Region | None = None
        self._making = asyncio.Lock()
        self.names: tuple[str, ...] = ()
        self.on_lease_end: Callable[[int], None] = lambda _lease_id: None
        self.slots = max(1, settings.staging_bytes // max(1, block_bytes))

    @property
    def _agent(self) -> TransferAgent:
        if self._started is None:
            raise RuntimeError("the transfer agent was not started")
        return self._started

    @property
    def leases(self) -> int:
        """That this worker has granted and that have not ended."""
        return self._agent.leases() if self.names else 0

    async def start(self) -> None:
        """Listen. Raise OSError when it cannot."""
        await asyncio.to_thread(_tidy_up)
        agent = TransferAgent(
            self.agent_id,
            secret=self._settings.secret,
            backends=self._settings.backends,
            limits=TransferLimits(),
            host=self._settings.host,
            port=self._settings.port,
            advertise_host=self._settings.advertise,
            on_lease_end=lambda lease_id, _how: self.on_lease_end(lease_id),
        )
        await agent.start()
        self._started = agent
        wanted = [*dict.fromkeys([*self._settings.backends, "tcp"])]
        self.names = tuple(name for name in wanted if name in self._agent.backends)
        for name, why in self._agent.unavailable.items():
            self._log.warning("transfer_backend_missing", backend=name, reason=why)

    async def close(self) -> None:
        """Idempotent. All leases end."""
        self.names = ()
        if self._started is not None:
            await self._started.stop()
        self._region, self._memory = None, memoryview(b"")
        if self._arena is not None:
            arena, self._arena = self._arena, None
            await asyncio.to_thread(arena.remove)

    async def prepare(self) -> None:
        """The staging memory exists from now on; it is made when it is first needed, since most workers never do. Raise
        ArenaError."""
        async with self._making:
            if self._region is not None:
                return
            self._arena = await asyncio.to_thread(_make_arena, self._block_bytes, self.slots)
            self._memory = self._arena.memory() if self._arena else host_memory(self._block_bytes * self.slots)
            self._region = self._agent.register(self._arena or self._memory, layout=self._layout)

    async def read(
        self, grant: bytes, indices: Sequence[int], targets: Sequence[Any], *, deadline_s: float, layout: str
    ) -> str:
        """Bring blocks that another worker has granted; returns the backend. Raise TransferError."""
        return await self._agent.read(grant, indices, targets, deadline_s=deadline_s, layout=layout)

    async def finish(self, grant: bytes) -> None:
        """All of it was read: its owner may use the memory again. Raise TransferError."""
        await self._agent.finish(grant)

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def grant(self, slots: Sequence[int], lease_s: float, peer: str) -> Granted:
        """The right of ``peer`` to read these slots. Raise LimitReached."""
        if self._region is None:
            raise RuntimeError("there is no staging memory yet")
        segments = [(slot * self._block_bytes, self._block_bytes) for slot in slots]
        return self._agent.grant(self._region, segments, lease_s, peer=peer)

    def release(self, lease_id: int) -> None:
        """Nothing read under it from now on counts as read: its slots may be used again. Idempotent."""
        self._agent.release(lease_id)


def _tidy_up() -> None:
    """Remove what workers that were killed have left, and read what is read once."""
    host_identity()
    folder = shm_folder()
    if folder is not None:
        remove_stale(folder, _STAGING_FILES)


def _make_arena(block_bytes: int, slots: int) -> Arena | None:
    """None where there is no memory file system. Raise ArenaError."""
    folder = shm_folder()
    if folder is None:
        return None
    return Arena.create(folder / f"kvbus-staging-{os.getpid()}-{secrets.token_hex(4)}.arena", block_bytes, slots)
