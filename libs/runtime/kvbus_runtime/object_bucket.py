"""Named objects in JetStream's object store layout (ADR-20), so that any client can read them.

    $O.<bucket>.C.<nuid>    the chunks of one object, written first
    $O.<bucket>.M.<name>    what it is (size, chunks, SHA-256), written when all chunks are stored

so an object that was only half written when its writer died is no object; its chunks go with the bucket's age or size limit.
"""

import asyncio
import base64
import hashlib
import secrets
import time
from typing import Any

import msgspec

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import ObjectFailed, RequestFailed
from kvbus_runtime.jetstream import NANOSECONDS, JetStreamRefused, StoredMessage
from kvbus_wire.errors import ErrorCode

CHUNK_BYTES = 128 << 10
_HASH_IN_THREAD_BYTES = 1 << 20
_DIGEST_PREFIX = "SHA-256="


class ObjectInfo(msgspec.Struct, frozen=True):
    """``digest``: as in ADR-20. ``revision``: grows with each object of the bucket, whatever clocks say."""

    name: str
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    deleted: bool = False
    revision: int = 0


class ObjectBucket:
    """Methods raise RequestFailed (retryable) when the bus is away too long.

    ``max_bytes``: of one object. ``store_bytes``, ``max_age_s``: of the bucket, 0 for no limit; at the limit the oldest goes first.
    """

    def __init__(self, bus: Bus, bucket: str, *, max_bytes: int, store_bytes: int = 0, max_age_s: float = 0.0) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._max_bytes = max_bytes
        self._store_bytes = store_bytes
        self._max_age_s = max_age_s

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": self._stream,
            "subjects": [f"$O.{self._bucket}.C.>", f"$O.{self._bucket}.M.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "old" if self._store_bytes else "new",
            "max_msgs": -1,
            "max_bytes": self._store_bytes or -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": -1,
            "max_consumers": -1,
            "num_replicas": self._bus.settings.stream_replicas,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }
        if self._max_age_s:
            config["max_age"] = int(self._max_age_s * NANOSECONDS)
        return config

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    async def put(self, name: str, data: bytes) -> None:
        """Store an object that does not exist yet. Raise ObjectFailed (too_large)."""
        if len(data) > self._max_bytes:
            raise ObjectFailed(name, "too_large")
        try:
            await jetstream.ensure_stream(self._bus, self._config())
            nuid = secrets.token_hex(11)
            size = min(CHUNK_BYTES, self._bus.max_payload)
            starts = range(0, len(data), size)
            for start in starts:
                await jetstream.publish(self._bus, self._chunk_subject(nuid), data[start : start + size], {})
            meta = {
                "name": name,
                "bucket": self._bucket,
                "nuid": nuid,
                "size": len(data),
                "chunks": len(starts),
                "digest": await _digest(data),
                "mtime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "options": {"max_chunk_size": size},
            }
            rollup = {jetstream.HEADER_ROLLUP: "sub"}
            await jetstream.publish(self._bus, self._meta_subject(name), msgspec.json.encode(meta), rollup)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused

    async def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """Raise ObjectFailed: missing, too_large (checked before anything is fetched), or corrupt."""
        limit = self._max_bytes if max_bytes is None else max_bytes
        info = await self.info(name)
        if info is None:
            raise ObjectFailed(name, "missing")
        if info.size > limit:
            raise ObjectFailed(name, "too_large")
        chunks: list[bytes] = []
        received, seq = 0, 1
        try:
            for _ in range(info.chunks):
                subject = self._chunk_subject(info.nuid)
                chunk = await jetstream.next_message(self._bus, self._stream, subject, seq)
                if chunk is None:
                    raise ObjectFailed(name, "missing")
                chunks.append(chunk.data)
                received += len(chunk.data)
                if received > info.size:
                    raise ObjectFailed(name, "corrupt")
                seq = chunk.seq + 1
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        data = b"".join(chunks)
        if await _digest(data) != info.digest:
            raise ObjectFailed(name, "corrupt")
        return data

    async def info(self, name: str) -> ObjectInfo | None:
        """None: there is no such object (or no bucket). Raise ObjectFailed (corrupt)."""
        try:
            found = await jetstream.last_message(self._bus, self._stream, self._meta_subject(name))
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        except RequestFailed as failure:
            # Nobody answers for this stream: it does not exist (yet).
            if failure.code is ErrorCode.UNAVAILABLE and self._bus.is_connected:
                return None
            raise
        return None if found is None else _info(found, name)

    async def newest(self) -> list[ObjectInfo]:
        """All objects, the one that was completed last first. Those whose description cannot be read are left out."""
        try:
            subjects = await jetstream.subjects_of(self._bus, self._stream, f"$O.{self._bucket}.M.>")
            found = []
            for subject in subjects:
                message = await jetstream.last_message(self._bus, self._stream, subject)
                try:
                    info = None if message is None else _info(message, subject)
                except ObjectFailed:
                    continue
                if info is not None:
                    found.append(info)
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        return sorted(found, key=lambda info: info.revision, reverse=True)

    async def remove(self, info: ObjectInfo) -> None:
        """The description first: nobody shall find an object that lacks chunks."""
        try:
            for subject in (self._meta_subject(info.name), self._chunk_subject(info.nuid)):
                await jetstream.call(self._bus, f"STREAM.PURGE.{self._stream}", {"filter": subject})
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused


def _info(message: StoredMessage, name: str) -> ObjectInfo | None:
    if not message.data:
        return None
    try:
        info = msgspec.json.decode(message.data, type=ObjectInfo)
    except msgspec.DecodeError as problem:
        raise ObjectFailed(name, "corrupt") from problem
    return None if info.deleted else msgspec.structs.replace(info, revision=message.seq)


async def _digest(data: bytes) -> str:
    """Large data are hashed beside the event loop (a second per GB)."""
    if len(data) < _HASH_IN_THREAD_BYTES:
        return _sha256(data)
    return await asyncio.to_thread(_sha256, data)


def _sha256(data: bytes) -> str:
    return _DIGEST_PREFIX + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
