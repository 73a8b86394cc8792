"""The calls to the operating system that G3 makes, at one place, so that tests can let each of them fail."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskCalls(Protocol):
    """All of them raise OSError. Sizes and places in bytes."""

    def make_directory(self, path: Path) -> None:
        """With mode 0700; one that is there is left as it is."""

    def open(self, path: Path, flags: int) -> int:
        """New files get mode 0600."""

    def close(self, fd: int) -> None: ...

    def allocate(self, fd: int, size_bytes: int) -> None: ...

    def truncate(self, fd: int, size_bytes: int) -> None: ...

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int: ...

    def read(self, fd: int, into: Sequence[memoryview], at: int) -> int: ...

    def sync(self, fd: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...

    def rename(self, old: Path, new: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def free_bytes(self, path: Path) -> int: ...


class SystemCalls:
    """The real ones."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | _FLAGS, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int:
        return os.pwrite(fd, data, at)

    def read(self, fd: int, into: Sequence[memoryview], at: int) -> int:
        return os.preadv(fd, into, at)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def write_all(calls: DiskCalls, fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = calls.write(fd, view, at)
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        view, at = view[written:], at + written


def is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in FULL
