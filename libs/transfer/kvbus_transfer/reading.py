"""The reader's side of an agent: it picks the way, keeps to the limits and the deadline, and says how it ended."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvbus_transfer.backends.base import Backend, ReadJob
from kvbus_transfer.counters import TransferCounters
from kvbus_transfer.devices import DIRECT, flat, is_device_memory, to_device, to_host
from kvbus_transfer.errors import (
    BackendFailed,
    ChecksumMismatch,
    GrantRefused,
    PeerLost,
    PeerUnreachable,
    Refusal,
    TransferError,
    TransferTimeout,
)
from kvbus_transfer.grants import AgentInfo, body_of, pick
from kvbus_transfer.hosts import host_identity
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Finish, Notify, Open, Store, Summed, Sums
from kvbus_transfer.peers import Peer
from kvbus_transfer.server import summed

_PEERS_KEPT = 256


class Reader:
    """``backends``: of the agent, in the order of preference. ``me``: its name and incarnation."""

    def __init__(
        self,
        backends: dict[str, Backend],
        limits: TransferLimits,
        counters: TransferCounters,
        *,
        me: tuple[str, int],
        secret: bytes,
        tls: ssl.SSLContext | None,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.counters = counters
        self.backends = backends
        self._me = me
        self._secret = secret
        self._tls = tls
        self._clock = clock
        self._host_id = host_identity()
        self._peers: dict[tuple[str, int, str, int], Peer] = {}

    def bytes_under_way(self) -> int:
        return sum(peer.budget.used_bytes for peer in self._peers.values())

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

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
        body = body_of(grant)
        if body.access != "read":
            raise GrantRefused(Refusal.WRONG_ACCESS, f"it is to {body.access}", peer=body.owner.agent_id)
        if layout and layout != body.layout:
            raise GrantRefused(Refusal.WRONG_LAYOUT, f"{body.layout!r}, not {layout!r}", peer=body.owner.agent_id)
        numbers = list(indices)
        segments = pick(body, numbers)
        views = [flat(target) if is_device_memory(target) else memoryview(target).cast("B") for target in targets]
        if len(views) != len(segments):
            raise ValueError(f"{len(views)} targets for {len(segments)} segments")
        for view, (_, length) in zip(views, segments, strict=True):
            if view.nbytes != length or getattr(view, "readonly", False):
                raise ValueError(f"a target of {view.nbytes} bytes for a segment of {length}, or one that is read-only")
        try:
            async with self._peer(body.owner) as peer, self._deadline(deadline_s, peer) as left:
                used = ""
                for part in self._batches(segments):
                    size = sum(length for _, length in segments[part])
                    async with peer.budget.room(size):
                        same_host = peer.info.host_id == self._host_id
                        job = ReadJob(peer, grant, body, numbers[part], segments[part], views[part], left(), same_host)
                        used = await self._read(job, backend)
                        if checksum:
                            await self._compare(job)
        except TransferError as error:
            self.counters.failed[error.code] += 1
            raise
        return used

    async def store(
        self, grant: bytes, indices: Sequence[int], source: bytes, *, deadline_s: float, checksum: bool
    ) -> None:
        """Have the owner of ``grant`` fetch the segments of ``source``. Raise TransferError."""
        body = body_of(grant)
        try:
            async with self._peer(body.owner) as peer, self._deadline(deadline_s, peer) as left:
                await peer.ask(
                    Store(grant=grant, indices=list(indices), source=source, deadline_s=left(), checksum=checksum)
                )
        except TransferError as error:
            self.counters.failed[error.code] += 1
            raise

    async def finish(self, grant: bytes, *, deadline_s: float = 5.0) -> None:
        """Tell the owner that all was read: the lease ends. Raise TransferError."""
        body = body_of(grant)
        async with self._peer(body.owner) as peer, self._deadline(deadline_s, peer):
            await peer.ask(Finish(grant=grant))

    async def notify(self, info: AgentInfo, payload: bytes, *, deadline_s: float = 5.0) -> None:
        """`on_notify` of that agent is called. Raise TransferError."""
        async with self._peer(info) as peer, self._deadline(deadline_s, peer):
            await peer.ask(Notify(payload=payload))

    @asynccontextmanager
    async def _peer(self, info: AgentInfo) -> AsyncIterator[Peer]:
        key = (info.agent_id, info.incarnation, info.host, info.port)
        peer = self._peers.pop(key, None)
        if peer is None:
            peer = Peer(info, self.limits, me=self._me, secret=self._secret, tls=self._tls)
        self._peers[key] = peer
        for old, each in list(self._peers.items()):
            if len(self._peers) <= _PEERS_KEPT:
                break
            if each.users == 0 and each is not peer:
                each.close()
                del self._peers[old]
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1

    @asynccontextmanager
    async def _deadline(self, deadline_s: float, peer: Peer) -> AsyncIterator[Callable[[], float]]:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(deadline_s, self.limits.deadline_s)
        try:
            async with asyncio.timeout_at(until):
                yield lambda: max(0.0, until - loop.time())
        except TimeoutError as error:
            name = peer.info.agent_id
            raise TransferTimeout(f"{name} took longer than {deadline_s:g} s", peer=name) from error

    def _batches(self, segments: Sequence[tuple[int, int]]) -> list[slice]:
        batches: list[slice] = []
        start = size = 0
        for at, (_, length) in enumerate(segments):
            if at > start and size + length > self.limits.batch_bytes:
                batches.append(slice(start, at))
                start, size = at, 0
            size += length
        if segments:
            batches.append(slice(start, len(segments)))
        return batches

    async def _read(self, job: ReadJob, only: str | None) -> str:
        """With the first backend that can; one that fails rests for a while."""
        failure: TransferError | None = None
        for name in self._usable(job, only):
            try:
                await self._fetch(name, job)
            except (BackendFailed, PeerLost) as error:
                await self._ask_why(job, error)
                failure = error
                job.peer.resting[name] = self._clock() + self.limits.backend_rest_s
                self.counters.fallbacks[name] += 1
                continue
            self.counters.reads[name] += 1
            self.counters.read_bytes[name] += sum(length for _, length in job.segments)
            return name
        raise failure or BackendFailed("no backend of both sides fits", peer=job.peer.info.agent_id)

    async def _ask_why(self, job: ReadJob, error: TransferError) -> None:
        """Raise what ended it, if it was the grant (a connection that ends says nothing) or the peer itself."""
        job.peer.drop_idle()
        try:
            await job.peer.ask(Open(grant=job.grant, backend="tcp"))
        except (PeerUnreachable, PeerLost) as gone:
            raise PeerLost(f"{error.detail}; {gone.detail}", peer=job.peer.info.agent_id) from error

    async def _fetch(self, name: str, job: ReadJob) -> None:
        """Device memory is staged in host memory for backends that cannot write to it."""
        device = [at for at, target in enumerate(job.targets) if not isinstance(target, memoryview)]
        if not device or name in DIRECT:
            await self.backends[name].fetch(job)
            return
        staged = list(job.targets)
        for at in device:
            staged[at] = memoryview(bytearray(job.targets[at].nbytes))
        await self.backends[name].fetch(msgspec.structs.replace(job, targets=staged))
        for at in device:
            await asyncio.to_thread(to_device, staged[at], job.targets[at])

    def _usable(self, job: ReadJob, only: str | None) -> list[str]:
        peer, now, found = job.peer, self._clock(), []
        for name, data in ((name, job.body.owner.backends.get(name)) for name in self.backends):
            if data is None or (only is not None and name != only):
                continue
            rests = name != "tcp" and peer.resting.get(name, 0.0) > now
            if not rests and self.backends[name].can_reach(data, same_host=job.same_host):
                found.append(name)
        return found

    async def _compare(self, job: ReadJob) -> None:
        answer = await job.peer.ask(Sums(grant=job.grant, indices=job.indices, deadline_s=job.deadline_s))
        if not isinstance(answer, Summed) or len(answer.sums) != len(job.targets):
            raise PeerLost("no checksums", peer=job.peer.info.agent_id)
        for index, target, theirs in zip(job.indices, job.targets, answer.sums, strict=True):
            self.counters.checksums += 1
            host = target if isinstance(target, memoryview) else await asyncio.to_thread(to_host, target)
            if await summed(host) != theirs:
                raise ChecksumMismatch(f"block {index} is not what the owner has", peer=job.peer.info.agent_id)
