"""Who is there: instance records under leases in a key-value bucket.

A record is one key with a time to live. Its instance refreshes it; when it stops, the server lets the key expire and leaves a
marker, which the watchers see. The bucket lies in memory: after a bus restart everybody registers again, and nobody is taken for
gone before they had time to.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed, Superseded
from kvbus_runtime.jetstream import NANOSECONDS, JetStreamRefused
from kvbus_runtime.ordered import Delivered, OrderedConsumer
from kvbus_wire.message import CONTENT_TYPE, DecodeFailed, Decoder, encode
from kvbus_wire.records import InstanceRecord
from kvbus_wire.subjects import escape

Change = Literal["joined", "updated", "left"]
OnChange = Callable[[InstanceRecord, Change], None]

MARKER_TTL_S = 60
REFRESHES_PER_LEASE = 3
RETRY_PAUSE_S = 0.2

_decoder = Decoder.of(InstanceRecord)


def bucket_config(bus: Bus) -> dict[str, Any]:
    """The bucket as any key-value client knows it (one message per key, direct reads, expiry markers)."""
    bucket = bus.subjects.instances_bucket
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "storage": "memory",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "num_replicas": bus.settings.stream_replicas,
        "duplicate_window": 10 * NANOSECONDS,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": MARKER_TTL_S * NANOSECONDS,
    }


async def ensure_bucket(bus: Bus) -> None:
    await jetstream.ensure_stream(bus, bucket_config(bus))


def _subject(bus: Bus, instance_id: str) -> str:
    # Key-value keys allow no "%", so the escape character is "=" here.
    return f"$KV.{bus.subjects.instances_bucket}.{escape(instance_id).replace('%', '=')}"


class Registration:
    """Keeps one instance record alive. `Superseded` ends the service: someone else runs under this id."""

    def __init__(self, bus: Bus, ttl_s: int) -> None:
        self._bus = bus
        self._ttl_s = ttl_s
        self._record: InstanceRecord | None = None
        self._revision = 0
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._refreshes = bus.metrics.counter("lease_refreshes", "lease writes by outcome", ("outcome",))

    async def set(self, record: InstanceRecord) -> None:
        """Register, or update the record. Returns when it is stored, however long the bus is away."""
        self._record = record
        while True:
            try:
                await self._write()
                break
            except (RequestFailed, JetStreamRefused) as problem:
                self._refreshes.labels("failed").inc()
                self._bus.log.warning("register_failed", reason=str(problem))
                await asyncio.sleep(RETRY_PAUSE_S)
        if self._task is None:
            self._bus.on_reconnect(self._wake.set)
            self._task = self._bus.tasks.spawn(self._refresh_forever(), name="lease")

    async def remove(self) -> None:
        """Give the lease up; best effort, since it ends by itself."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        record, self._record = self._record, None
        if record is None or not self._bus.is_connected:
            return
        headers = {
            jetstream.HEADER_KV_OPERATION: "DEL",
            jetstream.HEADER_EXPECTED_SEQUENCE: str(self._revision),
            jetstream.HEADER_TTL: str(MARKER_TTL_S),
        }
        with suppress(RequestFailed, JetStreamRefused):
            await jetstream.publish(self._bus, _subject(self._bus, record.instance_id), b"", headers, timeout_s=1.0)

    async def _refresh_forever(self) -> None:
        interval = self._ttl_s / REFRESHES_PER_LEASE
        pause = interval
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._write()
                pause = interval
            except (RequestFailed, JetStreamRefused) as problem:
                self._refreshes.labels("failed").inc()
                self._bus.log.warning("lease_refresh_failed", reason=str(problem))
                pause = RETRY_PAUSE_S

    async def _write(self) -> None:
        async with self._lock:
            record = self._record
            if record is None:
                return
            try:
                await self._put(record)
            except RequestFailed:
                # No stream takes the subject (a bus without its data): make the bucket, then once more.
                await ensure_bucket(self._bus)
                await self._put(record)
            except JetStreamRefused as refused:
                if refused.err_code not in jetstream.WRONG_LAST_SEQUENCE:
                    raise
                await self._take_over(record)
                await self._put(record)
            self._refreshes.labels("ok").inc()

    async def _put(self, record: InstanceRecord) -> None:
        headers = {
            "Content-Type": CONTENT_TYPE,
            jetstream.HEADER_TTL: str(self._ttl_s),
            jetstream.HEADER_EXPECTED_SEQUENCE: str(self._revision),
        }
        ack = await jetstream.publish(
            self._bus, _subject(self._bus, record.instance_id), encode(record), headers, timeout_s=float(self._ttl_s)
        )
        self._revision = ack.seq

    async def _take_over(self, record: InstanceRecord) -> None:
        """The key is not as we left it: a marker, nothing, our own write whose answer was lost, or another incarnation."""
        stream = f"KV_{self._bus.subjects.instances_bucket}"
        found = await jetstream.last_message(self._bus, stream, _subject(self._bus, record.instance_id))
        if found is None:
            self._revision = 0
            return
        if not found.is_marker and found.data:
            with suppress(DecodeFailed):
                holder: InstanceRecord = _decoder.decode(found.data)
                if holder.incarnation > record.incarnation:
                    # The key is theirs from now on: the revision stays the old one, so that `remove` cannot delete it.
                    self._record = None
                    raise Superseded(record.instance_id, record.incarnation, holder.incarnation)
        self._revision = found.seq


