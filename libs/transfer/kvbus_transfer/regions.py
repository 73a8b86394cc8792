"""Memory that an agent has registered."""

import os
from pathlib import Path
from typing import Any, Protocol

from kvbus_transfer.arena import Arena
from kvbus_transfer.devices import flat, is_device_memory, to_host


class Region(Protocol):
    """A piece of memory or of a file. ``kind``: host, arena, file or cuda. Ids are never used again by an agent."""

    @property
    def region_id(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def layout(self) -> str: ...

    def view(self, offset: int, length: int) -> memoryview:
        """These bytes in host memory: without a copy where it is host memory, else read or staged. It may block for ``file``
        and ``cuda``: call it in a thread then."""


class _Named:
    def __init__(self, region_id: int, size_bytes: int, layout: str) -> None:
        self.region_id = region_id
        self.size_bytes = size_bytes
        self.layout = layout


class HostRegion(_Named):
    """Any writable or read-only buffer of this process."""

    kind = "host"

    def __init__(self, region_id: int, buffer: Any, layout: str) -> None:
        self.buffer = memoryview(buffer).cast("B")
        super().__init__(region_id, self.buffer.nbytes, layout)

    def view(self, offset: int, length: int) -> memoryview:
        return self.buffer[offset : offset + length]


class ArenaRegion(_Named):
    """An arena: other processes of the host read it where it lies."""

    kind = "arena"

    def __init__(self, region_id: int, arena: Arena, layout: str) -> None:
        self.arena = arena
        self.buffer = arena.memory()
        super().__init__(region_id, arena.size_bytes, layout)

    def view(self, offset: int, length: int) -> memoryview:
        return self.buffer[offset : offset + length]


class FileRegion(_Named):
    """Part of a file, for blocks of a disk tier. It is read with pread, by backends that can."""

    kind = "file"

    def __init__(self, region_id: int, path: Path, offset: int, size_bytes: int, layout: str) -> None:
        self.path = path
        self._offset = offset
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        super().__init__(region_id, size_bytes, layout)

    def view(self, offset: int, length: int) -> memoryview:
        buffer = bytearray(length)
        got = os.preadv(self._fd, [buffer], self._offset + offset)
        if got != length:
            raise OSError(f"{self.path}: {got} of {length} bytes at {self._offset + offset}")
        return memoryview(buffer)

    def close(self) -> None:
        os.close(self._fd)


class CudaRegion(_Named):
    """A contiguous torch tensor on a CUDA device. `view` stages in host memory, the fallback for backends that cannot read device
    memory; `device_view` is the memory itself."""

    kind = "cuda"

    def __init__(self, region_id: int, tensor: Any, layout: str) -> None:
        self._bytes = flat(tensor)
        self.address = int(self._bytes.data_ptr())
        self.device = int(self._bytes.device.index or 0)
        super().__init__(region_id, int(self._bytes.nbytes), layout)

    def view(self, offset: int, length: int) -> memoryview:
        return to_host(self.device_view(offset, length))

    def device_view(self, offset: int, length: int) -> Any:
        return self._bytes[offset : offset + length]


class FileSegment:
    """What to register of a file."""

    def __init__(self, path: Path | str, offset: int, size_bytes: int) -> None:
        self.path = Path(path)
        self.offset = offset
        self.size_bytes = size_bytes


def region_of(region_id: int, memory: Any, layout: str) -> "HostRegion | ArenaRegion | FileRegion | CudaRegion":
    """Raise TypeError, ValueError, OSError."""
    if isinstance(memory, Arena):
        return ArenaRegion(region_id, memory, layout)
    if isinstance(memory, FileSegment):
        return FileRegion(region_id, memory.path, memory.offset, memory.size_bytes, layout)
    if is_device_memory(memory):
        return CudaRegion(region_id, memory, layout)
    return HostRegion(region_id, memory, layout)
