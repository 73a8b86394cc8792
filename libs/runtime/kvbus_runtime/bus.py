"""The bus: publish, request, serve and subscribe over NATS, through outages of any length.

While the bus is away: publications wait in a bounded buffer, requests wait (and are sent again) until their timeout, and
subscriptions are put back by the reconnect. Core NATS is at-most-once, so a message may be lost or, after a reconnect, a request
may be delivered twice; every stream is numbered and every request carries an id for this reason.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvbus_runtime.errors import PayloadTooLarge, RequestFailed
from kvbus_runtime.link import Link, barrier
from kvbus_runtime.log import get_logger
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.parts import HEADER_PART, PartLimits, part_headers, split
from kvbus_runtime.serving import HEADER_MESSAGE_ID, HEADER_TIMEOUT_MS, EndpointStats, Handler, RequestContext, Server
from kvbus_runtime.settings import CommonSettings
from kvbus_runtime.tasks import Tasks
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.message import CONTENT_TYPE, DecodeFailed, Decoder, Message, encode
from kvbus_wire.subjects import Subjects

__all__ = ["Bus", "PayloadTooLarge", "Reply", "RequestContext", "RequestFailed", "Subscription"]

HEADER_ROOM = 1024
"""max_payload counts the headers, too; this much of it is kept for them."""
RECONNECT_GRACE_S = 3.0
"""After a reconnect the others may not be back yet: so long "no responders" is tried again instead of reported."""
RETRY_PAUSE_S = 0.1
OUTAGE_MESSAGE_AGE_S = 30.0
DRAIN_TIMEOUT_S = 5.0
PART_ROUNDS = 3

RawHandler = Callable[[Msg], Awaitable[None]]


class Reply(msgspec.Struct, frozen=True):
    """A reply as it came."""

    data: bytes
    headers: Mapping[str, str]


class _Pending(msgspec.Struct):
    """A request that waits for its reply. ``sent``: it went out on some connection."""

    subject: str
    data: bytes
    headers: dict[str, str]
    future: asyncio.Future[Reply]
    sent: bool = False


class _Held(msgspec.Struct, frozen=True):
    """A publication that waits for the bus."""

    at: float
    subject: str
    data: bytes
    headers: dict[str, str]


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


@cache
def _decoder(types: tuple[type[Message], ...]) -> Decoder:
    return Decoder.of(*types)


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
        self._max_payload = 1 << 20
        self._first_up = asyncio.Event()
        self._grace_until = 0.0
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count(1)
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._pending: dict[str, _Pending] = {}
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._connected_gauge = metrics.gauge("bus_connected", "1 while the bus is there")
        self._reconnects = metrics.counter("bus_reconnects", "connections after the first one")
        self._sent_bytes = metrics.counter("bus_sent_bytes", "payload bytes published")
        self._dropped = metrics.counter("bus_dropped", "messages dropped", ("reason",))
        self._bad = metrics.counter("bus_bad_messages", "messages that could not be decoded or handled", ("subject",))
        self._slow = metrics.counter("bus_slow_consumer", "messages dropped by a full subscription", ("subject",))
        self._requests = metrics.counter("requests_sent", "requests by outcome", ("request", "outcome"))

    # connection

    async def start(self) -> None:
        """Connect; returns when the bus is there, however long that takes. Raise UnsupportedServer."""
        entry = _Entry(f"{self._inbox}.*", "", self._on_reply, 512 << 20)
        self._entries[next(self._numbers)] = entry
        self._link_tasks.spawn(self._link.run(), name="bus link")
        await self._first_up.wait()

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    @property
    def max_payload(self) -> int:
        """Largest message that can be published, in bytes."""
        return self._max_payload - HEADER_ROOM

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
        self._max_payload = client.max_payload
        self._client = client
        self._connected_gauge.set(1)
        await self._send_held()
        again = self._first_up.is_set()
        if again:
            self._reconnects.inc()
            self._grace_until = asyncio.get_running_loop().time() + RECONNECT_GRACE_S
        for token, pending in list(self._pending.items()):
            await self._send_pending(token, pending)
        self._first_up.set()
        if again:
            self._call_all(self._reconnect_callbacks)

    def _went_down(self) -> None:
        self._client = None
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
        all_headers = {"Content-Type": content_type, **(headers or {})}
        if not await self._try_send(subject, data, all_headers, ""):
            self._hold(_Held(asyncio.get_running_loop().time(), subject, data, all_headers))

    async def _try_send(self, subject: str, data: bytes, headers: dict[str, str], reply: str) -> bool:
        """False when the connection is gone or about to be."""
        client = self._client
        if client is None:
            return False
        try:
            await client.publish(subject, data, reply=reply, headers=headers)
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError, OSError, RuntimeError):
            return False
        self._sent_bytes.inc(len(data))
        return True

    def _hold(self, held: _Held) -> None:
        self._held.append(held)
        self._held_bytes += len(held.data)
        while self._held_bytes > self.settings.outage_buffer_bytes:
            self._held_bytes -= len(self._held.popleft().data)
            self._dropped.labels("outage_buffer_full").inc()

    async def _send_held(self) -> None:
        oldest = asyncio.get_running_loop().time() - OUTAGE_MESSAGE_AGE_S
        while self._held:
            held = self._held[0]
            if held.at < oldest:
                self._dropped.labels("outage_too_long").inc()
            elif not await self._try_send(held.subject, held.data, held.headers, ""):
                return
            if self._held and self._held[0] is held:
                self._held.popleft()
                self._held_bytes -= len(held.data)

    # requests

    async def request(
        self, subject: str, message: Message, *replies: type[Message], timeout_s: float, in_parts: bool = False
    ) -> Any:
        """One of ``replies``. Raise RequestFailed: with the ErrorReply, or unavailable (nobody serves the subject),
        deadline_exceeded (no reply in time), payload_too_large, all made here.

        ``in_parts``: allow a message above the payload limit; only to a subject with one server.
        """
        kind = type(message).__name__
        try:
            reply = await self._request(subject, encode(message), timeout_s, in_parts)
            answer = _decoder((ErrorReply, *replies)).decode(reply.data)
        except RequestFailed as failure:
            self._requests.labels(kind, failure.code).inc()
            raise
        except DecodeFailed as problem:
            self._requests.labels(kind, "bad_reply").inc()
            raise RequestFailed.of(ErrorCode.INTERNAL, f"unexpected reply from {subject}: {problem}") from problem
        if isinstance(answer, ErrorReply):
            self._requests.labels(kind, answer.code).inc()
            raise RequestFailed(answer)
        self._requests.labels(kind, "ok").inc()
        return answer

    async def _request(self, subject: str, data: bytes, timeout_s: float, in_parts: bool) -> Reply:
        headers = {"Content-Type": CONTENT_TYPE, HEADER_MESSAGE_ID: secrets.token_hex(8)}
        if len(data) <= self.max_payload:
            return await self.request_bytes(subject, data, timeout_s=timeout_s, headers=headers)
        if not in_parts or len(data) > self.settings.max_message_bytes:
            limit = self.settings.max_message_bytes if in_parts else self.max_payload
            message = f"{len(data)} bytes are above the limit of {limit}"
            raise RequestFailed.of(ErrorCode.PAYLOAD_TOO_LARGE, message, size=len(data), limit=limit)
        deadline = asyncio.get_running_loop().time() + timeout_s
        for _ in range(PART_ROUNDS):
            reply = await self._request_in_parts(subject, data, headers, deadline)
            # An acknowledgement in place of the reply: the server has lost the earlier parts (it restarted), so send all again.
            if HEADER_PART not in reply.headers:
                return reply
        raise RequestFailed.of(ErrorCode.UNAVAILABLE, f"{subject} does not assemble the parts", retryable=True)

    async def _request_in_parts(self, subject: str, data: bytes, headers: dict[str, str], deadline: float) -> Reply:
        parts = split(data, self.max_payload)
        parts_id = secrets.token_hex(8)
        reply = Reply(b"", {})
        for index, part in enumerate(parts):
            remaining = deadline - asyncio.get_running_loop().time()
            numbered = {**headers, **part_headers(parts_id, index, len(parts), len(data))}
            reply = await self.request_bytes(subject, bytes(part), timeout_s=remaining, headers=numbered)
            if HEADER_PART not in reply.headers:
                return reply
        return reply

    async def request_bytes(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The raw form of `request`, for other protocols (JetStream's API). Raise RequestFailed."""
        loop = asyncio.get_running_loop()
        if timeout_s <= 0:
            raise RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, f"no time left to ask {subject}", retryable=True)
        token = f"{next(self._numbers):x}"
        all_headers = {**(headers or {}), HEADER_TIMEOUT_MS: str(int(timeout_s * 1000))}
        pending = _Pending(subject, data, all_headers, loop.create_future())
        self._pending[token] = pending
        deadline = loop.time() + timeout_s
        try:
            await self._send_pending(token, pending)
            async with asyncio.timeout_at(deadline):
                return await pending.future
        except TimeoutError:
            if pending.sent:
                message = f"no reply from {subject} in {timeout_s:g} s"
                raise RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, message, retryable=True) from None
            raise RequestFailed.of(ErrorCode.UNAVAILABLE, "the bus is away", retryable=True) from None
        finally:
            self._pending.pop(token, None)

    async def _send_pending(self, token: str, pending: _Pending) -> None:
        if await self._try_send(pending.subject, pending.data, pending.headers, f"{self._inbox}.{token}"):
            pending.sent = True

    async def _on_reply(self, msg: Msg) -> None:
        token = msg.subject.rpartition(".")[2]
        pending = self._pending.get(token)
        if pending is None or pending.future.done():
            return
        headers = msg.headers or {}
        if headers.get("Status") != "503" or msg.data:
            pending.future.set_result(Reply(msg.data, headers))
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._grace_until and not self.tasks.closed:
            self.tasks.spawn(self._send_later(token), name="request again")
            return
        message = f"nobody serves {pending.subject}"
        pending.future.set_exception(RequestFailed.of(ErrorCode.UNAVAILABLE, message, retryable=True))

    async def _send_later(self, token: str) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        pending = self._pending.get(token)
        if pending is not None and not pending.future.done():
            await self._send_pending(token, pending)

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
            send_raw=self._send_reply_bytes,
            metrics=self.metrics,
            log=self.log,
        )
        number = await self._subscribe(subject, server.on_message, queue, 256 << 20)
        self.endpoints[number] = stats
        return Subscription(self, number, server)

    async def _send_reply(self, subject: str, message: Message) -> None:
        data = encode(message)
        if len(data) > self.max_payload:
            text = f"the reply of {len(data)} bytes is above the bus limit of {self.max_payload}"
            self.log.error("reply_too_large", size=len(data), limit=self.max_payload, message=type(message).__name__)
            data = encode(ErrorReply(code=ErrorCode.PAYLOAD_TOO_LARGE, message=text))
        await self._send_reply_bytes(subject, data, {"Content-Type": CONTENT_TYPE})

    async def _send_reply_bytes(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        if not await self._try_send(subject, data, headers, ""):
            self._hold(_Held(asyncio.get_running_loop().time(), subject, data, headers))

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
        """Call ``handler`` with each message, in order. Bad bytes and failing handlers are logged and counted."""
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

        async def on_message(msg: Msg) -> None:
            try:
                handler(msg.subject, msg.data, msg.headers or {})
            except DecodeFailed as problem:
                self._bad.labels(subject).inc()
                self.log.warning("bad_message", subject=msg.subject, error=str(problem))
            except Exception:
                self._bad.labels(subject).inc()
                self.log.exception("message_handler_failed", subject=msg.subject)

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
        await self._send_reply_bytes(subject, data, headers)


@asynccontextmanager
async def open_bus(
    settings: CommonSettings, *, name: str, connect_timeout_s: float | None = None
) -> AsyncIterator[Bus]:
    """A bus outside of a service (command-line tools, tests). Raise TimeoutError when it is not there in time."""
    async with Tasks() as tasks:
        bus = Bus(settings, name=name, log=get_logger(client=name), metrics=Metrics("client"), tasks=tasks)
        async with asyncio.timeout(connect_timeout_s):
            await bus.start()
        try:
            yield bus
        finally:
            await bus.close()
