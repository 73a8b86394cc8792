"""What leaves over the present connection, and what waits in a bounded buffer while there is none."""

import asyncio
from collections import deque

import msgspec
import nats.errors
from nats.aio.client import Client

from kvbus_runtime.metrics import Metrics

HEADER_ROOM = 1024
"""max_payload counts the headers, too; this much of it is kept for them."""
OUTAGE_MESSAGE_AGE_S = 30.0


class _Held(msgspec.Struct, frozen=True):
    """A message that waits for the bus."""

    at: float
    subject: str
    data: bytes
    headers: dict[str, str]


class Outbox:
    """Messages of an outage are sent after it in order, unless they are older than 30 s or the buffer is full (oldest first)."""

    def __init__(self, metrics: Metrics, buffer_bytes: int) -> None:
        self._client: Client | None = None
        self._buffer_bytes = buffer_bytes
        self._server_max_payload = 1 << 20
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._sent_bytes = metrics.counter("bus_sent_bytes", "payload bytes published")
        self._dropped = metrics.counter("bus_dropped", "messages dropped", ("reason",))

    @property
    def max_payload(self) -> int:
        """Largest message that can be sent, in bytes."""
        return self._server_max_payload - HEADER_ROOM

    async def up(self, client: Client) -> None:
        self._server_max_payload = client.max_payload
        self._client = client
        oldest = asyncio.get_running_loop().time() - OUTAGE_MESSAGE_AGE_S
        while self._held:
            held = self._held.popleft()
            self._held_bytes -= len(held.data)
            if held.at < oldest:
                self._dropped.labels("outage_too_long").inc()
            elif len(held.data) > self.max_payload:
                self._dropped.labels("payload_limit_shrank").inc()
            elif not await self.try_send(held.subject, held.data, held.headers):
                self._held.appendleft(held)
                self._held_bytes += len(held.data)
                return

    def down(self) -> None:
        self._client = None

    async def send(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Now, or after the outage."""
        if not await self.try_send(subject, data, headers):
            self._held.append(_Held(asyncio.get_running_loop().time(), subject, data, headers))
            self._held_bytes += len(data)
            while self._held_bytes > self._buffer_bytes:
                self._held_bytes -= len(self._held.popleft().data)
                self._dropped.labels("outage_buffer_full").inc()

    async def try_send(self, subject: str, data: bytes, headers: dict[str, str], reply: str = "") -> bool:
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
