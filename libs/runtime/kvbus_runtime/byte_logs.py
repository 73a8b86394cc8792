"""Logs of bytes, one per name, in one bounded stream: written by one process, followed by any number, from the beginning."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.jetstream import NANOSECONDS, JetStreamRefused
from kvbus_runtime.ordered import Delivered, OrderedConsumer
from kvbus_runtime.serving import HEADER_MESSAGE_ID

PART_BYTES = 512 << 10
HEADER_LAST = "Kvbus-Log-End"


class LogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of all logs of the stream together: beyond them the oldest entries go."""

    total_bytes: int
    age_s: float


class LogPiece(msgspec.Struct, frozen=True):
    """``last``: the log ends with this piece."""

    data: bytes
    last: bool


class ByteLogs:
    """``prefix``: of the subjects, one per log; names are letters, digits, ``_`` and ``-``."""

    def __init__(self, bus: Bus, stream: str, prefix: str, limits: LogLimits) -> None:
        self._bus = bus
        self._stream = stream
        self._prefix = prefix
        self._limits = limits
        self._made = False

    def _config(self) -> dict[str, Any]:
        return {
            "name": self._stream,
            "subjects": [f"{self._prefix}.*"],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_msgs": -1,
            "max_bytes": self._limits.total_bytes,
            "max_age": int(self._limits.age_s * NANOSECONDS),
            "max_msg_size": -1,
            "max_consumers": -1,
            "num_replicas": self._bus.settings.stream_replicas,
            "allow_direct": True,
        }

    async def _ensure(self) -> None:
        await jetstream.ensure_stream(self._bus, self._config())
        self._made = True

    async def append(self, name: str, data: bytes, *, last: bool = False) -> None:
        """Return when it is stored. Raise RequestFailed."""
        size = min(PART_BYTES, self._bus.max_payload // 2)
        parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
        try:
            if not self._made:
                await self._ensure()
            for i, part in enumerate(parts):
                headers = {HEADER_MESSAGE_ID: secrets.token_hex(8)}  # sent again after an outage, it is stored once
                if last and i == len(parts) - 1:
                    headers[HEADER_LAST] = "1"
                await jetstream.publish(self._bus, f"{self._prefix}.{name}", part, headers)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        except RequestFailed:
            self._made = False
            raise

    async def delete(self, name: str) -> None:
        """Harmless when there is no such log. Raise RequestFailed."""
        try:
            if not self._made:
                await self._ensure()
            await jetstream.call(self._bus, f"STREAM.PURGE.{self._stream}", {"filter": f"{self._prefix}.{name}"})
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused

    async def follow(self, name: str, *, idle_s: float) -> AsyncGenerator[LogPiece | None, None]:
        """All pieces from the first on, through outages; None whenever nothing has come for ``idle_s``. Ends behind the last one.

        Pieces wait in memory when the caller is slow: at most a whole log.
        """
        pieces: asyncio.Queue[LogPiece] = asyncio.Queue()

        def on_message(message: Delivered) -> None:
            pieces.put_nowait(LogPiece(message.data, HEADER_LAST in message.headers))

        consumer = OrderedConsumer(
            self._bus, self._stream, f"{self._prefix}.{name}", on_message, start="all", ensure=self._ensure
        )
        await consumer.start()
        try:
            while True:
                try:
                    async with asyncio.timeout(idle_s):
                        piece = await pieces.get()
                except TimeoutError:
                    yield None
                    continue
                yield piece
                if piece.last:
                    return
        finally:
            await consumer.stop()
