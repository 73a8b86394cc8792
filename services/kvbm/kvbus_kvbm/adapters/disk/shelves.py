"""The shelves with their files, and who is told of changes."""

import contextlib
from collections.abc import Iterator, Sequence

from kvbus_blocks.retention import Directive, PinCaps
from kvbus_kvbm.adapters.disk.files import ShelfFiles
from kvbus_kvbm.adapters.disk.place import Place
from kvbus_kvbm.core.disk_shelf import Segment, Shelf
from kvbus_kvbm.core.disk_space import DiskLimits, DiskSpace, disk_slot_bytes
from kvbus_kvbm.core.errors import StorageRefused
from kvbus_kvbm.core.lower import Changed, TierCounters
from kvbus_kvbm.core.pools import PoolSpec


class Shelves:
    """``unix_s``: unix time minus the clock that kvbm runs by."""

    def __init__(
        self, place: Place, limits: DiskLimits, changed: Changed, counters: TierCounters, unix_s: float
    ) -> None:
        self.place = place
        self.space = DiskSpace(limits)
        self._limits = limits
        self._files: dict[PoolSpec, ShelfFiles] = {}
        self._changed = changed
        self._counters = counters
        self._unix_s = unix_s
        # Files of segments that were given up, to be removed by the next who writes.
        self.closing: list[tuple[ShelfFiles, int]] = []

    def __iter__(self) -> Iterator[Shelf]:
        return iter(tuple(self.space.shelves.values()))

    def find(self, spec: PoolSpec) -> Shelf | None:
        return self.space.shelves.get(spec)

    def get(self, spec: PoolSpec) -> Shelf:
        """One that is not there yet gets its files with its first write."""
        shelf = self.find(spec)
        if shelf is None:
            shelf = self.space.shelves[spec] = self._new(spec)
            self._files[spec] = self.place.files(spec)
        return shelf

    def files(self, shelf: Shelf) -> ShelfFiles:
        return self._files[shelf.spec]

    def publish(self, shelf: Shelf) -> None:
        events = shelf.take_events()
        if events:
            self._changed(shelf.spec, events)

    def give_up(self, shelf: Shelf, segment: Segment) -> None:
        shelf.remove_segment(segment)
        self.closing.append((self.files(shelf), segment.number))

    def retain(self, shelf: Shelf, keys: Sequence[bytes], directives: Sequence[Directive], now_s: float) -> list[int]:
        """Positions that were to be pinned and are not."""
        unpinned: list[int] = []
        for position, (key, said) in enumerate(zip(keys, directives, strict=True)):
            block = shelf.find(key)
            if block is not None and not shelf.direct(block, said, now_s):
                unpinned.append(position)
        return unpinned

    def _new(self, spec: PoolSpec) -> Shelf:
        slot_bytes = disk_slot_bytes(spec)
        caps = PinCaps(self._limits.capacity_bytes // slot_bytes, self._limits.pin_share)
        return Shelf(spec, slot_bytes, caps, self._counters.evictions, self._unix_s)

    def recover(self, now_s: float) -> dict[str, int]:
        """In a thread, while nobody else is here. Raise StorageRefused."""
        place = self.place
        place.take()
        lost = damaged = 0
        try:
            for found in place.recover():
                spec = found.files.spec
                shelf = self._new(spec)
                lost += shelf.recover(found.records, found.segments, now_s)
                damaged += found.damaged
                self.space.shelves[spec] = shelf
                self._files[spec] = found.files
            place.check_room(self.space.used_bytes)
        except OSError as error:
            self._leave()
            raise StorageRefused(f"g3_dir: {place.directory}: {error.strerror}") from error
        except StorageRefused:
            self._leave()
            raise
        for shelf, segment in self.space.surplus():
            shelf.remove_segment(segment)
            with contextlib.suppress(OSError):
                self.files(shelf).remove_segment(segment.number)
        return {
            "blocks": sum(len(shelf) for shelf in self),
            "shelves": len(self.space.shelves),
            "lost": lost,
            "damaged_records": damaged,
            "unreadable_shelves": len(place.unreadable),
        }

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        for files in self._files.values():
            with contextlib.suppress(OSError):
                files.close()
        self.place.leave()
