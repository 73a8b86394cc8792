"""Files for everybody, in JetStream's object store layout (ADR-20), named by the SHA-256 of their content.

The name is the proof: what comes back is checked against it, and putting twice is harmless.
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
from kvbus_runtime.jetstream import JetStreamRefused
from kvbus_wire.errors import ErrorCode

CHUNK_BYTES = 128 << 10
MAX_OBJECT_BYTES = 256 << 20
KEEP_RETRY_S = 2.0


class _Info(msgspec.Struct):
    name: str
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    deleted: bool = False


class ObjectStore:
    """The bucket ``subjects.models_bucket``. Methods raise RequestFailed (retryable) when the bus is away too long."""

    def __init__(self, bus: Bus, *, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        self._bus = bus
        self._bucket = bus.subjects.models_bucket
        self._stream = f"OBJ_{self._bucket}"
        self._max_bytes = max_bytes
        self._kept: dict[str, bytes] = {}
        self._watching = False

    def _config(self) -> dict[str, Any]:
        return {
            "name": self._stream,
            "subjects": [f"$O.{self._bucket}.C.>", f"$O.{self._bucket}.M.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs": -1,
            "max_bytes": -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": -1,
            "max_consumers": -1,
            "num_replicas": self._bus.settings.stream_replicas,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def exists(self, name: str) -> bool:
        return await self._info(name) is not None

    async def put(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Store ``data`` under its SHA-256 (hexadecimal). ``keep``: put it again whenever the bus has lost it, as long as this
        process lives. Raise ObjectFailed (corrupt: the name does not fit, too_large)."""
        if hashlib.sha256(data).hexdigest() != name:
            raise ObjectFailed(name, "corrupt")
        if len(data) > self._max_bytes:
            raise ObjectFailed(name, "too_large")
        await self._put(name, data)
        if keep:
            self._kept[name] = data
            if not self._watching:
                self._watching = True
                self._bus.on_reconnect(self._look_after_kept)

    def _look_after_kept(self) -> None:
        if not self._bus.tasks.closed:
            self._bus.tasks.spawn(self._put_kept(), name="objects again")

    async def _put_kept(self) -> None:
        for name, data in list(self._kept.items()):
            while True:
                try:
                    await self._put(name, data)
                    break
                except RequestFailed as failure:
                    self._bus.log.warning("object_put_failed", object=name, reason=str(failure))
                    await asyncio.sleep(KEEP_RETRY_S)

    async def _put(self, name: str, data: bytes) -> None:
        try:
            await jetstream.ensure_stream(self._bus, self._config())
            if await self._info(name) is not None:
                return
            nuid = secrets.token_hex(11)
            size = min(CHUNK_BYTES, self._bus.max_payload)
            chunks = [data[i : i + size] for i in range(0, len(data), size)]
            for chunk in chunks:
                await jetstream.publish(self._bus, f"$O.{self._bucket}.C.{nuid}", chunk, {})
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
            meta = {
                "name": name,
                "bucket": self._bucket,
                "nuid": nuid,
                "size": len(data),
                "chunks": len(chunks),
                "digest": f"SHA-256={digest}",
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
        info = await self._info(name)
        if info is None:
            raise ObjectFailed(name, "missing")
        if info.size > limit:
            raise ObjectFailed(name, "too_large")
        subject = f"$O.{self._bucket}.C.{info.nuid}"
        chunks: list[bytes] = []
        received, seq = 0, 1
        try:
            for _ in range(info.chunks):
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
        if hashlib.sha256(data).hexdigest() != name:
            raise ObjectFailed(name, "corrupt")
        return data

    async def _info(self, name: str) -> _Info | None:
        try:
            found = await jetstream.last_message(self._bus, self._stream, self._meta_subject(name))
        except JetStreamRefused as refused:
            raise jetstream.unavailable(refused) from refused
        except RequestFailed as failure:
            # Nobody answers for this stream: it does not exist (yet).
            if failure.code is ErrorCode.UNAVAILABLE and self._bus.is_connected:
                return None
            raise
        if found is None or not found.data:
            return None
        try:
            info = msgspec.json.decode(found.data, type=_Info)
        except msgspec.DecodeError as problem:
            raise ObjectFailed(name, "corrupt") from problem
        return None if info.deleted else info
