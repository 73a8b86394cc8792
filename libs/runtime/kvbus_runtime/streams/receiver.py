"""The frontend's side of step streams: order, repair, liveness, and one bounded stream per request."""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from kvbus_runtime.bus import Subscription
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.streams.sequencer import SequencerLimits, StepSequencer
from kvbus_runtime.streams.stream import StepStream, StreamLost, StreamOverflow
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import StepFrame
from kvbus_wire.message import DecodeFailed, Decoder
from kvbus_wire.records import InstanceRecord
from kvbus_wire.worker import ReplayedSteps, ReplaySteps

if TYPE_CHECKING:
    from kvbus_runtime.service import Service

__all__ = ["ReceiverLimits", "StepReceiver", "StepStream", "StreamLost", "StreamOverflow"]

PROBE_AFTER = 0.4
"""Share of the heartbeat timeout after which a silent worker is asked directly."""
PROBE_AGAIN_S = 0.5
REPLAY_FRAMES = 512
REPLAY_PAUSE_S = 0.1

_decoder = Decoder.of(StepFrame)


class ReceiverLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_tokens``: waiting in one stream; ``replay_attempts``: without progress; ``workers``: remembered positions;
    ``pending_bytes``: of the bus subscription; ``behind_s``: a worker's frames may be older than those delivered for so long."""

    stream_tokens: int = 65_536
    replay_attempts: int = 5
    replay_timeout_s: float = 2.0
    workers: int = 4096
    pending_bytes: int = 256 << 20
    behind_s: float = 2.0
    sequencer: SequencerLimits = SequencerLimits()


class _Source(msgspec.Struct):
    """One worker incarnation. ``unanswered``: probes in a row that nobody was there to answer. ``behind_since``: since when its
    frames have had numbers below the ones delivered."""

    worker_id: str
    incarnation: int
    sequencer: StepSequencer
    heard_at: float
    streams: dict[str, StepStream] = msgspec.field(default_factory=dict)
    repair: asyncio.Task[None] | None = None
    probe: asyncio.Task[None] | None = None
    unanswered: int = 0
    behind_since: float | None = None