class _Known(msgspec.Struct):
    """``seen``: it was in the present snapshot."""

    record: InstanceRecord
    data: bytes
    seen: bool = True


class Directory:
    """The instances of the namespace, as the bucket says; watched from `start` on, through outages.

    An instance that is missing after an outage, or whose lease ran out during it, stays for one lease more: it may be about to
    register again.
    """

    def __init__(self, bus: Bus, lease_ttl_s: int) -> None:
        self._bus = bus
        self._grace_s = float(lease_ttl_s)
        self._known: dict[str, _Known] = {}
        self._callbacks: list[OnChange] = []
        self._doomed: dict[str, asyncio.TimerHandle] = {}
        self._grace_until = 0.0
        self._in_snapshot = False
        self._prefix = f"$KV.{bus.subjects.instances_bucket}."
        self._gauge = bus.metrics.gauge("instances_known", "instances in the directory", ("service",))
        self._consumer = OrderedConsumer(
            bus,
            f"KV_{bus.subjects.instances_bucket}",
            f"{self._prefix}>",
            self._on_entry,
            start="last_per_subject",
            ensure=lambda: ensure_bucket(bus),
            on_restart=self._snapshot_begins,
            on_caught_up=self._snapshot_ends,
        )
        self._loaded = asyncio.Event()
        bus.on_reconnect(self._bus_is_back)
        bus.on_disconnect(self._spare_all)

    async def start(self) -> None:
        """Return when the first snapshot is in."""
        await ensure_bucket_patiently(self._bus)
        await self._consumer.start()
        await self._loaded.wait()

    def instances(self, service: str) -> list[InstanceRecord]:
        """Those of one service, ordered by id; draining ones are among them."""
        return sorted(
            (known.record for known in self._known.values() if known.record.service == service),
            key=lambda record: record.instance_id,
        )

    def get(self, instance_id: str) -> InstanceRecord | None:
        known = self._known.get(self._key(instance_id))
        return known.record if known else None

    def on_change(self, callback: OnChange) -> None:
        """``callback(record, "joined" | "updated" | "left")``. A new incarnation of an id is left, then joined.

        Instances that are known already are reported as joined at once.
        """
        self._callbacks.append(callback)
        for known in list(self._known.values()):
            self._call(callback, known.record, "joined")

    def _key(self, instance_id: str) -> str:
        return _subject(self._bus, instance_id)

    def _bus_is_back(self) -> None:
        self._grace_until = asyncio.get_running_loop().time() + self._grace_s

    def _spare_all(self) -> None:
        for timer in self._doomed.values():
            timer.cancel()
        self._doomed.clear()

    async def stop(self) -> None:
        self._spare_all()
        await self._consumer.stop()

    def _snapshot_begins(self) -> None:
        self._in_snapshot = True
        for known in self._known.values():
            known.seen = False

    def _snapshot_ends(self) -> None:
        self._in_snapshot = False
        for key, known in list(self._known.items()):
            if not known.seen:
                self._doom(key)
        self._loaded.set()

    def _on_entry(self, entry: Delivered) -> None:
        if jetstream.is_marker(entry.headers) or not entry.data:
            expired = entry.headers.get(jetstream.HEADER_MARKER_REASON) == "MaxAge"
            in_grace = asyncio.get_running_loop().time() < self._grace_until
            if expired and (in_grace or self._in_snapshot):
                self._doom(entry.subject)
            else:
                self._remove(entry.subject)
            return
        timer = self._doomed.pop(entry.subject, None)
        if timer is not None:
            timer.cancel()
        known = self._known.get(entry.subject)
        if known is not None and known.data == entry.data:
            known.seen = True
            return
        try:
            record: InstanceRecord = _decoder.decode(entry.data)
        except DecodeFailed as problem:
            self._bus.log.warning("bad_instance_record", subject=entry.subject, error=str(problem))
            return
        if known is not None and known.record.incarnation != record.incarnation:
            self._remove(entry.subject)
            known = None
        self._known[entry.subject] = _Known(record, entry.data)
        self._announce(record, "joined" if known is None else "updated")

    def _doom(self, key: str) -> None:
        """Gone unless it shows up within the grace time."""
        if key in self._known and key not in self._doomed:
            self._doomed[key] = asyncio.get_running_loop().call_later(self._grace_s, self._remove, key)

    def _remove(self, key: str) -> None:
        timer = self._doomed.pop(key, None)
        if timer is not None:
            timer.cancel()
        known = self._known.pop(key, None)
        if known is not None:
            self._announce(known.record, "left")

    def _announce(self, record: InstanceRecord, change: Change) -> None:
        count = sum(1 for known in self._known.values() if known.record.service == record.service)
        self._gauge.labels(record.service).set(count)
        self._bus.log.info("instance_" + change, peer_service=record.service, peer=record.instance_id)
        for callback in list(self._callbacks):
            self._call(callback, record, change)

    def _call(self, callback: OnChange, record: InstanceRecord, change: Change) -> None:
        try:
            callback(record, change)
        except Exception:
            self._bus.log.exception("directory_callback_failed", peer=record.instance_id, change=change)


async def ensure_bucket_patiently(bus: Bus) -> None:
    """Like `ensure_bucket`, but waits for a JetStream that is not there (yet)."""
    while True:
        try:
            await ensure_bucket(bus)
            return
        except (RequestFailed, JetStreamRefused) as problem:
            bus.log.warning("bucket_unavailable", reason=str(problem), hint="is JetStream enabled on the NATS server?")
            await asyncio.sleep(1.0)
