"""The reader's side of an agent: it picks the way, keeps to the limits and the deadline, and says how it ended."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
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
from kvbus_transfer.grants import AgentInfo, GrantBody, body_of, pick
from kvbus_transfer.host_memory import host_memory
from kvbus_transfer.hosts import host_identity
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Finish, Notify, Open, Request, Store, Summed, Sums
from kvbus_transfer.peers import Peer
from kvbus_transfer.server import summed

_PEERS_KEPT = 256
_BODIES_KEPT = 64


_Key = tuple[str, int, str, int]


def _key(info: AgentInfo) -> _Key:
    return info.agent_id, info.incarnation, info.host, info.port


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
        self._bodies: dict[bytes, GrantBody] = {}
        self._peers: dict[_Key, Peer] = {}

    def knows(self, agent_id: str) -> bool:
        return any(peer.info.agent_id == agent_id for peer in self._peers.values())

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
        body = self._body(grant)
        owner = body.owner.agent_id
        if body.access != "read":
            raise GrantRefused(Refusal.WRONG_ACCESS, f"it is to {body.access}", peer=owner)
        if layout and layout != body.layout:
            raise GrantRefused(Refusal.WRONG_LAYOUT, f"{body.layout!r}, not {layout!r}", peer=owner)
        numbers = list(indices)
        segments = pick(body, numbers)
        views = [flat(target) if is_device_memory(target) else memoryview(target).cast("B") for target in targets]
        if len(views) != len(segments):
            raise ValueError(f"{len(views)} targets for {len(segments)} segments")
        for view, (_, length) in zip(views, segments, strict=True):
            if view.nbytes != length or getattr(view, "readonly", False):
                raise ValueError(f"a target of {view.nbytes} bytes for a segment of {length}, or one that is read-only")
        peer = self._peer(body.owner)
        until = asyncio.get_running_loop().time() + min(deadline_s, self.limits.deadline_s)
        used = ""
        try:
            async with asyncio.timeout_at(until):
                for part in self._batches(segments):
                    job = ReadJob(
                        peer=peer,
                        grant=grant,
                        body=body,
                        indices=numbers[part],
                        segments=segments[part],
                        targets=views[part],
                        until=until,
                        same_host=peer.info.host_id == self._host_id,
                    )
                    size = job.size_bytes
                    await peer.budget.take(size)
                    try:
                        used = await self._read(job, backend)
                        if checksum:
                            await self._compare(job)
                    finally:
                        peer.budget.give(size)
        except TimeoutError as error:
            self.counters.failed[TransferTimeout.code] += 1
            raise TransferTimeout(f"{owner} took longer than {deadline_s:g} s", peer=owner) from error
        except TransferError as error:
            self.counters.failed[error.code] += 1
            raise
        finally:
            self._leave(peer)
        return used

    async def store(
        self, grant: bytes, indices: Sequence[int], source: bytes, *, deadline_s: float, checksum: bool
    ) -> None:
        """Have the owner of ``grant`` fetch the segments of ``source``. Raise TransferError."""
        await self._ask(
            self._body(grant).owner,
            lambda left_s: Store(
                grant=grant, indices=list(indices), source=source, deadline_s=left_s, checksum=checksum
            ),
            deadline_s,
        )

    async def finish(self, grant: bytes, *, deadline_s: float = 5.0) -> None:
        """Tell the owner that all was read: the lease ends. Raise TransferError."""
        await self._ask(self._body(grant).owner, lambda _: Finish(grant=grant), deadline_s)

    async def notify(self, info: AgentInfo, payload: bytes, *, deadline_s: float = 5.0) -> None:
        """Raise TransferError."""
        await self._ask(info, lambda _: Notify(payload=payload), deadline_s)

    def _body(self, grant: bytes) -> GrantBody:
        """Grants are read from more than once, and long ones take a while to decode."""
        body = self._bodies.pop(grant, None)
        if body is None:
            body = body_of(grant)
            while len(self._bodies) >= _BODIES_KEPT:
                del self._bodies[next(iter(self._bodies))]
        self._bodies[grant] = body
        return body

    def _peer(self, info: AgentInfo) -> Peer:
        """One more user of it, until `_leave`."""
        key = _key(info)
        peer = self._peers.get(key)
        if peer is None:
            peer = Peer(
                info, self.limits, me=self._me, secret=self._secret, tls=self._tls, on_gone=self._forget_if_unused
            )
            for old, each in list(self._peers.items()):
                if len(self._peers) < _PEERS_KEPT:
                    break
                if each.users == 0:
                    self._forget(old, each)
            self._peers[key] = peer
        peer.users += 1
        return peer

    def _leave(self, peer: Peer) -> None:
        peer.users -= 1
        if peer.is_gone:
            self._forget_if_unused(peer)

    def _forget_if_unused(self, peer: Peer) -> None:
        """An owner that has gone: mapped arenas of it would keep their memory."""
        key = _key(peer.info)
        if peer.users == 0 and self._peers.get(key) is peer:
            self._forget(key, peer)

    def _forget(self, key: _Key, peer: Peer) -> None:
        del self._peers[key]
        peer.close()
        for backend in self.backends.values():
            backend.forget(peer)

    async def _ask(self, info: AgentInfo, request: Callable[[float], Request], deadline_s: float) -> None:
        """``request`` is made from the time that is left."""
        peer = self._peer(info)
        left_s = min(deadline_s, self.limits.deadline_s)
        try:
            async with asyncio.timeout(left_s):
                await peer.ask(request(left_s))
        except TimeoutError as error:
            self.counters.failed[TransferTimeout.code] += 1
            detail = f"{info.agent_id} took longer than {deadline_s:g} s"
            raise TransferTimeout(detail, peer=info.agent_id) from error
        except TransferError as error:
            self.counters.failed[error.code] += 1
            raise
        finally:
            self._leave(peer)

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
            self.counters.read_bytes[name] += job.size_bytes
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
            staged[at] = host_memory(job.targets[at].nbytes)
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
