"""The directory of G3: whose it is, what fits into it, and what former lives have left there."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import msgspec

from kvbus_kvbm.adapters.disk.calls import DiskCalls
from kvbus_kvbm.adapters.disk.files import PATTERN, ShelfFiles, read_spec
from kvbus_kvbm.adapters.disk.threads import Buffer
from kvbus_kvbm.core.disk_records import Record
from kvbus_kvbm.core.disk_space import DISK_ALIGN_BYTES, DiskLimits
from kvbus_kvbm.core.errors import StorageRefused
from kvbus_kvbm.core.pools import PoolSpec


class Found(msgspec.Struct, frozen=True):
    """A shelf of a former life. ``damaged``: records that did not hold."""

    files: ShelfFiles
    records: list[Record]
    damaged: int
    segments: dict[int, int]


class Place:
    """Blocking, for a thread. ``unreadable``: shelves that had to be removed because nobody can tell what they are for."""

    def __init__(self, calls: DiskCalls, directory: Path, limits: DiskLimits) -> None:
        self.calls = calls
        self.directory = directory
        self.limits = limits
        self.direct = 0
        self.unreadable: list[str] = []
        self._lock_fd = -1

    def take(self) -> None:
        """Lock it: two kvbm on one directory would write over each other's blocks. Raise StorageRefused."""
        try:
            self.calls.make_directory(self.directory)
            self._lock_fd = self.calls.open(self.directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StorageRefused(f"g3_dir: {self.directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.leave()
            raise StorageRefused(f"g3_dir: {self.directory} is used by another kvbm") from error
        self.direct = os.O_DIRECT if self._takes_direct() else 0

    def leave(self) -> None:
        if self._lock_fd >= 0:
            fd, self._lock_fd = self._lock_fd, -1
            os.close(fd)

    def check_room(self, own_bytes: int) -> None:
        """For a directory without blocks: g3_bytes must fit. One with blocks goes on with what there is. Raise StorageRefused."""
        wanted = self.limits.capacity_bytes
        try:
            free = self.calls.free_bytes(self.directory)
        except OSError as error:
            raise StorageRefused(f"g3_dir: {self.directory}: {error.strerror}") from error
        if own_bytes == 0 and free - self.limits.keep_free_bytes < wanted:
            raise StorageRefused(
                f"g3_bytes: {wanted} do not fit: {self.directory} has {free} bytes free, of which {self.limits.keep_free_bytes} "
                f"are left to others (g3_keep_free_bytes)"
            )

    def recover(self) -> list[Found]:
        """Raise OSError."""
        found: list[Found] = []
        for path in sorted(self.directory.glob(PATTERN)):
            spec = read_spec(self.calls, path)
            if spec is None:
                self.unreadable.append(path.name)
                shutil.rmtree(path, ignore_errors=True)
                continue
            files = self.files(spec)
            found.append(Found(files, *files.recover()))
        return found

    def files(self, spec: PoolSpec) -> ShelfFiles:
        return ShelfFiles(
            self.calls, self.directory, spec, direct=self.direct, keep_free_bytes=self.limits.keep_free_bytes
        )

    def _takes_direct(self) -> bool:
        """Not every file system does, and some only say so at the first read."""
        path = self.directory / "probe"
        try:
            fd = self.calls.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError:
            return False
        try:
            data = Buffer().view(DISK_ALIGN_BYTES)
            return self.calls.write(fd, data, 0) == self.calls.read(fd, [data], 0) == len(data)
        except OSError:
            return False
        finally:
            self.calls.close(fd)
            with contextlib.suppress(OSError):
                self.calls.remove(path)
