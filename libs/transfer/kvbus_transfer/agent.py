"""The transfer agent of a process: registers memory, grants leases on it, reads what others have granted.

agent = TransferAgent("worker-1", secret=..., backends=("shm", "tcp"))
await agent.start()
region = agent.register(arena)                            # at the owner
granted = agent.grant(region, [(0, 4096)], lease_s=30.0, peer="worker-2")
... granted.sealed goes to worker-2, over the bus ...
await agent.read(sealed, [0], [memoryview(buffer)], deadline_s=5.0)    # at the reader
await agent.finish(sealed)                                # the owner's lease ends
"""

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from kvbus_transfer.arena import Arena, remove_stale
from kvbus_transfer.backends.base import Backend, BackendUnavailable
from kvbus_transfer.backends.choice import make_backend
from kvbus_transfer.counters import TransferCounters
from kvbus_transfer.errors import GrantRefused, Refusal
from kvbus_transfer.grants import AgentInfo, Sealer, body_of, pick
from kvbus_transfer.hosts import host_identity, shm_folder
from kvbus_transfer.leases import Lease, LeaseEnd
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Store
from kvbus_transfer.ownership import Granted, Ownership
from kvbus_transfer.reading import Reader
from kvbus_transfer.regions import Region
from kvbus_transfer.server import Server, host_view
from kvbus_transfer.stream import Stream

_LEASE_FILES = "kvbus-transfer-*.leases"


