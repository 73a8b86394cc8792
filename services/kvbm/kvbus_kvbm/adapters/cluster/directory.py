"""A directory that all hosts of the cluster see (NFS, a parallel file system; on one host any)."""

import asyncio
import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvbus_kvbm.adapters.cluster.store import StoreFailed
from kvbus_kvbm.adapters.disk.threads import IoThreads

T = TypeVar("T")

_TEMPORARY = ".tmp-"
_STALE_S = 3600.0
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


class DirectoryStore:
    """A `ClusterStore`. ``threads``: calls of the file system under way at the same time; one that hangs occupies its thread, and
    nobody else."""

    def __init__(self, directory: Path, threads: int) -> None:
        self._directory = directory
        self._threads = IoThreads("g4", threads)
        self._is_closed = False
        self._under_way = 0
        self._max_under_way = 64 * threads

    @property
    def place(self) -> str:
        return f"file://{self._directory}"

    async def put(self, name: str, data: bytes | bytearray) -> None:
        path = self._path(name)
        await self._call(lambda: self._put(path, data))

    async def get(self, name: str, limit_bytes: int) -> memoryview | None:
        path = self._path(name)
        return await self._call(lambda: _get(path, limit_bytes))

    async def size(self, name: str) -> int | None:
        path = self._path(name)
        return await self._call(lambda: _size(path))

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]

        def unlink() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        await self._call(unlink)

    async def names(self, prefix: str) -> list[str]:
        top = self._path(prefix)
        return await self._call(lambda: sorted(self._names(top)))

    async def close(self) -> None:
        self._is_closed = True
        self._threads.stop()

    async def _call(self, call: Callable[[], T]) -> T:
        if self._is_closed:
            raise StoreFailed(f"{self._directory}: closed")
        if self._under_way >= self._max_under_way:
            raise StoreFailed(f"{self._directory}: {self._under_way} calls hang")
        self._under_way += 1
        future = self._threads.submit(lambda _: call())
        done = asyncio.wrap_future(future)
        done.add_done_callback(self._ended)
        try:
            # A call that runs cannot be stopped; whoever waits no longer leaves it behind.
            return await asyncio.shield(done)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
            message = f"{self._directory}: {error.strerror or error}"
            raise StoreFailed(message, refused=refused, full=full) from error

    def _ended(self, _: object) -> None:
        self._under_way -= 1

    def _path(self, name: str) -> Path:
        parts = name.rstrip("/").split("/")
        if not all(part and not part.startswith(".") for part in parts):
            raise ValueError(f"{name!r} is no name of an object")
        return self._directory.joinpath(*parts)

    def _put(self, path: Path, data: bytes | bytearray) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, _FILE_MODE)
        except FileNotFoundError:
            self._make_parent(path)
            descriptor = os.open(temporary, flags, _FILE_MODE)
        try:
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _make_parent(self, path: Path) -> None:
        # Not by `parents=True`, which gives the ones above the mode of the umask.
        self._directory.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        made = self._directory
        for part in path.parent.relative_to(self._directory).parts:
            made /= part
            made.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)

    def _names(self, top: Path) -> list[str]:
        """Removes on its way what writers that died long ago have left."""
        names = []
        for folder, _, files in os.walk(top):
            for file in files:
                path = Path(folder, file)
                if file.startswith(_TEMPORARY):
                    with suppress(OSError):
                        if path.stat().st_mtime < time.time() - _STALE_S:
                            path.unlink()
                elif not file.startswith("."):
                    names.append(str(path.relative_to(self._directory)))
        return names


def _get(path: Path, limit_bytes: int) -> memoryview | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        data = bytearray(min(os.fstat(descriptor).st_size, limit_bytes + 1))
        left = memoryview(data)
        while left:
            count = os.readv(descriptor, [left])
            if not count:
                return memoryview(data)[: len(data) - len(left)]
            left = left[count:]
        return memoryview(data)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
