"""A shared-memory arena: one file of equal slots that processes of a host map.

    ArenaError
      ArenaExists        there is a file of that name
      ArenaNoRoom        the file system cannot hold the arena
      ArenaMismatch      the file is no arena of the expected size
      ArenaUnavailable   no such file, or no permission
      ArenaClosed        the arena was closed

Slot i lies at ``i * slot_bytes``; there is no header. The owner creates the file and holds an exclusive flock on it while it
lives, so `remove_stale` can tell the file of a dead owner from one in use. Mappings outlive the removal of the file: a process
that has mapped it keeps valid memory until it closes its arena.
"""

import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from types import TracebackType

import xxhash

from kvbus_transfer.host_memory import ask_for_huge_pages

# How often a creator tries again when `remove_stale` of another process took the new file before it was locked.
_CREATE_ATTEMPTS = 16


class ArenaError(Exception):
    """Root of this module's errors. ``retryable``: the same call may succeed later."""

    code = "arena_error"
    retryable = False

    def __init__(self, path: Path | str, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = Path(path)
        self.detail = detail


class ArenaExists(ArenaError):
    code = "arena_exists"


class ArenaNoRoom(ArenaError):
    """``wanted_bytes`` do not fit into the file system."""

    code = "arena_no_room"
    retryable = True

    def __init__(self, path: Path | str, detail: str, wanted_bytes: int) -> None:
        super().__init__(path, detail)
        self.wanted_bytes = wanted_bytes


class ArenaMismatch(ArenaError):
    code = "arena_mismatch"


class ArenaUnavailable(ArenaError):
    code = "arena_unavailable"


class ArenaClosed(ArenaError):
    code = "arena_closed"


def checksum(view: memoryview | bytes) -> int:
    """XXH3-64 of the bytes, an unsigned 64-bit integer. It finds corruption, not attackers."""
    return xxhash.xxh3_64_intdigest(view)


class Arena:
    """A mapped arena. Made by `create` (the owner) or `open` (everyone else); a context manager that closes it."""

    def __init__(self, path: Path, slot_bytes: int, slots: int, memory: mmap.mmap, lock_fd: int | None) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._memory = memory
        self._view = memoryview(memory)
        self._lock_fd = lock_fd
        self._closed = False

    @classmethod
    def create(cls, path: Path | str, slot_bytes: int, slots: int, *, group: int | None = None) -> "Arena":
        """Make the file with all its memory reserved, so that a full file system is an error here and not a SIGBUS later.

        Permissions are 0600, or 0660 with ``group`` (a group id). Takes time in proportion to the size: call it in a thread.
        Raise ArenaExists, ArenaNoRoom, ArenaUnavailable; the file is gone again after an error.
        """
        path = Path(path)
        size_bytes = _size(path, slot_bytes, slots)
        fd = _create_locked(path)
        try:
            if group is not None:
                os.fchown(fd, -1, group)
            # fchmod and not the mode of open(): the umask must not decide, in either direction.
            os.fchmod(fd, 0o600 if group is None else 0o660)
            os.posix_fallocate(fd, 0, size_bytes)
            memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            ask_for_huge_pages(memory)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                detail = f"no room for an arena of {size_bytes} bytes: {error.strerror}"
                raise ArenaNoRoom(path, detail, size_bytes) from error
            raise ArenaUnavailable(path, str(error.strerror)) from error
        return cls(path, slot_bytes, slots, memory, fd)

    @classmethod
    def open(cls, path: Path | str, slot_bytes: int, slots: int) -> "Arena":
        """Map an arena that another process made. Raise ArenaUnavailable, or ArenaMismatch when the size is another."""
        path = Path(path)
        size_bytes = _size(path, slot_bytes, slots)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ArenaUnavailable(path, str(error.strerror)) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ArenaMismatch(path, "not a regular file")
            if status.st_size != size_bytes:
                raise ArenaMismatch(path, f"{status.st_size} bytes instead of {slots} slots of {slot_bytes} bytes")
            try:
                memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:
                raise ArenaUnavailable(path, str(error.strerror)) from error
        finally:
            os.close(fd)  # the mapping keeps a duplicate
        return cls(path, slot_bytes, slots, memory, None)

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self.slots

    @property
    def is_closed(self) -> bool:
        return self._closed

    def view(self, index: int) -> memoryview:
        """The bytes of a slot, writable, without a copy. Raise IndexError, ArenaClosed.

        Another process may be writing the same bytes: only a lease of the owner says whose a slot is.
        """
        if self._closed:
            raise ArenaClosed(self.path, "closed")
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = index * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def memory(self) -> memoryview:
        """All slots, one after the other. As of `view`, the caller answers for whose they are. Raise ArenaClosed."""
        if self._closed:
            raise ArenaClosed(self.path, "closed")
        return self._view[:]

    def close(self) -> None:
        """Unmap, and give the owner's lock back. Idempotent. Views handed out before stay valid and keep the mapping."""
        if self._closed:
            return
        self._closed = True
        self._view.release()
        if self._lock_fd is not None:
            # Unlock by hand: the mapping holds a duplicate of the descriptor, and with it the lock, while a view lives.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = None
        try:
            self._memory.close()
        except BufferError:
            # A view still lives. Dropping the last reference unmaps: when the last view goes.
            del self._memory

    def remove(self) -> None:
        """Remove the file and close. For the owner. Idempotent; other processes keep their mappings."""
        if self._lock_fd is not None:
            self.path.unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_stale(directory: Path | str, pattern: str) -> list[Path]:
    """Remove the arenas of dead owners among the files of ``directory`` that match ``pattern`` (a glob); return their paths.

    A file whose lock is held is in use and stays, and so does one that this user may not open.
    """
    removed: list[Path] = []
    for path in sorted(Path(directory).glob(pattern)):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # gone meanwhile, another user's, or a link
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under the lock the name must still be this file: its owner may have removed it and made a new one.
            if stat.S_ISREG(os.fstat(fd).st_mode) and _is_same_file(fd, path):
                path.unlink()
                removed.append(path)
        except OSError:  # locked by its owner, or in a directory that this user may not change
            continue
        finally:
            os.close(fd)
    return removed


def _size(path: Path, slot_bytes: int, slots: int) -> int:
    if slot_bytes < 1 or slots < 1:
        raise ArenaMismatch(path, f"{slots} slots of {slot_bytes} bytes")
    return slot_bytes * slots


def _create_locked(path: Path) -> int:
    """A new file under an exclusive lock. Between open and flock `remove_stale` may take the file: then again."""
    for _ in range(_CREATE_ATTEMPTS):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError as error:
            raise ArenaExists(path, "exists already") from error
        except OSError as error:
            raise ArenaUnavailable(path, str(error.strerror)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise ArenaUnavailable(path, str(error.strerror)) from error
        if _is_same_file(fd, path):
            return fd
        os.close(fd)
    raise ArenaUnavailable(path, "another process keeps removing the file")


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))  # noqa: PTH116
    except FileNotFoundError:
        return False
