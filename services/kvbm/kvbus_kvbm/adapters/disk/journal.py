"""The journal of one shelf: a file of records, appended to, and rewritten when most of it is history."""

import os
from collections.abc import Iterable
from pathlib import Path

from kvbus_kvbm.adapters.disk.calls import DiskCalls, write_all
from kvbus_kvbm.core.disk_records import RECORD_BYTES, Record, decode_all, encode

_PIECE_BYTES = 1 << 20
_SMALL_RECORDS = 1024


class Journal:
    """Used by one thread at a time. All methods raise OSError, and then nothing was appended: what a failed append has left
    behind the end is cut off before the next."""

    def __init__(self, calls: DiskCalls, path: Path) -> None:
        self._calls = calls
        self._path = path
        self._fd = -1
        self._size = 0
        self._is_torn = False
        self._largest = _SMALL_RECORDS

    @property
    def records(self) -> int:
        return self._size // RECORD_BYTES

    def needs_rewriting(self, live: int) -> bool:
        return self.records > max(2 * live, self._largest)

    def open(self) -> tuple[list[Record], int]:
        """What was written in former lives, and how many records are damaged. What cannot be read is damaged."""
        if self._fd < 0:
            self._fd = self._calls.open(self._path, os.O_RDWR | os.O_CREAT)
        size = os.fstat(self._fd).st_size
        content = bytearray(size)
        for at in range(0, size, _PIECE_BYTES):
            try:
                self._calls.read(self._fd, [memoryview(content)[at : at + _PIECE_BYTES]], at)
            except OSError:
                continue
        records: list[Record] = []
        damaged = 0
        for record in decode_all(content):
            if record is None:
                damaged += 1
            else:
                records.append(record)
        self._size = size // RECORD_BYTES * RECORD_BYTES
        self._is_torn = self._size != size
        return records, damaged

    def append(self, records: Iterable[Record]) -> None:
        """All of them are on the medium when this returns."""
        data = b"".join(encode(record) for record in records)
        if self._is_torn:
            self._calls.truncate(self._fd, self._size)
            self._is_torn = False
        try:
            write_all(self._calls, self._fd, data, self._size)
            self._calls.sync(self._fd)
        except BaseException:
            self._is_torn = True
            raise
        self._size += len(data)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace all records by these. After an error the old ones stay, and the next try is not before twice as many."""
        new = self._path.with_suffix(".new")
        fd = -1
        try:
            fd = self._calls.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            size = 0
            for piece in _pieces(records):
                write_all(self._calls, fd, piece, size)
                size += len(piece)
            self._calls.sync(fd)
            self._calls.rename(new, self._path)
        except BaseException:
            if fd >= 0:
                self._calls.close(fd)
            self._largest = 2 * self.records
            raise
        self._calls.close(self._fd)
        self._fd, self._size, self._is_torn = fd, size, False
        self._largest = _SMALL_RECORDS
        self._calls.sync_directory(self._path.parent)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._calls.close(fd)


def _pieces(records: Iterable[Record]) -> Iterable[bytes]:
    piece = bytearray()
    for record in records:
        piece += encode(record)
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
