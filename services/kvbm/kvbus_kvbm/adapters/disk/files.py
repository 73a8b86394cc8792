"""The directory of one shelf: what it is for (twice), its journal, its segments."""

import contextlib
import errno
import os
from hashlib import blake2b
from pathlib import Path

import msgspec
import xxhash

from kvbus_kvbm.adapters.disk.calls import DiskCalls, write_all
from kvbus_kvbm.adapters.disk.journal import Journal
from kvbus_kvbm.core.disk_records import Record
from kvbus_kvbm.core.disk_space import disk_slot_bytes
from kvbus_kvbm.core.pools import PoolSpec

PATTERN = "shelf-*"
_SPEC_FILES = ("spec", "spec.copy")
_SUFFIX = ".segment"


def shelf_path(directory: Path, spec: PoolSpec) -> Path:
    return directory / f"shelf-{blake2b(msgspec.json.encode(spec), digest_size=16).hexdigest()}"


def read_spec(calls: DiskCalls, path: Path) -> PoolSpec | None:
    """What a shelf's directory is for. None: neither file holds."""
    for name in _SPEC_FILES:
        try:
            fd = calls.open(path / name, os.O_RDONLY)
        except OSError:
            continue
        content = bytearray(1 << 16)
        try:
            size = calls.read(fd, [memoryview(content)], 0)
        except OSError:
            continue
        finally:
            calls.close(fd)
        text = bytes(content[8:size])
        if content[:8] != _sum(text):
            continue
        with contextlib.suppress(msgspec.DecodeError):
            spec = msgspec.json.decode(text, type=PoolSpec)
            if shelf_path(path.parent, spec) == path:
                return spec
    return None


class ShelfFiles:
    """Used by one thread at a time, but for `fd`. All methods raise OSError."""

    def __init__(self, calls: DiskCalls, directory: Path, spec: PoolSpec, *, direct: int, keep_free_bytes: int) -> None:
        self._calls = calls
        self.path = shelf_path(directory, spec)
        self.spec = spec
        self.journal = Journal(calls, self.path / "journal")
        self._slot_bytes = disk_slot_bytes(spec)
        self._direct = direct
        self._keep_free_bytes = keep_free_bytes
        self._fds: dict[int, int] = {}
        self._is_made = False

    def make(self) -> None:
        """The directory, if it is not there yet. Idempotent, also after an error in the middle."""
        if self._is_made:
            return
        self._calls.make_directory(self.path)
        text = msgspec.json.encode(self.spec)
        for name in _SPEC_FILES:
            new = self.path / f"{name}.new"
            fd = self._calls.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                write_all(self._calls, fd, _sum(text) + text, 0)
                self._calls.sync(fd)
            finally:
                self._calls.close(fd)
            self._calls.rename(new, self.path / name)
        self.journal.open()
        self._calls.sync_directory(self.path)
        self._calls.sync_directory(self.path.parent)
        self._is_made = True

    def recover(self) -> tuple[list[Record], int, dict[int, int]]:
        """The records, how many are damaged, and the segments with their slots. What is half made is removed."""
        for name in (*(f"{name}.new" for name in _SPEC_FILES), "journal.new"):
            with contextlib.suppress(FileNotFoundError):
                self._calls.remove(self.path / name)
        records, damaged = self.journal.open()
        segments: dict[int, int] = {}
        for path in sorted(self.path.glob(f"*{_SUFFIX}")):
            if not path.stem.isdecimal():
                continue
            fd = self._open_segment(path)
            slots = os.fstat(fd).st_size // self._slot_bytes
            if slots == 0:
                self._calls.close(fd)
                self._calls.remove(path)
                continue
            self._fds[int(path.stem)] = fd
            segments[int(path.stem)] = slots
        self._is_made = True
        return records, damaged, segments

    def create_segment(self, number: int, size_bytes: int) -> None:
        """With all its room reserved. ENOSPC, also when the file system would have less left than is to be kept free."""
        if self._calls.free_bytes(self.path) - size_bytes < self._keep_free_bytes:
            raise OSError(errno.ENOSPC, "the rest of the file system is kept free")
        path = self._segment_path(number)
        fd = self._open_segment(path, os.O_CREAT | os.O_EXCL)
        try:
            self._calls.allocate(fd, size_bytes)
            self._calls.sync(fd)
            self._calls.sync_directory(self.path)
        except BaseException:
            self._calls.close(fd)
            with contextlib.suppress(OSError):
                self._calls.remove(path)
            raise
        self._fds[number] = fd

    def remove_segment(self, number: int) -> None:
        fd = self._fds.pop(number, -1)
        if fd >= 0:
            self._calls.close(fd)
        with contextlib.suppress(FileNotFoundError):
            self._calls.remove(self._segment_path(number))

    def fd(self, segment: int) -> int:
        fd = self._fds.get(segment)
        if fd is None:
            raise OSError(errno.EBADF, f"segment {segment} is closed")
        return fd

    def close(self) -> None:
        self.journal.close()
        while self._fds:
            self._calls.close(self._fds.popitem()[1])

    def _open_segment(self, path: Path, flags: int = 0) -> int:
        return self._calls.open(path, os.O_RDWR | self._direct | flags)

    def _segment_path(self, number: int) -> Path:
        return self.path / f"{number:06d}{_SUFFIX}"


def _sum(text: bytes) -> bytes:
    return xxhash.xxh3_64_digest(text)
