"""An ordered consumer of a JetStream stream that survives everything: gaps, outages, and the loss of the stream itself.

A consumer is an ephemeral push consumer with numbered deliveries. Whenever the numbers, the heartbeats or the connection say
that something was missed, a new one is made behind the last message that was handled. A stream that was lost and made anew
is read from its beginning.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from nats.aio.msg import Msg

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus, Subscription
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.jetstream import NANOSECONDS, JetStreamRefused
from kvbus_runtime.log import Seldom
from kvbus_wire.errors import ErrorCode

HEARTBEAT_S = 5.0
SILENCE_S = 12.0
INACTIVE_S = 60.0
PENDING_BYTES = 256 << 20
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0


class Delivered(msgspec.Struct, frozen=True):
    """One message. ``remaining``: how many more the stream held for this consumer when it was sent."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int
    remaining: int


class OrderedConsumer:
    """Calls ``handler`` (synchronous) with each message of ``filter_subject`` in stream order, each at least once.

    ``start``: ``all``, ``new``, ``last_per_subject``, or a sequence number; applied at the first start, and, for
    ``last_per_subject``, at every restart. ``created``: of the stream that a sequence number belongs to, when the caller has it
    from an earlier life. ``on_restart`` is called when a snapshot begins, ``on_replaced`` when the stream is another one and is
    read from its beginning, ``on_caught_up`` when everything that was there at the (re)start has been handled. ``ensure`` makes
    the stream when it is not there.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        filter_subject: str,
        handler: Callable[[Delivered], None],
        *,
        start: str | int,
        ensure: Callable[[], Awaitable[object]],
        created: str = "",
        on_restart: Callable[[], None] | None = None,
        on_replaced: Callable[[], None] | None = None,
        on_caught_up: Callable[[], None] | None = None,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._filter = filter_subject
        self._handler = handler
        self._failed = Seldom()
        self._start = start
        self._ensure = ensure
        self._on_restart = on_restart
        self._on_replaced = on_replaced
        self._on_caught_up = on_caught_up
        self._position = start - 1 if created and isinstance(start, int) else 0
        self._created = created
        self._delivery = 0
        self._generation = 0
        self._subscription: Subscription | None = None
        self._wake = asyncio.Event()
        self._heard_at = 0.0
        self._waiting_for_end = False
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._restarts = bus.metrics.counter("consumer_restarts", "ordered consumers made again", ("stream",))

    @property
    def created(self) -> str:
        """When the stream that is read was made: tells it from another one of the same name."""
        return self._created

    async def start(self) -> None:
        """Return when the consumer exists; retries until then."""
        self._bus.on_reconnect(self._wake.set)
        self._task = self._bus.tasks.spawn(self._run(), name=f"follow {self._filter}")
        await self._ready.wait()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._subscription is not None:
            await self._subscription.stop()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = RETRY_FIRST_S
        while True:
            self._wake.clear()
            try:
                await self._make()
            except (JetStreamRefused, RequestFailed) as problem:
                self._bus.log.warning("consumer_failed", stream=self._stream, reason=str(problem))
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)
                continue
            pause = RETRY_FIRST_S
            self._heard_at = loop.time()
            self._ready.set()
            while not self._wake.is_set() and loop.time() - self._heard_at < SILENCE_S:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            self._restarts.labels(self._stream).inc()

    async def _make(self) -> None:
        info = await jetstream.stream_info(self._bus, self._stream)
        if info is None:
            await self._ensure()
            info = await jetstream.stream_info(self._bus, self._stream)
            if info is None:
                raise RequestFailed.of(ErrorCode.UNAVAILABLE, f"no stream {self._stream}", retryable=True)
        if self._created and (info.created != self._created or info.state.last_seq < self._position):
            self._position = 0
            if self._start != "last_per_subject":
                self._start = "all"
            if self._on_replaced is not None:
                self._on_replaced()
        self._created = info.created
        if self._start == "new":
            # From here on by number: what is published during an outage must not be skipped.
            self._start = info.state.last_seq + 1
        inbox = await self._new_inbox()
        if self._on_restart is not None:
            self._on_restart()
        consumer = await jetstream.create_consumer(self._bus, self._stream, self._config(inbox))
        if consumer.num_pending == 0 and self._delivery == 0:
            self._caught_up()

    async def _new_inbox(self) -> str:
        """Listen on a fresh subject: what the former consumer still sends goes nowhere. (Messages keep their stream's subject,
        so deliveries of two consumers could not be told apart.)"""
        if self._subscription is not None:
            await self._subscription.stop()
        self._generation += 1
        self._delivery = 0
        self._waiting_for_end = True
        generation = self._generation

        async def on_message(msg: Msg) -> None:
            if generation == self._generation:
                await self._on_message(msg)

        inbox = self._bus.new_inbox()
        self._subscription = await self._bus.subscribe_raw(inbox, on_message, pending_limit_bytes=PENDING_BYTES)
        return inbox

    def _config(self, inbox: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": f"kvbus-{secrets.token_hex(8)}",
            "deliver_subject": inbox,
            "filter_subject": self._filter,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * NANOSECONDS),
            "inactive_threshold": int(INACTIVE_S * NANOSECONDS),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if self._start == "last_per_subject":
            return {**config, "deliver_policy": "last_per_subject"}
        if self._position or isinstance(self._start, int):
            first = self._position + 1 if self._position else self._start
            return {**config, "deliver_policy": "by_start_sequence", "opt_start_seq": first}
        return {**config, "deliver_policy": self._start}

    async def _on_message(self, msg: Msg) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        headers = msg.headers or {}
        if headers.get("Status") == "100":
            await self._on_control(msg, headers)
            return
        stream_seq, consumer_seq, pending = _numbers(msg.reply)
        if consumer_seq != self._delivery + 1:
            self._wake.set()
            return
        self._delivery = consumer_seq
        self._position = stream_seq
        try:
            self._handler(Delivered(msg.subject, msg.data, headers, stream_seq, pending))
        except Exception:
            if (held_back := self._failed.turn()) is not None:
                self._bus.log.exception(
                    "consumer_handler_failed", stream=self._stream, seq=stream_seq, held_back=held_back
                )
        if pending == 0:
            self._caught_up()

    async def _on_control(self, msg: Msg, headers: Mapping[str, str]) -> None:
        if msg.reply:
            await self._bus.send_reply_bytes(msg.reply, b"", {})
            return
        stalled = headers.get("Nats-Consumer-Stalled")
        if stalled:
            await self._bus.send_reply_bytes(stalled, b"", {})
        last = headers.get("Nats-Last-Consumer", "")
        if last.isdigit() and int(last) != self._delivery:
            self._wake.set()
        else:
            # An idle consumer has nothing more to send, even if a message expired before it was delivered.
            self._caught_up()

    def _caught_up(self) -> None:
        if self._waiting_for_end:
            self._waiting_for_end = False
            if self._on_caught_up is not None:
                self._on_caught_up()


def _numbers(reply: str) -> tuple[int, int, int]:
    """Stream sequence, consumer sequence and pending of ``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.
    <time>.<pending>``; the newer form has domain and account before the stream, and a token at the end."""
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7
    return int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 3])
