"""A bucket of S3, or of what speaks its protocol. Credentials, endpoint and region come from the usual ``AWS_*`` variables."""

import os
import re
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from kvbus_kvbm.adapters.cluster.store import StoreFailed

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")

_REFUSED = re.compile(r"status code: 40[134]\b")


class S3Bucket:
    """A `ClusterStore`. ``deadline_s``: no request is tried for longer, whoever waits for it. Raise ModuleNotFoundError
    without the extra ``s3``."""

    def __init__(self, url: str, deadline_s: float) -> None:
        import obstore
        from obstore import exceptions

        self._obstore = obstore
        self._refusals = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.InvalidPathError,
            exceptions.NotSupportedError,
        )
        parts = urlsplit(url)
        self.place = f"s3://{parts.netloc}{parts.path}".rstrip("/")
        self._store = self._open(parts.netloc, parts.path.strip("/"), timedelta(seconds=deadline_s))

    def _open(self, bucket: str, prefix: str, deadline: timedelta) -> "S3Store":
        from obstore.store import S3Store

        # Whoever names such an endpoint means it; the library wants to be told twice.
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        plain = any(os.environ.get(name, "").startswith("http://") for name in variables)
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "timeout": deadline,
                "connect_timeout": min(deadline, timedelta(seconds=5)),
                "allow_http": plain,
            },
            retry_config={"max_retries": 2, "retry_timeout": deadline},
        )

    async def put(self, name: str, data: bytes | bytearray) -> None:
        # Not in pieces: what is left of those of a writer that died costs room that nobody sees.
        try:
            await self._call(self._obstore.put_async(self._store, name, data, use_multipart=False))
        except FileNotFoundError as error:
            raise StoreFailed(f"{self.place}: there is no such bucket", refused=True) from error

    async def get(self, name: str, limit_bytes: int) -> memoryview | None:
        try:
            result = await self._call(self._obstore.get_async(self._store, name))
            if result.meta["size"] > limit_bytes:
                result = await self._call(
                    self._obstore.get_async(self._store, name, options={"range": (0, limit_bytes + 1)})
                )
            return memoryview(await self._call(result.bytes_async()))
        except FileNotFoundError:
            return None

    async def size(self, name: str) -> int | None:
        try:
            return (await self._call(self._obstore.head_async(self._store, name)))["size"]
        except FileNotFoundError:
            return None

    async def delete(self, names: Sequence[str]) -> None:
        try:
            await self._call(self._obstore.delete_async(self._store, list(names)))
        except FileNotFoundError:
            return

    async def names(self, prefix: str) -> list[str]:
        found = await self._call(self._obstore.list(self._store, prefix.rstrip("/") + "/").collect_async())
        return sorted(entry["path"] for entry in found)

    async def close(self) -> None:
        pass

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except FileNotFoundError:
            raise
        except Exception as error:
            # What the library says goes on with its whole state, over many lines.
            text = (str(error).splitlines() or [type(error).__name__])[0]
            # Lists of objects have no errors of their own.
            refused = isinstance(error, self._refusals) or _REFUSED.search(text) is not None
            raise StoreFailed(f"{self.place}: {text}", refused=refused) from error
