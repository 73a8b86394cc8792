"""The asking side of request/reply: matching replies, waiting through outages, sending again, large messages in parts."""

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from nats.aio.msg import Msg

from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.outbox import Outbox
from kvbus_runtime.parts import HEADER_PART, part_headers, split
from kvbus_runtime.serving import HEADER_MESSAGE_ID, HEADER_TIMEOUT_MS
from kvbus_runtime.tasks import Tasks
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.message import CONTENT_TYPE, DecodeFailed, Decoder, Message, encode

RECONNECT_GRACE_S = 3.0
"""After a reconnect the others may not be back yet: so long "no responders" is tried again instead of reported."""
RETRY_PAUSE_S = 0.1
PART_ROUNDS = 3


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


@cache
def _decoder(types: tuple[type[Message], ...]) -> Decoder:
    return Decoder.of(*types)


class Requester:
    """``inbox``: replies arrive below it, at `on_reply`, on every connection the same."""

    def __init__(self, outbox: Outbox, metrics: Metrics, tasks: Tasks, max_message_bytes: int, inbox: str) -> None:
        self.inbox = inbox
        self._outbox = outbox
        self._tasks = tasks
        self._max_message_bytes = max_message_bytes
        self._pending: dict[str, _Pending] = {}
        self._numbers = itertools.count(1)
        self._grace_until = 0.0
        self._requests = metrics.counter("requests_sent", "requests by outcome", ("request", "outcome"))

    async def send_all_again(self, *, grace: bool) -> None:
        """The connection is new: nobody knows which requests, or which replies, went under with the old one."""
        if grace:
            self._grace_until = asyncio.get_running_loop().time() + RECONNECT_GRACE_S
        for token, pending in list(self._pending.items()):
            await self._send_pending(token, pending)

    async def request(
        self, subject: str, message: Message, replies: Sequence[type[Message]], timeout_s: float, in_parts: bool
    ) -> Any:
        """See `Bus.request`."""
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
        if len(data) <= self._outbox.max_payload:
            return await self.request_bytes(subject, data, timeout_s=timeout_s, headers=headers)
        if not in_parts or len(data) > self._max_message_bytes:
            limit = self._max_message_bytes if in_parts else self._outbox.max_payload
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
        parts = split(data, self._outbox.max_payload)
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
        """See `Bus.request_bytes`."""
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
        if await self._outbox.try_send(pending.subject, pending.data, pending.headers, f"{self.inbox}.{token}"):
            pending.sent = True

    async def on_reply(self, msg: Msg) -> None:
        token = msg.subject.rpartition(".")[2]
        pending = self._pending.get(token)
        if pending is None or pending.future.done():
            return
        headers = msg.headers or {}
        if headers.get("Status") != "503" or msg.data:
            pending.future.set_result(Reply(msg.data, headers))
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._grace_until and not self._tasks.closed:
            self._tasks.spawn(self._send_later(token), name="request again")
            return
        message = f"nobody serves {pending.subject}"
        pending.future.set_exception(RequestFailed.of(ErrorCode.UNAVAILABLE, message, retryable=True))

    async def _send_later(self, token: str) -> None:
        await asyncio.sleep(RETRY_PAUSE_S)
        pending = self._pending.get(token)
        if pending is not None and not pending.future.done():
            await self._send_pending(token, pending)
