"""Memory for copies of blocks."""

from kvbus_transfer import host_memory


class Scratch:
    """Memory for copies, which is used again: fresh memory costs several times what the copy does.

    Who is cancelled in the middle of a copy does not give its piece back, since a thread may still write to it.
    """

    def __init__(self, size_bytes: int, *, keep: int) -> None:
        self._size = size_bytes
        self._keep = keep
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        return self._free.pop() if self._free else host_memory(self._size)

    def give_back(self, memory: memoryview) -> None:
        if len(self._free) < self._keep:
            self._free.append(memory)
