"""The server side of request/reply: decode, bound, time, run, answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from nats.aio.msg import Msg

from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.parts import HEADER_ID, HEADER_PART, Assembler, PartLimits, PartsRefused, is_part
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.message import DecodeFailed, Decoder, Message

HEADER_MESSAGE_ID = "Nats-Msg-Id"
HEADER_TIMEOUT_MS = "Kvbus-Timeout-Ms"
MAX_TIMEOUT_DIGITS = 12


class RequestContext(msgspec.Struct, frozen=True):
    """``deadline``: on the loop's clock; after it nobody waits for the reply. ``message_id`` is equal for a repeated delivery."""

    subject: str
    reply: str
    headers: Mapping[str, str]
    deadline: float | None
    message_id: str


Handler = Callable[[Any, RequestContext], Awaitable[Message]]
Send = Callable[[str, Message], Awaitable[None]]
SendRaw = Callable[[str, bytes, dict[str, str]], Awaitable[None]]


class EndpointStats(msgspec.Struct):
    """What `$SRV.STATS` tells about one subject."""

    subject: str
    queue: str
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    processing_s: float = 0.0


class _Running(msgspec.Struct):
    replies: list[str]


class Server:
    """Runs each request of one subject as a task, at most ``max_pending`` at once.

    A request that arrives a second time while it runs (a requester sends again after a reconnect) is run once and answered twice.
    """

    def __init__(
        self,
        stats: EndpointStats,
        requests: Sequence[type[Message]],
        handler: Handler,
        *,
        max_pending: int,
        limits: PartLimits,
        spawn: Callable[..., asyncio.Task[Any]],
        send: Send,
        send_raw: SendRaw,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self.stats = stats
        self._decoder = Decoder.of(*requests)
        self._handler = handler
        self._max_pending = max_pending
        self._assembler = Assembler(limits)
        self._age_s = limits.age_s
        self._sweep: asyncio.TimerHandle | None = None
        self._spawn = spawn
        self._send = send
        self._send_raw = send_raw
        self._log = log
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unnamed = 0
        self._served = metrics.counter("requests_served", "requests answered", ("request", "outcome"))
        self._seconds = metrics.histogram("request_handling_seconds", "time to answer a request", ("request",))
        self._in_flight = metrics.gauge("bus_requests_in_flight", "requests being handled", ("subject",))

    async def on_message(self, msg: Msg) -> None:
        headers = msg.headers or {}
        if not msg.reply:
            return
        data = msg.data
        if is_part(headers):
            whole = await self._assemble(msg, headers)
            if whole is None:
                return
            data = whole
        message_id = headers.get(HEADER_MESSAGE_ID) or self._next_unnamed()
        twin = self._running.get(message_id)
        if twin is not None:
            twin.replies.append(msg.reply)
            return
        if len(self._running) >= self._max_pending:
            self._count("any", ErrorCode.OVERLOADED)
            await self._refuse(msg.reply, ErrorCode.OVERLOADED, f"{len(self._running)} requests are being handled")
            return
        deadline = _deadline(headers)
        context = RequestContext(msg.subject, msg.reply, headers, deadline, message_id)
        self._running[message_id] = _Running([msg.reply])
        self._in_flight.labels(self.stats.subject).set(len(self._running))
        task = self._spawn(self._run(data, context), name=f"serve {self.stats.subject}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next_unnamed(self) -> str:
        self._unnamed += 1
        return f"unnamed-{self._unnamed}"

    async def _assemble(self, msg: Msg, headers: Mapping[str, str]) -> bytes | None:
        now = asyncio.get_running_loop().time()
        try:
            whole = self._assembler.add(headers, msg.data, now)
        except PartsRefused as refused:
            codes = {"too_large": ErrorCode.PAYLOAD_TOO_LARGE, "too_many": ErrorCode.OVERLOADED}
            code = codes.get(refused.reason, ErrorCode.INVALID_REQUEST)
            self._count("any", code)
            await self._refuse(msg.reply, code, str(refused), retryable=code is ErrorCode.OVERLOADED)
            return None
        if whole is None:
            self._schedule_sweep()
            await self._send_raw(msg.reply, b"", {HEADER_ID: headers[HEADER_ID], HEADER_PART: headers[HEADER_PART]})
        return whole

    def _schedule_sweep(self) -> None:
        """Half-received messages are forgotten also when nothing else arrives."""
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._age_s + 0.1, self._do_sweep)

    def _do_sweep(self) -> None:
        self._sweep = None
        self._assembler.expire(asyncio.get_running_loop().time())
        if self._assembler.open_count:
            self._schedule_sweep()

    async def _run(self, data: bytes, context: RequestContext) -> None:
        started = asyncio.get_running_loop().time()
        kind = "unknown"
        try:
            message = self._decoder.decode(data)
            kind = type(message).__name__
            async with asyncio.timeout_at(context.deadline) as scope:
                reply = await self._handler(message, context)
        except DecodeFailed as problem:
            reply = ErrorReply(code=ErrorCode.INVALID_REQUEST, message=f"not a request of this subject: {problem}")
        except RequestFailed as refusal:
            reply = refusal.reply
        except asyncio.CancelledError:
            self._running.pop(context.message_id, None)
            raise
        except Exception as problem:
            if isinstance(problem, TimeoutError) and scope.expired():
                reply = ErrorReply(code=ErrorCode.DEADLINE_EXCEEDED, message="the deadline has passed", retryable=True)
            else:
                self._log.exception("request_failed", subject=context.subject, request=kind)
                message_text = f"{type(problem).__name__} in the handler"
                reply = ErrorReply(code=ErrorCode.INTERNAL, message=message_text, retryable=True)
        running = self._running.pop(context.message_id)
        self._in_flight.labels(self.stats.subject).set(len(self._running))
        elapsed = asyncio.get_running_loop().time() - started
        self._seconds.labels(kind).observe(elapsed)
        self.stats.processing_s += elapsed
        self._count(kind, reply.code if isinstance(reply, ErrorReply) else "ok")
        if isinstance(reply, ErrorReply):
            self.stats.last_error = f"{reply.code}: {reply.message}"
        for subject in running.replies:
            await self._send(subject, reply)

    def _count(self, kind: str, outcome: str) -> None:
        self.stats.requests += 1
        if outcome != "ok":
            self.stats.errors += 1
        self._served.labels(kind, outcome).inc()

    async def _refuse(self, reply: str, code: ErrorCode, message: str, *, retryable: bool = True) -> None:
        await self._send(reply, ErrorReply(code=code, message=message, retryable=retryable))

    async def finish(self) -> None:
        """Wait for the requests that run."""
        if self._sweep is not None:
            self._sweep.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def _deadline(headers: Mapping[str, str]) -> float | None:
    """A header that is no sensible number of milliseconds is as good as none."""
    raw = headers.get(HEADER_TIMEOUT_MS, "")
    is_number = len(raw) <= MAX_TIMEOUT_DIGITS and raw.isascii() and raw.isdigit()
    return asyncio.get_running_loop().time() + int(raw) / 1000 if is_number else None
