"""How fast this host copies and verifies a block: the prior for a worker that reads blocks back."""

import mmap
import time
from collections.abc import Callable

from kvbus_transfer import checksum

_PROBE_BYTES = 4 << 20
_ROUNDS = 3


def onboard_bytes_per_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """One copy and one checksum of some memory, the best of a few rounds. Takes milliseconds and 8 MiB."""
    best_s = float("inf")
    with (
        mmap.mmap(-1, _PROBE_BYTES) as source,
        mmap.mmap(-1, _PROBE_BYTES) as target,
        memoryview(source) as read,
        memoryview(target) as write,
    ):
        for _ in range(_ROUNDS):
            started_s = clock()
            write[:] = read
            checksum(write)
            best_s = min(best_s, clock() - started_s)
    return _PROBE_BYTES / max(best_s, 1e-9)
