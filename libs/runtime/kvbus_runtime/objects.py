"""Files for everybody, named by the SHA-256 of their content.

The name is the proof: what comes back is checked against it, and putting twice is harmless.
"""

import asyncio
import hashlib

from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import ObjectFailed, RequestFailed
from kvbus_runtime.object_bucket import ObjectBucket

MAX_OBJECT_BYTES = 256 << 20
KEEP_RETRY_S = 2.0


class ObjectStore:
    """The bucket ``subjects.models_bucket``. Methods raise RequestFailed (retryable) when the bus is away too long."""

    def __init__(self, bus: Bus, *, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        self._bus = bus
        self._max_bytes = max_bytes
        self._bucket = ObjectBucket(bus, bus.subjects.models_bucket, max_bytes=max_bytes)
        self._kept: dict[str, bytes] = {}
        self._watching = False

    async def exists(self, name: str) -> bool:
        return await self._bucket.info(name) is not None

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
        if await self._bucket.info(name) is None:
            await self._bucket.put(name, data)

    async def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """Raise ObjectFailed: missing, too_large (checked before anything is fetched), or corrupt."""
        data = await self._bucket.get(name, max_bytes=max_bytes)
        if hashlib.sha256(data).hexdigest() != name:
            raise ObjectFailed(name, "corrupt")
        return data
