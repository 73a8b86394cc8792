"""The bus: publish, request, serve and subscribe over NATS, through outages of any length.

While the bus is away: publications wait in a bounded buffer, requests wait (and are sent again) until their timeout, and
subscriptions are put back by the reconnect. Core NATS is at-most-once, so a message may be lost or, after a reconnect, a request
may be delivered twice; every stream is numbered and every request carries an id for this reason.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvbus_runtime.errors import BusUnreachable, PayloadTooLarge, RequestFailed
from kvbus_runtime.link import Link, barrier
from kvbus_runtime.log import Seldom, get_logger
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.outbox import Outbox
from kvbus_runtime.parts import PartLimits
from kvbus_runtime.requester import Reply, Requester
from kvbus_runtime.serving import EndpointStats, Handler, RequestContext, Server
from kvbus_runtime.settings import CommonSettings
from kvbus_runtime.tasks import Tasks
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.message import CONTENT_TYPE, DecodeFailed, Decoder, Message, encode
from kvbus_wire.subjects import Subjects

__all__ = ["Bus", "PayloadTooLarge", "Reply", "RequestContext", "RequestFailed", "Subscription"]

DRAIN_TIMEOUT_S = 5.0
REPLIES_PENDING_BYTES = 512 << 20
REQUESTS_PENDING_BYTES = 256 << 20

RawHandler = Callable[[Msg], Awaitable[None]]


class _Entry(msgspec.Struct):
    """A subscription that is put back on every new connection."""

    subject: str
    queue: str
    handler: RawHandler
    pending_limit_bytes: int
    live: NatsSubscription | None = None


class Subscription:
    """``stop`` takes no new messages, lets the handlers of those received finish, and returns."""

    def __init__(self, bus: "Bus", number: int, server: Server | None = None) -> None:
        self._bus = bus
        self._number = number
        self._server = server

    async def stop(self) -> None:
        await self._bus._stop(self._number)
        if self._server is not None:
            await self._server.finish()


class Bus:
    """See the module. Use `Service.bus`, or `open_bus` outside of a service.

    ``tasks`` owns everything that runs, but the connection when ``link_tasks`` is given.
    """

    def __init__(
        self,
        settings: CommonSettings,
        *,
        name: str,
        log: Any,
        metrics: Metrics,
        tasks: Tasks,
        link_tasks: Tasks | None = None,
    ) -> None:
        self.settings = settings
        self.subjects = Subjects(settings.namespace)
        self.endpoints: dict[int, EndpointStats] = {}
        self.log = log
        self.metrics = metrics
        self.tasks = tasks
        self._link_tasks = link_tasks or tasks
        self._link = Link(
            settings, name=name, log=log, on_up=self._came_up, on_down=self._went_down, on_error=self._async_error
        )
        self._client: Client | None = None
        self._first_up = asyncio.Event()
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count(1)
        self._outbox = Outbox(metrics, settings.outage_buffer_bytes)
        self._requester = Requester(self._outbox, metrics, tasks, settings.max_message_bytes, self.new_inbox())
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._connected_gauge = metrics.gauge("bus_connected", "1 while the bus is there")
        self._reconnects = metrics.counter("bus_reconnects", "connections after the first one")
        self._bad = metrics.counter("bus_bad_messages", "messages that could not be decoded or handled", ("subject",))
        self._slow = metrics.counter("bus_slow_consumer", "messages dropped by a full subscription", ("subject",))

    def new_inbox(self) -> str:
        """A subject for replies. Each service has its own branch, so that a NATS user can be kept from the replies of others."""
        return f"_INBOX.{self.metrics.service}.{secrets.token_hex(11)}"

    # connection

    async def start(self) -> None:
        """Connect; returns when the bus is there, however long that takes. Raise UnsupportedServer."""
        entry = _Entry(f"{self._requester.inbox}.*", "", self._requester.on_reply, REPLIES_PENDING_BYTES)
        self._entries[next(self._numbers)] = entry
        self._link_tasks.spawn(self._link.run(), name="bus link")
        await self._first_up.wait()

    def unreachable(self) -> BusUnreachable:
        """Why it is not connected, in words for the person at a terminal."""
        settings, reason = self.settings, self._link.trouble
        if not any(word in reason.lower() for word in ("authorization", "authentication")):
            return BusUnreachable(f"no bus at {settings.nats_shown}: {reason or 'no answer'}")
        has_credentials = (settings.nats_user, settings.nats_creds, settings.nats_nkey_seed, "@" in settings.nats)
        what = "does not take these credentials" if any(has_credentials) else "wants credentials"
        hint = "see --nats-user, --nats-creds, --nats-nkey-seed"
        return BusUnreachable(f"the bus at {settings.nats_shown} {what} ({reason}): {hint}", refused=True)

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    @property
    def max_payload(self) -> int:
        """Largest message that can be published, in bytes."""
        return self._outbox.max_payload

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call after every connection but the first, with all subscriptions back in place."""
        self._reconnect_callbacks.append(callback)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._disconnect_callbacks.append(callback)

    async def _came_up(self, client: Client) -> None:
        try:
            while missing := [entry for entry in self._entries.values() if entry.live is None]:
                for entry in missing:
                    await self._put_up(client, entry)
                # A round trip: when it is back, the server knows these subscriptions (and others may have been added meanwhile).
                await barrier(client, timeout_s=5)
        except BaseException:
            self._forget_live()
            raise
        self._client = client
        self._connected_gauge.set(1)
        again = self._first_up.is_set()
        if again:
            self._reconnects.inc()
        await self._outbox.up(client)
        await self._requester.send_all_again(grace=again)
        self._first_up.set()
        if again:
            self._call_all(self._reconnect_callbacks)

    def _went_down(self) -> None:
        self._client = None
        self._outbox.down()
        self._connected_gauge.set(0)
        self._forget_live()
        self._call_all(self._disconnect_callbacks)

    def _forget_live(self) -> None:
        for entry in self._entries.values():
            entry.live = None

    def _call_all(self, callbacks: Sequence[Callable[[], None]]) -> None:
        for callback in list(callbacks):
            try:
                callback()
            except Exception:
                self.log.exception("bus_callback_failed")

    def _async_error(self, problem: Exception) -> None:
        if isinstance(problem, nats.errors.SlowConsumerError):
            self._slow.labels(problem.sub.subject).inc()
            self.log.warning("bus_slow_consumer", subject=problem.sub.subject)
        elif not isinstance(problem, nats.errors.UnexpectedEOF | OSError):
            self.log.warning("bus_error", error=str(problem) or type(problem).__name__)

    async def close(self) -> None:
        await self._link.close()

    async def flush(self) -> None:
        """Everything published so far has reached the server; returns at once when the bus is away."""
        if self._client is not None:
            with suppress(nats.errors.Error, OSError, TimeoutError):
                await barrier(self._client, timeout_s=5)

    # publishing

    async def publish(self, subject: str, message: Message) -> None:
        """Raise PayloadTooLarge; nothing else: during an outage the message waits in a bounded buffer (oldest dropped first)."""
        await self.publish_bytes(subject, encode(message), content_type=CONTENT_TYPE)

    async def publish_bytes(
        self, subject: str, data: bytes, *, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        if len(data) > self.max_payload:
            raise PayloadTooLarge(subject, len(data), self.max_payload)
        await self._outbox.send(subject, data, {"Content-Type": content_type, **(headers or {})})

    # requests

    async def request(
        self, subject: str, message: Message, *replies: type[Message], timeout_s: float, in_parts: bool = False
    ) -> Any:
        """One of ``replies``. Raise RequestFailed: with the ErrorReply, or unavailable (nobody serves the subject),
        deadline_exceeded (no reply in time), payload_too_large, all made here.

        ``in_parts``: allow a message above the payload limit; only to a subject with one server.
        """
        return await self._requester.request(subject, message, replies, timeout_s, in_parts)

    async def request_bytes(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The raw form of `request`, for other protocols (JetStream's API). Raise RequestFailed."""
        return await self._requester.request_bytes(subject, data, timeout_s=timeout_s, headers=headers)

    # serving

    async def serve(
        self,
        subject: str,
        requests: Sequence[type[Message]],
        handler: Handler,
        *,
        queue: str = "",
        max_pending: int = 1024,
    ) -> Subscription:
        """Answer requests with what ``handler`` returns, or with the ErrorReply of a RequestFailed that it raises.

        Any other exception becomes an ErrorReply(internal) and a log entry. Handlers run at the same time, at most ``max_pending``
        (beyond: overloaded), and are cancelled at the requester's deadline.
        """
        stats = EndpointStats(subject, queue)
        limits = PartLimits(message_bytes=self.settings.max_message_bytes)
        server = Server(
            stats,
            requests,
            handler,
            max_pending=max_pending,
            limits=limits,
            spawn=self.tasks.spawn,
            send=self._send_reply,
            send_raw=self.send_reply_bytes,
            metrics=self.metrics,
            log=self.log,
        )
        number = await self._subscribe(subject, server.on_message, queue, REQUESTS_PENDING_BYTES)
        self.endpoints[number] = stats
        return Subscription(self, number, server)

    async def _send_reply(self, subject: str, message: Message) -> None:
        try:
            data = encode(message)
        except OverflowError as problem:  # sums of numbers that somebody sent: no reason for the service to end
            self.log.error("reply_not_encodable", message=type(message).__name__, error=str(problem))
            data = encode(ErrorReply(code=ErrorCode.INTERNAL, message=f"the reply cannot be encoded: {problem}"))
        if len(data) > self.max_payload:
            text = f"the reply of {len(data)} bytes is above the bus limit of {self.max_payload}"
            self.log.error("reply_too_large", size=len(data), limit=self.max_payload, message=type(message).__name__)
            data = encode(ErrorReply(code=ErrorCode.PAYLOAD_TOO_LARGE, message=text))
        await self.send_reply_bytes(subject, data, {"Content-Type": CONTENT_TYPE})

    # subscribing

    async def subscribe(
        self,
        subject: str,
        messages: Sequence[type[Message]],
        handler: Callable[[Any], None],
        *,
        queue: str = "",
        pending_limit_bytes: int = 64 << 20,
    ) -> Subscription:
        """Call ``handler`` with each message, in order. Bad bytes and failing handlers are counted, and logged once a minute."""
        decoder = Decoder.of(*messages)

        def on_bytes(name: str, data: bytes, headers: Mapping[str, str]) -> None:
            handler(decoder.decode(data))

        return await self.subscribe_bytes(subject, on_bytes, queue=queue, pending_limit_bytes=pending_limit_bytes)

    async def subscribe_bytes(
        self,
        subject: str,
        handler: Callable[[str, bytes, Mapping[str, str]], None],
        *,
        queue: str = "",
        pending_limit_bytes: int = 64 << 20,
    ) -> Subscription:
        """The raw form of `subscribe`: the handler gets subject, bytes and headers."""
        bad, failed = Seldom(), Seldom()

        async def on_message(msg: Msg) -> None:
            try:
                handler(msg.subject, msg.data, msg.headers or {})
            except DecodeFailed as problem:
                self._bad.labels(subject).inc()
                if (held_back := bad.turn()) is not None:
                    self.log.warning("bad_message", subject=msg.subject, error=str(problem), held_back=held_back)
            except Exception:
                self._bad.labels(subject).inc()
                if (held_back := failed.turn()) is not None:
                    self.log.exception("message_handler_failed", subject=msg.subject, held_back=held_back)

        return Subscription(self, await self._subscribe(subject, on_message, queue, pending_limit_bytes))

    async def subscribe_raw(self, subject: str, handler: RawHandler, *, pending_limit_bytes: int) -> Subscription:
        """For protocols that need the reply subject (ordered consumers, ``$SRV``)."""
        return Subscription(self, await self._subscribe(subject, handler, "", pending_limit_bytes))

    async def _subscribe(self, subject: str, handler: RawHandler, queue: str, pending_limit_bytes: int) -> int:
        number = next(self._numbers)
        entry = _Entry(subject, queue, handler, pending_limit_bytes)
        self._entries[number] = entry
        client = self._client
        if client is not None:
            # A connection that breaks here is no failure: the reconnect subscribes again.
            with suppress(nats.errors.ConnectionClosedError, OSError, RuntimeError, TimeoutError):
                await self._put_up(client, entry)
                await barrier(client, timeout_s=5)
        return number

    async def _put_up(self, client: Client, entry: _Entry) -> None:
        entry.live = await client.subscribe(
            entry.subject, queue=entry.queue, cb=entry.handler, pending_bytes_limit=entry.pending_limit_bytes
        )

    async def _stop(self, number: int) -> None:
        self.endpoints.pop(number, None)
        entry = self._entries.pop(number, None)
        if entry is None or entry.live is None or self._client is None:
            return
        with suppress(nats.errors.Error, OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await entry.live.drain()  # type: ignore[no-untyped-call]

    async def send_reply_bytes(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Publish raw bytes to a reply subject; for protocols other than ours."""
        await self._outbox.send(subject, data, headers)


@asynccontextmanager
async def open_bus(
    settings: CommonSettings, *, name: str, connect_timeout_s: float | None = None
) -> AsyncIterator[Bus]:
    """A bus outside of a service (command-line tools, tests). Raise BusUnreachable when it is not there in time."""
    async with Tasks() as tasks:
        bus = Bus(settings, name=name, log=get_logger(client=name), metrics=Metrics("client"), tasks=tasks)
        try:
            async with asyncio.timeout(connect_timeout_s):
                await bus.start()
        except TimeoutError:
            raise bus.unreachable() from None
        try:
            yield bus
        finally:
            await bus.close()
