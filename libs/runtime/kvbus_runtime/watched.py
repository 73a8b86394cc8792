"""One small value that several instances share: each follows it, and any may change it.

It is an entry of a key-value bucket in file storage. A change is made on what is stored and written under that revision, so of two
changes at the same time the second is made on top of the first. Everybody, the writer included, has the same value in the end,
through outages and restarts. Should the bus lose its data, those who run keep what they have until the next change.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.jetstream import JetStreamRefused
from kvbus_runtime.ordered import Delivered, OrderedConsumer
from kvbus_wire.errors import ErrorCode

MAX_TRIES = 8
MAX_BUCKET_BYTES = 1 << 20


class Revised(msgspec.Struct, frozen=True):
    """``data``: None when there is no value; ``revision``: 0 when there never was one."""

    data: bytes | None = None
    revision: int = 0


class WatchedValue:
    """``changed`` is called with each new value, the one that is there at the start included, if there is one."""

    def __init__(self, bus: Bus, bucket: str, key: str, changed: Callable[[Revised], None]) -> None:
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._bucket = bucket
        self._subject = f"$KV.{bucket}.{key}"
        self._changed = changed
        self.current = Revised()
        self._consumer = OrderedConsumer(
            bus, self._stream, self._subject, self._on_entry, start="last_per_subject", ensure=self._ensure
        )

    async def start(self) -> None:
        """Return when the value is followed; retries until then. What is there is delivered soon after."""
        await self._consumer.start()

    async def stop(self) -> None:
        await self._consumer.stop()

    async def change(self, change: Callable[[bytes | None], bytes]) -> Revised:
        """Write what ``change`` makes of the stored value (None: there is none) and return it; ``changed`` has been called then.

        ``change`` may be called several times. Raise RequestFailed (retryable) when the bus is away or others are always faster.
        """
        for _ in range(MAX_TRIES):
            try:
                found = await jetstream.last_message(self._bus, self._stream, self._subject)
                data = change(None if found is None or found.is_marker else found.data)
                expected = str(found.seq) if found is not None else "0"
                headers = {jetstream.HEADER_EXPECTED_SEQUENCE: expected}
                ack = await jetstream.publish(self._bus, self._subject, data, headers)
            except JetStreamRefused as refused:
                if refused.err_code in jetstream.WRONG_LAST_SEQUENCE:
                    continue
                raise jetstream.unavailable(refused) from refused
            written = Revised(data, ack.seq)
            if written.revision > self.current.revision:
                self._take(written)
            return written
        raise RequestFailed.of(ErrorCode.UNAVAILABLE, f"{self._subject} is changed all the time", retryable=True)

    def _on_entry(self, entry: Delivered) -> None:
        data = None if jetstream.is_marker(entry.headers) else entry.data
        if entry.seq != self.current.revision:
            self._take(Revised(data, entry.seq))

    def _take(self, value: Revised) -> None:
        self.current = value
        self._changed(value)

    async def _ensure(self) -> None:
        config: dict[str, Any] = {
            "name": self._stream,
            "subjects": [f"$KV.{self._bucket}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_bytes": MAX_BUCKET_BYTES,
            "num_replicas": self._bus.settings.stream_replicas,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }
        await jetstream.ensure_stream(self._bus, config)
