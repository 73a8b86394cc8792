"""Key-value buckets for values of any size, bounded in bytes, entries and age: the oldest go first.

The layout is ADR-8's, so the plain ``nats kv`` command shows what is there. A value above the payload limit has its first part
under the key and the others under ``<key>.<version>.<n>``. Parts are written before the key, and age before it, so whoever finds a
key without its parts knows that the value is gone.
"""

import asyncio
import secrets
from typing import Any

import msgspec

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import ObjectFailed, RequestFailed
from kvbus_runtime.jetstream import NANOSECONDS, JetStreamRefused, StoredMessage
from kvbus_wire.errors import ErrorCode

PART_BYTES = 512 << 10
HEADER_VALUE_PARTS = "Kvbus-Value-Parts"
STALE_READ_PAUSES_S = (0.02, 0.1, 0.3)
"""In a NATS cluster a read may reach a copy that is behind the write."""


class BucketLimits(msgspec.Struct, frozen=True, kw_only=True):
    """0: no limit. ``value_bytes``: one value; the others: the bucket as a whole, which drops its oldest entries then."""

    total_bytes: int = 0
    entries: int = 0
    age_s: float = 0.0
    value_bytes: int = 16 << 20


class BucketState(msgspec.Struct, frozen=True):
    """``entries``: a value in parts counts once per part."""

    total_bytes: int
    entries: int


class Bucket:
    """Keys are letters, digits, ``_`` and ``-``. Methods raise RequestFailed (retryable) when the bus is away too long."""

    def __init__(self, bus: Bus, name: str, limits: BucketLimits) -> None:
        self._bus = bus
        self._name = name
        self._limits = limits
        self._stream = f"KV_{name}"
        self._made = False

    def _config(self) -> dict[str, Any]:
        limits = self._limits
        return {
            "name": self._stream,
            "subjects": [f"$KV.{self._name}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_msgs_per_subject": 1,
            "max_msgs": limits.entries or -1,
            "max_bytes": limits.total_bytes or -1,
            "max_age": int(limits.age_s * NANOSECONDS),
            "max_msg_size": -1,
            "max_consumers": -1,
            "num_replicas": self._bus.settings.stream_replicas,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{key}"

    async def put(self, key: str, value: bytes) -> None:
        """Raise ObjectFailed (too_large)."""
        if len(value) > self._limits.value_bytes:
            raise ObjectFailed(key, "too_large")
        size = min(PART_BYTES, self._bus.max_payload // 2)
        parts = [value[i : i + size] for i in range(0, len(value), size)] or [b""]
        version = secrets.token_hex(8)
        for i, part in enumerate(parts[1:], start=1):
            await self._publish(f"{self._subject(key)}.{version}.{i}", part, {})
        headers = {HEADER_VALUE_PARTS: f"{version}/{len(parts)}"} if len(parts) > 1 else {}
        await self._publish(self._subject(key), parts[0], headers)

    async def create(self, key: str, value: bytes) -> bool:
        """Put a value of one part unless the key is there already: then False."""
        try:
            await self._publish(self._subject(key), value, {jetstream.HEADER_EXPECTED_SEQUENCE: "0"})
        except RequestFailed as failure:
            refused = failure.__cause__
            if isinstance(refused, JetStreamRefused) and refused.err_code in jetstream.WRONG_LAST_SEQUENCE:
                return False
            raise
        return True

    async def get(self, key: str) -> bytes | None:
        """None when it is not there, or not whole any more."""
        head = await self._read(key)
        if head is None or head.is_marker:
            return None
        version, _, count = head.headers.get(HEADER_VALUE_PARTS, "/1").partition("/")
        parts = [head.data]
        for i in range(1, int(count)):
            part = await self._read(f"{key}.{version}.{i}")
            if part is None:
                return None
            parts.append(part.data)
        return b"".join(parts)

    async def delete(self, key: str) -> None:
        """With all its parts. Harmless when it is not there."""
        await self._ensure()
        try:
            for subject in (self._subject(key), f"{self._subject(key)}.>"):
                await jetstream.call(self._bus, f"STREAM.PURGE.{self._stream}", {"filter": subject})
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused

    async def state(self) -> BucketState:
        await self._ensure()
        try:
            info = await jetstream.stream_info(self._bus, self._stream)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        return BucketState(info.state.bytes, info.state.messages) if info is not None else BucketState(0, 0)

    async def _read(self, key: str) -> StoredMessage | None:
        await self._ensure()
        pauses = STALE_READ_PAUSES_S if self._bus.settings.stream_replicas > 1 else ()
        try:
            found = await jetstream.last_message(self._bus, self._stream, self._subject(key))
            for pause_s in pauses:
                if found is not None:
                    break
                await asyncio.sleep(pause_s)
                found = await jetstream.last_message(self._bus, self._stream, self._subject(key))
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        except RequestFailed as failure:
            if self._is_gone(failure):
                return None
            raise
        return found

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        await self._ensure()
        try:
            try:
                await jetstream.publish(self._bus, subject, data, headers)
            except RequestFailed as failure:
                if not self._is_gone(failure):
                    raise
                await self._ensure()
                await jetstream.publish(self._bus, subject, data, headers)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused

    async def _ensure(self) -> None:
        if not self._made:
            try:
                await jetstream.ensure_stream(self._bus, self._config())
            except JetStreamRefused as refused:
                raise jetstream.unavailable(refused) from refused
            self._made = True

    def _is_gone(self, failure: RequestFailed) -> bool:
        """Nobody answers for the bucket although the bus is there: it was lost, and is made again at the next use."""
        gone = failure.code is ErrorCode.UNAVAILABLE and self._bus.is_connected
        self._made = self._made and not gone
        return gone
