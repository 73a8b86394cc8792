"""One write to one shelf, as a thread carries it out.

removals and changed directives -> journal     first: slots of what is gone are written over next
new segments, removed segments
data -> slots, and sync
records of the new blocks -> journal           with them the blocks are there, also after a crash
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvbus_kvbm.adapters.disk.calls import DiskCalls, write_all
from kvbus_kvbm.adapters.disk.files import ShelfFiles
from kvbus_kvbm.adapters.disk.threads import Buffer, copy
from kvbus_kvbm.core.disk_blocks import DiskBlock
from kvbus_kvbm.core.disk_records import Kept, Record
from kvbus_kvbm.core.disk_shelf import Segment, Shelf


class Abandoned(Exception):
    """The caller has gone; its memory must not be touched any more."""


class WriteJob:
    """``blocks`` are placed, ``data`` is theirs; ``segments`` are to be made, files of
    ``closed`` ones removed. What became of it: ``pending_done``,
    ``made`` (segments), ``perhaps_recorded``, ``records`` (by position),
    ``spoiled`` (positions of blocks whose data was not what its checksum says)."""

    def __init__(self, calls: DiskCalls, files: ShelfFiles, shelf: Shelf, io_bytes: int) -> None:
        self.files = files
        self.shelf = shelf
        self.pending: list[Record] = []
        self.blocks: list[DiskBlock] = []
        self.data: list[memoryview] = []
        self.held: list[DiskBlock] = []
        self.segments: list[Segment] = []
        self.closed: list[tuple[ShelfFiles, int]] = []
        self.closed_done = 0
        self.made: set[int] = set()
        self.is_late = False
        self.is_over = False
        self.pending_done = False
        self.perhaps_recorded = False
        self.spoiled: set[int] = set()
        self.records: dict[int, Kept] = {}
        self._calls = calls
        self._io_bytes = io_bytes
        self._abandoned = False
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """After it the caller's memory is not read. Waits for a copy of a few MiB at most."""
        with self._lock:
            self._abandoned = True
            self.data = []

    def run(self, buffer: Buffer) -> None:
        """Raise OSError, Abandoned."""
        self.files.make()
        if self.pending:
            self.files.journal.append(self.pending)
        self.pending_done = True
        for files, number in self.closed:
            files.remove_segment(number)
            self.closed_done += 1
        for segment in self.segments:
            self.files.create_segment(segment.number, segment.size_bytes)
            self.made.add(segment.number)
        if not self.blocks:
            return
        for first, count in _runs(self.blocks, max(1, self._io_bytes // self.shelf.slot_bytes)):
            self._write(first, count, buffer)
        for segment_number in {block.segment for block in self.blocks}:
            self._calls.sync(self.files.fd(segment_number))
        self.records = {
            at: self.shelf.record_of(block) for at, block in enumerate(self.blocks) if at not in self.spoiled
        }
        if self.records:
            self.perhaps_recorded = True
            self.files.journal.append(self.records.values())

    def _write(self, first: int, count: int, buffer: Buffer) -> None:
        slot_bytes, block_bytes = self.shelf.slot_bytes, self.shelf.spec.block_bytes
        memory = buffer.view(count * slot_bytes)
        for number in range(count):
            slot = memory[number * slot_bytes : (number + 1) * slot_bytes]
            with self._lock:
                if self._abandoned:
                    raise Abandoned
                copy(slot[:block_bytes], self.data[first + number])
            if block_bytes < slot_bytes:
                slot[block_bytes:] = bytes(slot_bytes - block_bytes)
            # Whoever wrote it into G2 may have been too late, into a slot that was somebody else's by then.
            if xxhash.xxh3_64_intdigest(slot[:block_bytes]) != self.blocks[first + number].checksum:
                self.spoiled.add(first + number)
        block = self.blocks[first]
        write_all(self._calls, self.files.fd(block.segment), memory, block.slot * slot_bytes)


def rewrite_journal(files: ShelfFiles, shelf: Shelf, blocks: Sequence[DiskBlock]) -> Callable[[Buffer], None]:
    def run(_buffer: Buffer) -> None:
        files.journal.rewrite(shelf.record_of(block) for block in blocks)

    return run


def _runs(blocks: Sequence[DiskBlock], longest: int) -> Iterator[tuple[int, int]]:
    """Pieces (first, count) that lie one after the other on the disk."""
    first = 0
    for at in range(1, len(blocks) + 1):
        is_next = (
            at < len(blocks)
            and at - first < longest
            and blocks[at].segment == blocks[at - 1].segment
            and blocks[at].slot == blocks[at - 1].slot + 1
        )
        if not is_next:
            yield first, at - first
            first = at
