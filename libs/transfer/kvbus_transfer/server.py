"""The owner's side of a connection: it checks every grant that comes back and sends what the grant names, nothing else."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from kvbus_transfer.arena import checksum
from kvbus_transfer.backends.base import Backend
from kvbus_transfer.budget import ByteBudget
from kvbus_transfer.errors import BackendFailed, GrantRefused, LimitReached, PeerLost, TransferError, TransferTimeout
from kvbus_transfer.handshake import welcome
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import (
    Done,
    Fetch,
    Fetched,
    Finish,
    Notify,
    Open,
    Opened,
    Refused,
    Spoken,
    Store,
    Stored,
    Summed,
    Sums,
    Wake,
)
from kvbus_transfer.ownership import Ownership
from kvbus_transfer.regions import CudaRegion, Region
from kvbus_transfer.stream import Stream

log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20
_BUDGETS_KEPT = 1024


class Owner(Protocol):
    """What the server needs of its agent."""

    @property
    def ownership(self) -> Ownership: ...
    @property
    def backends(self) -> dict[str, Backend]: ...
    async def store(self, peer: str, request: Store) -> None: ...
    def finished(self, lease_id: int) -> None: ...
    def notified(self, peer: str, payload: bytes) -> None: ...


async def host_view(region: Region, offset: int, length: int) -> memoryview:
    """The bytes in host memory; what must be read or staged first is, in a thread."""
    if region.kind in ("file", "cuda"):
        return await asyncio.to_thread(region.view, offset, length)
    return region.view(offset, length)


class Server:
    def __init__(self, owner: Owner, limits: TransferLimits, *, me: tuple[str, int], secret: bytes) -> None:
        self._owner = owner
        self._limits = limits
        self._me = me
        self._secret = secret
        self._counters = owner.ownership.counters
        self._budgets: dict[str, ByteBudget] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, stream: Stream) -> None:
        if len(self._tasks) >= self._limits.inbound:
            self._counters.turned_away += 1
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream), name="kvbus-transfer-peer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def budget(self, peer: str) -> ByteBudget:
        known = self._budgets.pop(peer, None) or ByteBudget(self._limits.peer_bytes)
        self._budgets[peer] = known
        while len(self._budgets) > _BUDGETS_KEPT:
            idle = next((name for name, each in self._budgets.items() if each.used_bytes == 0), None)
            if idle is None:
                break
            del self._budgets[idle]
        return known

    async def _serve(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                peer = await welcome(stream, *self._me, self._secret)
            if peer is None:
                self._counters.unknown_peers += 1
                return
            while True:
                await self._watched(stream, peer, await stream.receive())
        except (PeerLost, TimeoutError):
            pass  # it ends with what it was doing
        except Exception:
            # One connection is all that a defect may cost: the peer sees it end.
            log.exception("transfer_connection_failed")
        finally:
            stream.close()

    async def _watched(self, stream: Stream, peer: str, message: Spoken) -> None:
        """Handle it for as long as the peer is there: one that dies in the middle frees what is held for it at once."""
        handling = asyncio.ensure_future(self._handle(stream, peer, message))
        try:
            await asyncio.wait([handling, stream.closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not handling.done():
                handling.cancel()
        try:
            await handling
        except asyncio.CancelledError:
            if not handling.cancelled() or stream.is_open:
                raise
            raise PeerLost("the peer closed the connection", peer=peer) from None

    async def _handle(self, stream: Stream, peer: str, message: Spoken) -> None:
        try:
            answer = await self._answer(stream, peer, message)
        except PeerLost:
            raise
        except GrantRefused as refused:
            answer = Refused(code=refused.code, detail=refused.detail, reason=refused.reason)
        except TransferError as error:
            answer = Refused(code=error.code, detail=error.detail)
        except TimeoutError:
            answer = Refused(code=TransferTimeout.code, detail="the owner did not manage it in time")
        except OSError as error:  # of a file region
            answer = Refused(code=BackendFailed.code, detail=str(error))
        await stream.say(answer)

    async def _answer(self, stream: Stream, peer: str, message: Spoken) -> Spoken:
        ownership = self._owner.ownership
        match message:
            case Open(grant=grant, backend=name, payload=payload):
                _, region = ownership.check(grant, peer)
                backend = self._owner.backends.get(name)
                if backend is None or not backend.can_serve(region):
                    raise BackendFailed(f"{name} cannot serve this region")
                return Opened(region_size=region.size_bytes, detail=await backend.opened(region, payload))
            case Fetch():
                async with self._within(message.deadline_s):
                    return await self._fetch(stream, peer, message)
            case Sums():
                async with self._within(message.deadline_s):
                    return await self._sums(peer, message)
            case Store():
                async with self._within(message.deadline_s):
                    await self._owner.store(peer, message)
                return Stored()
            case Finish(grant=grant):
                body, _ = ownership.check(grant, peer)
                self._owner.finished(body.lease_id)
                return Done()
            case Notify(payload=payload):
                if len(payload) > self._limits.notification_bytes:
                    raise LimitReached(f"a notification of {len(payload)} bytes", own=True)
                self._owner.notified(peer, payload)
                return Done()
            case Wake(backend=name):
                if (backend := self._owner.backends.get(name)) is not None:
                    backend.wake()
                return Done()
            case _:
                raise PeerLost("it said what is no request", peer=peer)

    def _within(self, deadline_s: float) -> asyncio.Timeout:
        return asyncio.timeout(max(0.0, min(deadline_s, self._limits.deadline_s)))

    async def _fetch(self, stream: Stream, peer: str, message: Fetch) -> Spoken:
        ownership = self._owner.ownership
        body, region = ownership.check(message.grant, peer, access="read")
        segments = ownership.segments(body, region, message.indices)
        size = sum(length for _, length in segments)
        budget = self.budget(peer)
        await budget.take(size)
        try:
            ownership.leases.get(body.lease_id)  # it may have waited
            if message.backend == "tcp":
                await stream.say(Fetched())  # the blocks follow
                await self._send(stream, body.lease_id, region, segments)
            else:
                backend = self._owner.backends.get(message.backend)
                if backend is None or not backend.can_serve(region):
                    raise BackendFailed(f"{message.backend} cannot serve this region")
                views: list[Any] = [
                    region.device_view(offset, length)
                    if isinstance(region, CudaRegion)
                    else region.view(offset, length)
                    for offset, length in segments
                ]
                await backend.push(message.payload, views)
                ownership.leases.get(body.lease_id)
        finally:
            budget.give(size)
        self._counters.served_bytes[message.backend] += size
        return Fetched()

    async def _send(self, stream: Stream, lease_id: int, region: Region, segments: Sequence[tuple[int, int]]) -> None:
        """The lease is looked at before each piece and after the last one. Once bytes are under way a refusal can only be the end
        of the connection; the reader asks again why."""
        parts: list[memoryview] = []
        held = 0
        for offset, length in segments:
            for start in range(offset, offset + length, _PIECE_BYTES):
                piece = min(_PIECE_BYTES, offset + length - start)
                parts.append(await host_view(region, start, piece))
                held += piece
                if held >= _PIECE_BYTES:
                    await self._send_parts(stream, lease_id, parts)
                    parts, held = [], 0
        if parts:
            await self._send_parts(stream, lease_id, parts)

    async def _send_parts(self, stream: Stream, lease_id: int, parts: Sequence[memoryview]) -> None:
        try:
            self._owner.ownership.leases.get(lease_id)
            await stream.send(*parts)
            self._owner.ownership.leases.get(lease_id)
        except BaseException as error:
            stream.close()
            if isinstance(error, GrantRefused):
                raise PeerLost("the lease ended in the middle") from error
            raise

    async def _sums(self, peer: str, message: Sums) -> Spoken:
        ownership = self._owner.ownership
        body, region = ownership.check(message.grant, peer, access="read")
        sums: list[int] = []
        for offset, length in ownership.segments(body, region, message.indices):
            view = await host_view(region, offset, length)
            sums.append(await summed(view))
        ownership.leases.get(body.lease_id)
        return Summed(sums=sums)


async def summed(view: memoryview) -> int:
    """The checksum of a block; that of a large one is computed in a thread."""
    return checksum(view) if len(view) <= _PIECE_BYTES else await asyncio.to_thread(checksum, view)