class Tls(msgspec.Struct, frozen=True):
    """For connections that others make, and for those to others."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class TransferAgent:
    """All methods are to be called on the loop that started it. ``backends``: in the order of preference; those that cannot load
    are left out and named in `unavailable`; tcp is always there."""

    def __init__(
        self,
        agent_id: str,
        *,
        secret: bytes = b"",
        backends: Sequence[str] = ("shm", "nixl", "ucx", "tcp"),
        limits: TransferLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        tls: Tls | None = None,
        on_notify: Callable[[str, bytes], None] | None = None,
        on_lease_end: Callable[[int, LeaseEnd], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.agent_id = agent_id
        self.limits = limits or TransferLimits()
        self.counters = TransferCounters()
        self.backends: dict[str, Backend] = {}
        self.unavailable: dict[str, str] = {}
        self._wanted = [*dict.fromkeys([*backends, "tcp"])]
        self._secret = secret
        self._host, self._port, self._advertise_host = host, port, advertise_host
        self._tls = tls
        self._on_notify = on_notify
        self._on_lease_end = on_lease_end
        self._clock = clock
        self.incarnation = secrets.randbits(62) + 1
        self.table = memoryview(b"")
        self._table: Arena | None = None
        self._ownership: Ownership | None = None
        self._listener: asyncio.Server | None = None
        self._server: Server | None = None
        self.reader = Reader(
            self.backends,
            self.limits,
            self.counters,
            me=(agent_id, self.incarnation),
            secret=secret,
            tls=tls.client if tls else None,
            clock=clock,
        )
        self._expiry: asyncio.TimerHandle | None = None
        self._storing: dict[int, set[asyncio.Task[Any]]] = {}

    # Life.

    @property
    def ownership(self) -> Ownership:
        if self._ownership is None:
            raise RuntimeError("the agent was not started")
        return self._ownership

    @property
    def info(self) -> AgentInfo:
        return self.ownership.info

    async def start(self) -> AgentInfo:
        """Listen. Raise OSError when it cannot, ValueError when nobody could tell others where."""
        if not self._advertise_host and self._host in ("", "0.0.0.0", "::"):  # noqa: S104
            raise ValueError(f"advertise_host is needed with host {self._host!r}: peers cannot connect to that")
        self.table = await asyncio.to_thread(self._make_table)
        self._ownership = Ownership(
            Sealer(secrets.token_bytes(32)),
            self.table.cast("Q"),
            self.limits,
            self.counters,
            clock=self._clock,
            wall_ms=lambda: time.time_ns() // 1_000_000,
        )
        infos: dict[str, bytes] = {}
        try:
            for name in self._wanted:
                await self._start_backend(name, infos)
            me = (self.agent_id, self.incarnation)
            self._server = Server(self, self.limits, me=me, secret=self._secret)
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: Stream(self._accept), self._host, self._port, ssl=self._tls.server if self._tls else None
            )
        except BaseException:
            await self.stop()
            raise
        port = self._listener.sockets[0].getsockname()[1]
        self._ownership.info = AgentInfo(
            agent_id=self.agent_id,
            incarnation=self.incarnation,
            host_id=host_identity(),
            host=self._advertise_host or self._host,
            port=port,
            tls=self._tls is not None,
            backends=infos,
        )
        return self._ownership.info

    async def stop(self) -> None:
        """End all leases and connections. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._server is not None:
            await self._server.stop()
        if self._ownership is not None:
            for lease in self._ownership.leases.all():
                self._end(lease.lease_id, LeaseEnd.STOPPED)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self.reader.close()
        for backend in self.backends.values():
            await backend.stop()
        if self._table is not None:
            table, self._table = self._table, None
            await asyncio.to_thread(table.remove)

    async def __aenter__(self) -> "TransferAgent":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # The owner's side.

    def register(self, memory: Any, *, layout: str = "") -> Region:
        """``memory``: an Arena, a buffer, a `FileSegment`, or device memory (``__cuda_array_interface__``); keep it until
        `deregister`. Raise TypeError, ValueError, OSError."""
        region = self.ownership.register(memory, layout)
        for backend in self.backends.values():
            if backend.can_serve(region):
                backend.add_region(region)
        return region

    def deregister(self, region: Region) -> None:
        """Idempotent. Leases on it end."""
        for lease in self.ownership.deregister(region):
            self._ended(lease, LeaseEnd.RELEASED)
        for backend in self.backends.values():
            backend.remove_region(region)

    def grant(
        self,
        region: Region,
        segments: Sequence[tuple[int, int]],
        lease_s: float,
        *,
        peer: str = "",
        access: str = "read",
        lease_id: int | None = None,
    ) -> Granted:
        """A sealed right to read (``access``: or to write) these (offset, length) of a region, for ``peer`` alone (empty: for who
        has it), until the lease ends. With ``lease_id``: under a lease that runs, which is made longer if need be.

        Raise ValueError, LimitReached, GrantRefused (that lease has ended).
        """
        backends = {name: data for name, data in self.info.backends.items() if self.backends[name].can_serve(region)}
        granted = self.ownership.grant(
            region, segments, lease_s=lease_s, peer=peer, access=access, lease_id=lease_id, backends=backends
        )
        self._schedule_expiry()
        return granted

    def release(self, lease_id: int) -> bool:
        """End a lease. Nothing that is read under it from now on counts as read, so its memory may be used again; with a grant to
        write, wait for `quiet` first. False when it has ended before."""
        return self._end(lease_id, LeaseEnd.RELEASED)

    async def quiet(self, lease_id: int) -> None:
        """Wait until no write under an ended lease is under way any more."""
        while tasks := self._storing.get(lease_id):
            await asyncio.wait(tasks)

    def leases(self) -> int:
        """How many run. Zero when nothing is under way, or something leaks."""
        return len(self.ownership.leases)

    # The reader's side.

    async def read(
        self,
        grant: bytes,
        indices: Sequence[int],
        targets: Sequence[Any],
        *,
        deadline_s: float = 30.0,
        layout: str = "",
        checksum: bool = False,
        backend: str | None = None,
    ) -> str:
        """Bring segments ``indices`` of a grant to ``targets`` (writable buffers of the same lengths). Returns the backend.

        ``layout``: refuse blocks of another one. ``checksum``: compare with the owner's. ``backend``: this one only.
        Raise TransferError, and ValueError for targets that do not fit. After an error the targets hold garbage.
        """
        return await self.reader.read(
            grant, indices, targets, deadline_s=deadline_s, layout=layout, checksum=checksum, backend=backend
        )

    async def write(
        self,
        grant: bytes,
        indices: Sequence[int],
        region: Region,
        segments: Sequence[tuple[int, int]],
        *,
        deadline_s: float = 30.0,
        checksum: bool = False,
    ) -> None:
        """Put ``segments`` of an own region into segments ``indices`` of a grant to write. The owner of the memory fetches them, so
        that nobody else ever writes to it. Raise TransferError, ValueError."""
        body = body_of(grant)
        lengths = [length for _, length in pick(body, list(indices))]
        if lengths != [length for _, length in segments]:
            raise ValueError("the segments have other lengths than those of the grant")
        lease_s = min(deadline_s, self.limits.lease_s)
        source = self.grant(region, segments, lease_s, peer=body.owner.agent_id)
        try:
            await self.reader.store(grant, indices, source.sealed, deadline_s=deadline_s, checksum=checksum)
        finally:
            self.release(source.lease_id)

    async def finish(self, grant: bytes, *, deadline_s: float = 5.0) -> None:
        """Tell the owner that all was read: the lease ends. Raise TransferError."""
        await self.reader.finish(grant, deadline_s=deadline_s)

    async def notify(self, info: AgentInfo, payload: bytes, *, deadline_s: float = 5.0) -> None:
        """`on_notify` of that agent is called. Raise TransferError."""
        await self.reader.notify(info, payload, deadline_s=deadline_s)

    # What the server calls.

    async def store(self, peer: str, request: Store) -> None:
        body, region = self.ownership.check(request.grant, peer, access="write")
        segments = self.ownership.segments(body, region, request.indices)
        if body_of(request.source).owner.agent_id != peer:
            raise GrantRefused(Refusal.WRONG_PEER, "the source is of somebody else")
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        under_way = self._storing.setdefault(body.lease_id, set())
        under_way.add(task)
        try:
            await self.reader.read(
                request.source,
                range(len(segments)),
                [await host_view(region, offset, length) for offset, length in segments],
                deadline_s=request.deadline_s,
                checksum=request.checksum,
            )
            self.ownership.leases.get(body.lease_id)
        except asyncio.CancelledError:
            self.ownership.leases.get(body.lease_id)  # it may be why
            raise
        finally:
            under_way.discard(task)
            if not under_way:
                self._storing.pop(body.lease_id, None)

    def finished(self, lease_id: int) -> None:
        self._end(lease_id, LeaseEnd.FINISHED)

    def notified(self, peer: str, payload: bytes) -> None:
        if self._on_notify is not None:
            self._on_notify(peer, payload)

    # Inside.

    def _make_table(self) -> memoryview:
        """The lease table: in shared memory if shm is wanted, so that readers of this host can look at it."""
        size_bytes = self.limits.leases * 8
        folder = shm_folder()
        if "shm" in self._wanted and folder is not None:
            remove_stale(folder, _LEASE_FILES)
            name = f"kvbus-transfer-{os.getpid()}-{secrets.token_hex(4)}.leases"
            self._table = Arena.create(Path(folder) / name, size_bytes, 1)
            return self._table.memory()
        return memoryview(bytearray(size_bytes))

    async def _start_backend(self, name: str, infos: dict[str, bytes]) -> None:
        try:
            backend = make_backend(name, self)
            infos[name] = await backend.start()
        except BackendUnavailable as missing:
            self.unavailable[name] = missing.detail
        else:
            self.backends[name] = backend

    @property
    def lease_table(self) -> Arena | None:
        return self._table

    def _accept(self, stream: Stream) -> None:
        if self._server is None:
            stream.close()
        else:
            self._server.accept(stream)

    def _end(self, lease_id: int, how: LeaseEnd) -> bool:
        lease = self.ownership.leases.end(lease_id, how)
        if lease is not None:
            self._ended(lease, how)
        return lease is not None

    def _ended(self, lease: Lease, how: LeaseEnd) -> None:
        self.counters.leases_ended[how] += 1
        for task in self._storing.get(lease.lease_id, ()):
            task.cancel()
        if self._on_lease_end is not None:
            self._on_lease_end(lease.lease_id, how)

    def _schedule_expiry(self) -> None:
        due = self.ownership.leases.next_expiry()
        loop = asyncio.get_running_loop()
        if due is None:
            return
        when = loop.time() + max(0.0, due - self._clock())
        if self._expiry is None or self._expiry.when() > when or self._expiry.cancelled():
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for lease in self.ownership.leases.expire():
            self._ended(lease, LeaseEnd.EXPIRED)
        self._schedule_expiry()
