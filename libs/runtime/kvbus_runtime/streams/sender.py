"""The worker's side of step streams: one message per frontend and step, numbered, kept for a while, with heartbeats."""

import asyncio
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import msgspec

from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta, Ended, Started, StepFrame
from kvbus_wire.message import CONTENT_TYPE, encode
from kvbus_wire.worker import ReplayedSteps, ReplaySteps

if TYPE_CHECKING:
    from kvbus_runtime.service import Service

REPLY_ROOM = 1024
"""Frames stay so much below the payload limit that a replay reply can carry any one of them."""

Item = Started | Delta | Ended


class SenderLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The replay ring of each frontend, how long it outlives its last request, and how many frontends are remembered."""

    ring_frames: int = 2048
    ring_bytes: int = 8 << 20
    ring_idle_s: float = 60.0
    frontends: int = 4096


class _Peer(msgspec.Struct):
    """One frontend. ``ring``: (seq, encoded frame), consecutive, ending with ``seq``."""

    subject: str
    seq: int = 0
    ring: deque[tuple[int, bytes]] = msgspec.field(default_factory=deque)
    ring_bytes: int = 0
    open: set[str] = msgspec.field(default_factory=set)
    items: list[Item] = msgspec.field(default_factory=list)
    last_delta: dict[str, int] = msgspec.field(default_factory=dict)
    ended: set[str] = msgspec.field(default_factory=set)
    sent_at: float = 0.0
    forget_ring: asyncio.TimerHandle | None = None


class StepSender:
    """``open`` a request when it is accepted, ``add_*`` what the engine says about it, ``flush`` at the end of each step.

    All of these are synchronous and never wait; a task publishes. While a frontend has open requests it hears something at least
    each ``heartbeat_s``.
    """

    def __init__(
        self,
        service: "Service",
        *,
        heartbeat_s: float = 1.0,
        limits: SenderLimits = SenderLimits(),  # noqa: B008  (frozen)
    ) -> None:
        self._bus = service.bus
        self._log = service.log
        self._worker_id = service.instance_id
        self._incarnation = service.incarnation
        self._heartbeat_s = heartbeat_s
        self._limits = limits
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._dirty: dict[str, _Peer] = {}
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._outgoing_bytes = 0
        self._wake = asyncio.Event()
        self._sent_all = asyncio.Event()
        self._sent_all.set()
        self._any_open = asyncio.Event()
        metrics = service.metrics
        self._frames = metrics.counter("step_frames_sent", "step frames published")
        self._heartbeats = metrics.counter("step_heartbeats_sent", "heartbeats published")
        self._replayed = metrics.counter("step_frames_replayed", "step frames sent again")
        self._gone = metrics.counter("step_replays_refused", "replays of frames that had left the ring")
        self._skipped = metrics.counter("step_frames_skipped", "frames left to replay because the bus was too slow")
        self._tasks = [
            service.spawn(self._pump(), name="step frames"),
            service.spawn(self._beat(), name="step heartbeats"),
        ]

    # the worker's calls

    def open(self, request_id: str, frontend_id: str) -> None:
        """From now on the frontend waits for this request."""
        self._peer(frontend_id).open.add(request_id)
        self._any_open.set()

    def discard(self, request_id: str, frontend_id: str) -> None:
        """The request ends without a terminal event (it was refused after all)."""
        peer = self._peers.get(frontend_id)
        if peer is not None:
            self._close_request(frontend_id, peer, request_id)

    def add_started(self, frontend_id: str, started: Started) -> None:
        peer = self._peer(frontend_id)
        if started.request_id in peer.ended:
            # The id begins anew within one step; a frame tells only one life of a request.
            self._flush_peer(peer)
        peer.open.add(started.request_id)
        self._any_open.set()
        self._add(frontend_id, peer, started)

    def add_delta(self, frontend_id: str, delta: Delta) -> None:
        """Deltas of one request in one step are joined."""
        peer = self._peer(frontend_id)
        position = peer.last_delta.get(delta.request_id)
        if position is not None:
            joined = _joined(peer.items[position], delta)
            if joined is not None:
                peer.items[position] = joined
                return
        peer.last_delta[delta.request_id] = len(peer.items)
        self._add(frontend_id, peer, delta)

    def add_ended(self, frontend_id: str, ended: Ended) -> None:
        peer = self._peer(frontend_id)
        peer.ended.add(ended.request_id)
        self._add(frontend_id, peer, ended)
        self._close_request(frontend_id, peer, ended.request_id)

    def flush(self) -> None:
        """What was added since the last flush leaves, as one frame per frontend."""
        for peer in self._dirty.values():
            self._flush_peer(peer)
        self._dirty.clear()

    def forget(self, frontend_id: str) -> None:
        """The frontend is gone. Its number stays: if it is back after all, its count must go on."""
        peer = self._peers.get(frontend_id)
        if peer is not None:
            peer.open.clear()
            self._clear_ring(peer)

    def replay(self, message: ReplaySteps) -> ReplayedSteps:
        """The leading frames of the wanted range that fit into one reply; empty when the range has not been sent yet.

        Raise RequestFailed (gone) when its first frame has left the ring.
        """
        peer = self._peers.get(message.frontend_id)
        last_sent = peer.seq if peer is not None else 0
        if message.incarnation != self._incarnation:
            raise self._refuse(f"this is incarnation {self._incarnation}")
        if message.first_seq > last_sent:
            return ReplayedSteps(frames=())
        if peer is None or not peer.ring or peer.ring[0][0] > message.first_seq:
            raise self._refuse(f"frame {message.first_seq} has left the ring")
        frames: list[bytes] = []
        size = 0
        for seq, data in peer.ring:
            if seq < message.first_seq:
                continue
            size += len(data) + 8
            if seq > message.last_seq or (frames and size > self._bus.max_payload - REPLY_ROOM):
                break
            frames.append(data)
        self._replayed.inc(len(frames))
        return ReplayedSteps(frames=tuple(frames))

    async def close(self) -> None:
        """Publish what was flushed, then stop."""
        self.flush()
        sent = asyncio.create_task(self._sent_all.wait())
        # After a crash the pump is gone, and what it has left will not be sent.
        await asyncio.wait([sent, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (sent, *self._tasks):
            task.cancel()
        for peer in self._peers.values():
            if peer.forget_ring is not None:
                peer.forget_ring.cancel()

    def _refuse(self, why: str) -> RequestFailed:
        self._gone.inc()
        return RequestFailed.of(ErrorCode.GONE, why)

    # frames

    def _peer(self, frontend_id: str) -> _Peer:
        peer = self._peers.get(frontend_id)
        if peer is None:
            peer = _Peer(self._bus.subjects.steps(frontend_id))
            self._drop_old_peers()
            self._peers[frontend_id] = peer
        self._peers.move_to_end(frontend_id)
        if peer.forget_ring is not None:
            peer.forget_ring.cancel()
            peer.forget_ring = None
        return peer

    def _drop_old_peers(self) -> None:
        if len(self._peers) >= self._limits.frontends:
            for frontend_id, peer in self._peers.items():
                if not peer.open and not peer.items:
                    del self._peers[frontend_id]
                    return

    def _add(self, frontend_id: str, peer: _Peer, item: Item) -> None:
        peer.items.append(item)
        self._dirty[frontend_id] = peer

    def _close_request(self, frontend_id: str, peer: _Peer, request_id: str) -> None:
        peer.open.discard(request_id)
        if not peer.open and peer.forget_ring is None:
            loop = asyncio.get_running_loop()
            peer.forget_ring = loop.call_later(self._limits.ring_idle_s, self._clear_ring, peer)

    @staticmethod
    def _clear_ring(peer: _Peer) -> None:
        if not peer.open:
            peer.ring.clear()
            peer.ring_bytes = 0

    def _flush_peer(self, peer: _Peer) -> None:
        items = peer.items
        if not items:
            return
        peer.items = []
        peer.last_delta.clear()
        peer.ended.clear()
        for seq, data in self._frames_of(peer, items):
            self._keep(peer, seq, data)
            self._frames.inc()
            self._push(peer.subject, data)
        peer.sent_at = asyncio.get_running_loop().time()

    def _frames_of(self, peer: _Peer, items: list[Item]) -> list[tuple[int, bytes]]:
        """As few frames as the payload limit allows; the order within each request is kept."""
        data = encode(self._frame(peer.seq + 1, items))
        if len(data) <= self._bus.max_payload - REPLY_ROOM:
            peer.seq += 1
            return [(peer.seq, data)]
        first, second = _halves(items)
        return [*self._frames_of(peer, first), *(self._frames_of(peer, second) if second else ())]

    def _frame(self, seq: int, items: list[Item]) -> StepFrame:
        return StepFrame(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            seq=seq,
            started=tuple(item for item in items if isinstance(item, Started)),
            deltas=tuple(item for item in items if isinstance(item, Delta)),
            ended=tuple(item for item in items if isinstance(item, Ended)),
        )

    def _keep(self, peer: _Peer, seq: int, data: bytes) -> None:
        peer.ring.append((seq, data))
        peer.ring_bytes += len(data)
        while len(peer.ring) > self._limits.ring_frames or peer.ring_bytes > self._limits.ring_bytes:
            peer.ring_bytes -= len(peer.ring.popleft()[1])

    def _push(self, subject: str, data: bytes) -> None:
        self._outgoing.append((subject, data))
        self._outgoing_bytes += len(data)
        while self._outgoing_bytes > 2 * self._limits.ring_bytes:
            self._outgoing_bytes -= len(self._outgoing.popleft()[1])
            self._skipped.inc()
        self._sent_all.clear()
        self._wake.set()

    # tasks

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            while self._outgoing:
                subject, data = self._outgoing.popleft()
                self._outgoing_bytes -= len(data)
                await self._bus.publish_bytes(subject, data, content_type=CONTENT_TYPE)
            self._wake.clear()
            self._sent_all.set()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._any_open.wait()
            await asyncio.sleep(self._heartbeat_s)
            now = loop.time()
            busy = [peer for peer in self._peers.values() if peer.open]
            if not busy:
                self._any_open.clear()
            for peer in busy:
                # Half an interval of slack: a frame just before the tick must not push the next sign of life two intervals away.
                if now - peer.sent_at >= self._heartbeat_s / 2 and self._bus.is_connected:
                    peer.sent_at = now
                    self._heartbeats.inc()
                    data = encode(self._frame(peer.seq, []))
                    await self._bus.publish_bytes(peer.subject, data, content_type=CONTENT_TYPE)


def _joined(earlier: Item, later: Delta) -> Delta | None:
    """One delta for two that follow each other; None when they cannot be told as one."""
    if not isinstance(earlier, Delta) or bool(earlier.logprobs) != bool(later.logprobs):
        return None
    if earlier.start + len(earlier.tokens) // 4 != later.start:
        return None
    return Delta(earlier.request_id, earlier.start, earlier.tokens + later.tokens, (*earlier.logprobs, *later.logprobs))


def _halves(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Split a frame that is too large; a single item is split inside, or cut down to what must be told."""
    if len(items) > 1:
        # The parts of a frame are read in this order, so a split in it keeps the order within each request.
        ordered = sorted(items, key=lambda item: (isinstance(item, Ended), isinstance(item, Delta)))
        middle = len(ordered) // 2
        return ordered[:middle], ordered[middle:]
    item = items[0]
    if isinstance(item, Delta) and len(item.tokens) > 4:
        count = len(item.tokens) // 4
        half = count // 2
        first = Delta(item.request_id, item.start, item.tokens[: half * 4], item.logprobs[:half])
        second = Delta(item.request_id, item.start + half, item.tokens[half * 4 :], item.logprobs[half:])
        return [first], [second]
    if isinstance(item, Delta):
        return [msgspec.structs.replace(item, logprobs=())], []
    if isinstance(item, Ended):
        error = ErrorReply(code=ErrorCode.INTERNAL, message="the terminal event was too large for the bus")
        return [msgspec.structs.replace(item, error=error)], []
    raise ValueError(f"a {type(item).__name__} event does not fit into a message")
