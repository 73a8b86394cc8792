"""The stream of KV events: appended by workers and kvbm, followed by indexers and by anyone who debugs."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.jetstream import NANOSECONDS, JetStreamRefused, StoredMessage, StreamInfo
from kvbus_runtime.ordered import Delivered, OrderedConsumer
from kvbus_runtime.serving import HEADER_MESSAGE_ID
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kv_events import KvEvent, KvEvents, Removed, Stored, encode_events
from kvbus_wire.message import CONTENT_TYPE, CONTENT_TYPE_JSON
from kvbus_wire.subjects import Subjects

if TYPE_CHECKING:
    from kvbus_runtime.service import Service

DUPLICATE_WINDOW_S = 120.0
APPEND_TIMEOUT_S = 5.0
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 2.0
CLOSE_TIMEOUT_S = 2.0

OnEvent = Callable[[str, bytes, Mapping[str, str], int], None]


class EventLog:
    """One JetStream stream per namespace, bounded by bytes and age (settings ``kv_stream_*``); it is made again when it is lost."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = bus.subjects.kv_stream

    @classmethod
    async def open(cls, bus: Bus) -> "EventLog":
        """Create the stream or bring it up to date. Raise RequestFailed (no JetStream) or JetStreamRefused."""
        log = cls(bus)
        await log.ensure()
        return log

    async def ensure(self) -> None:
        await jetstream.ensure_stream(self._bus, stream_config(self._bus))

    async def append(self, subject: str, data: bytes, *, msg_id: str, content_type: str) -> int:
        """Store one message; returns its sequence number in the stream. Within two minutes the same ``msg_id`` is stored once.

        Raise RequestFailed; when there was no acknowledgement it is retryable, with the same ``msg_id``.
        """
        if len(data) > self._bus.max_payload:
            limit = self._bus.max_payload
            raise RequestFailed.of(ErrorCode.PAYLOAD_TOO_LARGE, f"{len(data)} bytes are above the limit of {limit}")
        headers = {"Content-Type": content_type, HEADER_MESSAGE_ID: msg_id}
        try:
            try:
                ack = await jetstream.publish(self._bus, subject, data, headers, timeout_s=APPEND_TIMEOUT_S)
            except RequestFailed as failure:
                unanswered = failure.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)
                if not unanswered or not self._bus.is_connected:
                    raise
                # Nobody takes the subject, or only someone who listens in: the bus has lost the stream.
                await self.ensure()
                ack = await jetstream.publish(self._bus, subject, data, headers, timeout_s=APPEND_TIMEOUT_S)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        return ack.seq

    async def follow(
        self,
        filter_subject: str,
        handler: OnEvent,
        *,
        from_seq: int | None = None,
        stream_created: str = "",
        on_caught_up: Callable[[], None] | None = None,
        on_replaced: Callable[[], None] | None = None,
    ) -> OrderedConsumer:
        """Call ``handler(subject, data, headers, stream_seq)`` for each message, in order, through outages.

        ``from_seq``: None is everything, 0 only new messages, else the first sequence number wanted, in the stream that was made at
        ``stream_created`` if that is given. ``on_caught_up`` is called each time everything has been handled that was there at a
        start or restart. When the bus has lost the stream, ``on_replaced`` is called, the new one is read from its beginning, and
        sequence numbers begin again. Stop it with ``await result.stop()``.
        """

        def on_message(message: Delivered) -> None:
            handler(message.subject, message.data, message.headers, message.seq)

        start: str | int = "all" if from_seq is None else ("new" if from_seq == 0 else from_seq)
        consumer = OrderedConsumer(
            self._bus,
            self._stream,
            filter_subject,
            on_message,
            start=start,
            ensure=self.ensure,
            created=stream_created,
            on_replaced=on_replaced,
            on_caught_up=on_caught_up,
        )
        await consumer.start()
        return consumer

    async def range(
        self, filter_subject: str, first: int, last: int | None = None, *, limit: int | None = None
    ) -> list[StoredMessage]:
        """The stored messages of ``filter_subject`` with stream sequence ``first`` .. ``last`` (None: the end), those that the
        stream still holds, at most ``limit``."""
        found: list[StoredMessage] = []
        seq = first
        try:
            while (last is None or seq <= last) and (limit is None or len(found) < limit):
                message = await jetstream.next_message(self._bus, self._stream, filter_subject, seq)
                if message is None or (last is not None and message.seq > last):
                    break
                found.append(message)
                seq = message.seq + 1
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        return found

    async def info(self) -> StreamInfo | None:
        """None when the stream is not there. Raise RequestFailed."""
        try:
            return await jetstream.stream_info(self._bus, self._stream)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused

    async def last_seq(self) -> int:
        """Sequence number of the newest message, 0 when the stream is empty or not there."""
        info = await self.info()
        return info.state.last_seq if info else 0


def stream_config(bus: Bus) -> dict[str, Any]:
    settings = bus.settings
    subjects: Subjects = bus.subjects
    return {
        "name": subjects.kv_stream,
        "subjects": [subjects.kv_events("*", "*")],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_bytes": settings.kv_stream_max_bytes,
        "max_age": int(settings.kv_stream_max_age_s * NANOSECONDS),
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "num_replicas": settings.stream_replicas,
        "duplicate_window": int(min(DUPLICATE_WINDOW_S, settings.kv_stream_max_age_s) * NANOSECONDS),
        "allow_direct": True,
    }


class OutboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``events``, ``bytes``: waiting in the outbox; ``batch_events``, ``batch_bytes``: in one message;
    ``gather_s``: how long a batch gathers events before it leaves."""

    events: int = 65_536
    bytes: int = 32 << 20
    batch_events: int = 1024
    batch_bytes: int = 256 << 10
    gather_s: float = 0.002


def _size(event: KvEvent) -> int:
    match event:
        case Stored(parent, keys):
            return 32 + len(parent) + len(keys)
        case Removed(keys):
            return 32 + len(keys)
    return 32


class KvEventPublisher:
    """Numbers the KV events of one instance, model and tier, and appends them in order.

    A batch is sent again with the same message id until it is stored, over any outage, so nothing is lost or doubled while the
    outbox has room. When it has not, the oldest waiting events are dropped: the numbers go on, and followers see the gap and
    ask for a snapshot.
    """

    def __init__(
        self,
        service: "Service",
        model: str,
        tier: str,
        block_size: int,
        limits: OutboxLimits = OutboxLimits(),  # noqa: B008  (frozen)
    ) -> None:
        self._bus = service.bus
        self._log = service.log
        self._instance_id = service.instance_id
        self._incarnation = service.incarnation
        self._model = model
        self._tier = tier
        self._block_size = block_size
        self._limits = limits
        self._as_json = service.settings.kv_event_encoding == "json"
        self._subject = service.bus.subjects.kv_events(model, service.instance_id)
        self._events = EventLog(service.bus)
        self._last_seq = 0
        self._waiting: deque[tuple[int, KvEvent, int]] = deque()
        self._waiting_bytes = 0
        self._sending = False
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        metrics = service.metrics
        self._emitted = metrics.counter("kv_events", "KV events emitted", ("tier",)).labels(tier)
        self._dropped = metrics.counter("kv_events_dropped", "KV events dropped by a full outbox", ("tier",)).labels(
            tier
        )
        self._retries = metrics.counter("kv_event_retries", "KV event batches sent again", ("tier",)).labels(tier)
        self._backlog = metrics.gauge("kv_events_waiting", "KV events not yet stored", ("tier",)).labels(tier)
        self._task = service.spawn(self._run(), name=f"kv events {tier}")

    @property
    def last_seq(self) -> int:
        """Number of the last event emitted (0: none yet); reported in LoadReport.kv_seq and in snapshots."""
        return self._last_seq

    def emit(self, events: Sequence[KvEvent]) -> None:
        """Number the events and put them into the outbox."""
        for event in events:
            self._last_seq += 1
            size = _size(event)
            self._waiting.append((self._last_seq, event, size))
            self._waiting_bytes += size
        while self._waiting and (len(self._waiting) > self._limits.events or self._waiting_bytes > self._limits.bytes):
            self._waiting_bytes -= self._waiting.popleft()[2]
            self._dropped.inc()
        self._emitted.inc(len(events))
        self._note()

    def _note(self) -> None:
        self._backlog.set(len(self._waiting))
        if self._waiting:
            self._wake.set()
        if self._waiting or self._sending:
            self._empty.clear()
        else:
            self._empty.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._limits.gather_s)
            while self._waiting:
                batch = self._take_batch()
                self._sending = True
                self._note()
                await self._store(batch)
                self._sending = False
            self._wake.clear()
            self._note()

    def _take_batch(self) -> KvEvents:
        """The longest run of consecutive numbers within the limits."""
        first, event, size = self._waiting.popleft()
        events, total = [event], size
        limit = min(self._limits.batch_bytes, self._bus.max_payload // (3 if self._as_json else 1))
        while self._waiting and len(events) < self._limits.batch_events:
            number, event, size = self._waiting[0]
            if number != first + len(events) or total + size > limit:
                break
            self._waiting.popleft()
            events.append(event)
            total += size
        self._waiting_bytes -= total
        return KvEvents(
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            model=self._model,
            tier=self._tier,
            block_size=self._block_size,
            first_seq=first,
            events=tuple(events),
            at_ms=time.time_ns() // 1_000_000,
        )

    async def _store(self, batch: KvEvents) -> None:
        data = encode_events(batch, as_json=self._as_json)
        content_type = CONTENT_TYPE_JSON if self._as_json else CONTENT_TYPE
        msg_id = f"{self._instance_id}:{self._incarnation}:{self._model}:{self._tier}:{batch.first_seq}"
        pause = RETRY_FIRST_S
        while True:
            try:
                await self._events.append(self._subject, data, msg_id=msg_id, content_type=content_type)
                return
            except RequestFailed as failure:
                if failure.code is ErrorCode.PAYLOAD_TOO_LARGE:
                    # One event that no message can hold; followers see the gap.
                    self._log.error("kv_events_too_large", size=len(data), events=len(batch.events))
                    self._dropped.inc(len(batch.events))
                    return
                self._retries.inc()
                self._log.warning("kv_events_not_stored", reason=str(failure), first_seq=batch.first_seq)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)

    async def flush(self) -> None:
        """Return when every emitted event is stored (or was dropped)."""
        await self._empty.wait()

    async def close(self) -> None:
        """Give what waits a moment to get out, then stop."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
        except TimeoutError:
            self._log.warning("kv_events_unsent", events=len(self._waiting))
        self._task.cancel()
