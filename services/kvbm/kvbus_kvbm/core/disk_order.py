"""Which block of a shelf goes next."""

import heapq
from collections.abc import Callable

from kvbus_kvbm.core.disk_blocks import DiskBlock


class DiskOrder:
    """Least recently used first, among the blocks that may go. A heap with lazy deletion."""

    def __init__(self, live: Callable[[], int]) -> None:
        self._live = live
        self._heap: list[tuple[int, int, DiskBlock]] = []
        self._offers = 0

    def offer(self, block: DiskBlock) -> None:
        if not block.is_evictable:
            return
        self._offers += 1
        heapq.heappush(self._heap, (block.used, self._offers, block))
        if len(self._heap) > 2 * self._live() + 64:
            self._heap = [entry for entry in self._heap if _holds(entry)]
            heapq.heapify(self._heap)

    def pop(self, now_s: float) -> DiskBlock | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _holds(entry):
                return entry[2]
        return None

    def offered(self) -> set[DiskBlock]:
        return {entry[2] for entry in self._heap if _holds(entry)}


def _holds(entry: tuple[int, int, DiskBlock]) -> bool:
    used, _, block = entry
    return block.used == used and block.is_evictable