class StepReceiver:
    """Open a stream before the request is sent to its worker, and iterate it.

    A gap in the frames is repaired from the worker's replay ring. A stream is lost when the frames are gone, when the worker's
    record has left or belongs to a newer incarnation, when nobody serves its subjects, or when it is silent for
    ``heartbeat_timeout_s``. While the bus is away, nobody is silent.
    """

    def __init__(
        self,
        service: "Service",
        *,
        heartbeat_timeout_s: float = 5.0,
        limits: ReceiverLimits = ReceiverLimits(),  # noqa: B008  (frozen)
    ) -> None:
        self._service = service
        self._bus = service.bus
        self._log = service.log
        self._frontend_id = service.instance_id
        self._timeout_s = heartbeat_timeout_s
        self._limits = limits
        self._sources: OrderedDict[tuple[str, int], _Source] = OrderedDict()
        self._newest: dict[str, int] = {}
        self._subscription: Subscription | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._any_stream = asyncio.Event()
        metrics = service.metrics
        self._received = metrics.counter("step_frames_received", "step frames received")
        self._gaps = metrics.counter("step_gaps", "gaps found in the step frames of a worker")
        self._replays = metrics.counter("step_replays", "replay requests by outcome", ("outcome",))
        self._lost = metrics.counter("streams_lost", "streams lost", ("reason",))
        self._open_gauge = metrics.gauge("streams_open", "streams being received")

    async def start(self) -> None:
        subject = self._bus.subjects.steps(self._frontend_id)
        self._subscription = await self._bus.subscribe(
            subject, [StepFrame], self._on_frame, pending_limit_bytes=self._limits.pending_bytes
        )
        self._service.directory.on_change(self._on_instance)
        self._bus.on_reconnect(self._bus_is_back)
        self._watch_task = self._service.spawn(self._watch(), name="watch step streams")

    async def close(self) -> None:
        """Streams that are still open are lost."""
        if self._subscription is not None:
            await self._subscription.stop()
        for source in self._sources.values():
            self._lose(source, "the receiver closes")
        tasks = [self._watch_task, *(task for s in self._sources.values() for task in (s.repair, s.probe))]
        for task in tasks:
            if task is not None:
                task.cancel()

    def open(self, request_id: str, worker_id: str, incarnation: int) -> StepStream:
        """The stream of a request that is about to be sent to ``worker_id``. Opening an id again replaces its stream."""
        source = self._source(worker_id, incarnation)

        def closed() -> None:
            if source.streams.get(request_id) is stream:
                del source.streams[request_id]
                self._count()

        stream = StepStream(worker_id, self._limits.stream_tokens, closed)
        if incarnation < self._newest.get(worker_id, incarnation):
            stream.fail(StreamLost(worker_id, "the worker has restarted"))
            return stream
        if not source.streams:
            source.heard_at = asyncio.get_running_loop().time()
            source.unanswered = 0
            if source.sequencer.gap is not None:
                # Frames that nobody waited for.
                source.sequencer.skip()
        former = source.streams.pop(request_id, None)
        if former is not None:
            former.fail(StreamLost(worker_id, "opened again"))
        source.streams[request_id] = stream
        self._count()
        self._any_stream.set()
        return stream

    def _count(self) -> None:
        self._open_gauge.set(sum(len(source.streams) for source in self._sources.values()))

    def _source(self, worker_id: str, incarnation: int) -> _Source:
        key = (worker_id, incarnation)
        source = self._sources.get(key)
        if source is None:
            now = asyncio.get_running_loop().time()
            source = _Source(worker_id, incarnation, StepSequencer(self._limits.sequencer), now)
            self._sources[key] = source
            if len(self._sources) > self._limits.workers:
                oldest = next((k for k, s in self._sources.items() if not s.streams and k != key), None)
                if oldest is not None:
                    del self._sources[oldest]
                    if self._newest.get(oldest[0]) == oldest[1]:
                        del self._newest[oldest[0]]
        self._sources.move_to_end(key)
        return source

    # frames

    def _on_frame(self, frame: StepFrame) -> None:
        self._received.inc()
        if frame.incarnation < self._newest.get(frame.worker_id, 0):
            return
        # Its number makes nobody else's streams void: that a worker has restarted is for the directory to say.
        source = self._source(frame.worker_id, frame.incarnation)
        source.heard_at = asyncio.get_running_loop().time()
        source.unanswered = 0
        self._check_numbering(source, frame.seq)
        self._take(source, frame)
        if source.sequencer.gap is not None:
            if source.streams:
                self._start_repair(source)
            else:
                source.sequencer.skip()

    def _check_numbering(self, source: _Source, seq: int) -> None:
        """A replay overtakes frames that are on their way, so a worker may seem to be behind, but only for a moment.

        If it stays behind, the position here is wrong (somebody else has published a frame with a higher number): go on where the
        worker is; what it has sent meanwhile is lost.
        """
        if seq >= source.sequencer.expected - 1:
            source.behind_since = None
        elif source.behind_since is None:
            source.behind_since = source.heard_at
        elif source.heard_at - source.behind_since > self._limits.behind_s:
            source.behind_since = None
            source.sequencer.rewind(seq)
            self._lose(source, "the worker is behind the frames received")

    def _take(self, source: _Source, frame: StepFrame) -> None:
        for ready in source.sequencer.receive(frame):
            self._deliver(source, ready)

    def _deliver(self, source: _Source, frame: StepFrame) -> None:
        streams = source.streams
        for items in (frame.started, frame.deltas, frame.ended):
            for item in items:
                stream = streams.get(item.request_id)
                if stream is not None:
                    stream.push(item)

    def _note_incarnation(self, worker_id: str, incarnation: int) -> None:
        if incarnation > self._newest.get(worker_id, 0):
            self._newest[worker_id] = incarnation
            for source in self._sources.values():
                if source.worker_id == worker_id and source.incarnation < incarnation:
                    self._lose(source, "the worker has restarted")

    def _on_instance(self, record: InstanceRecord, change: str) -> None:
        if change == "left":
            if self._newest.get(record.instance_id) == record.incarnation:
                # The next one may have a lower number: a clock was put right.
                del self._newest[record.instance_id]
            source = self._sources.get((record.instance_id, record.incarnation))
            if source is not None:
                self._lose(source, "the worker has left")
        elif record.worker is not None:
            self._note_incarnation(record.instance_id, record.incarnation)

    def _lose(self, source: _Source, reason: str) -> None:
        streams, source.streams = source.streams, {}
        lost = [stream for stream in streams.values() if not stream.is_over]
        if lost:
            self._lost.labels(reason.split(":")[0]).inc(len(lost))
            self._log.warning("streams_lost", worker=source.worker_id, reason=reason, streams=len(lost))
        for stream in lost:
            stream.fail(StreamLost(source.worker_id, reason))
        self._count()

    # repair

    def _start_repair(self, source: _Source) -> None:
        if source.repair is None or source.repair.done():
            self._gaps.inc()
            source.repair = self._service.spawn(self._repair(source), name=f"repair {source.worker_id}")

    async def _repair(self, source: _Source) -> None:
        failures = 0
        while (gap := source.sequencer.gap) is not None and source.streams:
            try:
                progress = await self._replay(source, *gap)
            except RequestFailed as failure:
                if failure.code is ErrorCode.GONE:
                    self._give_up(source, "frames are gone")
                    return
                progress = False
            failures = 0 if progress else failures + 1
            if failures >= self._limits.replay_attempts:
                self._give_up(source, "frames cannot be had again")
                return
            if not progress:
                await asyncio.sleep(REPLAY_PAUSE_S * failures)

    async def _replay(self, source: _Source, first: int, last: int) -> bool:
        """Ask for frames and take them; whether that closed any of the gap. Raise RequestFailed."""
        message = ReplaySteps(
            frontend_id=self._frontend_id,
            incarnation=source.incarnation,
            first_seq=first,
            last_seq=min(last, first + REPLAY_FRAMES - 1),
        )
        subject = self._bus.subjects.control(source.worker_id)
        try:
            reply: ReplayedSteps = await self._bus.request(
                subject, message, ReplayedSteps, timeout_s=self._limits.replay_timeout_s
            )
        except RequestFailed as failure:
            self._replays.labels(str(failure.code)).inc()
            raise
        self._replays.labels("ok").inc()
        source.heard_at = asyncio.get_running_loop().time()
        source.unanswered = 0
        before = source.sequencer.expected
        for data in reply.frames:
            try:
                frame: StepFrame = _decoder.decode(data)
            except DecodeFailed as problem:
                self._log.warning("bad_replayed_frame", worker=source.worker_id, error=str(problem))
                continue
            if (frame.worker_id, frame.incarnation) == (source.worker_id, source.incarnation):
                self._take(source, frame)
        return source.sequencer.expected > before

    def _give_up(self, source: _Source, reason: str) -> None:
        ready, lost = source.sequencer.give_up()
        for frame in ready:
            self._deliver(source, frame)
        if lost:
            self._lose(source, reason)

    # liveness

    def _bus_is_back(self) -> None:
        now = asyncio.get_running_loop().time()
        for source in self._sources.values():
            source.heard_at = now
            source.unanswered = 0

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        interval = min(0.5, self._timeout_s / 10)
        while True:
            await self._any_stream.wait()
            before = loop.time()
            await asyncio.sleep(interval)
            now = loop.time()
            stalled = now - before > 2 * interval + 0.5
            busy = [source for source in self._sources.values() if source.streams]
            if not busy:
                self._any_stream.clear()
            for source in busy:
                if stalled or not self._bus.is_connected:
                    # It is we who did not listen (a blocked loop, a stopped process, no bus).
                    source.heard_at = now
                self._check(source, now)

    def _check(self, source: _Source, now: float) -> None:
        silence = now - source.heard_at
        if silence < self._timeout_s * PROBE_AFTER:
            return
        if silence > self._timeout_s and any(stream.is_read for stream in source.streams.values()):
            self._lose(source, "the worker is silent")
        elif source.probe is None or source.probe.done():
            source.probe = self._service.spawn(self._probe(source), name=f"probe {source.worker_id}")

    async def _probe(self, source: _Source) -> None:
        """Ask for the next frame: an answer is a sign of life, and brings a last frame that got lost."""
        expected = source.sequencer.expected
        try:
            await self._replay(source, expected, expected + REPLAY_FRAMES - 1)
        except RequestFailed as failure:
            if failure.code is ErrorCode.GONE:
                source.sequencer.seen = max(source.sequencer.seen, expected)
                self._give_up(source, "frames are gone")
            elif failure.code is ErrorCode.UNAVAILABLE and self._bus.is_connected:
                source.unanswered += 1
                if source.unanswered >= 2:
                    self._lose(source, "nobody serves the worker's subjects")
                else:
                    await asyncio.sleep(PROBE_AGAIN_S)
