"""A G3 on a real disk, blocks to put into it, and system calls that fail when they are told to."""

import contextlib
import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.disk.calls import SystemCalls
from kvbus_kvbm.adapters.disk.tier import DiskTier
from kvbus_kvbm.core.disk_space import DiskLimits
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import PoolSpec
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.packing import unpack_keys

BLOCK_BYTES = 8192
SPEC = PoolSpec("model", "layout", BLOCK_BYTES, 16)
OTHER = PoolSpec("other", "layout", 3 * 4096 - 100, 16)
LIMITS = DiskLimits(
    capacity_bytes=16 * BLOCK_BYTES,
    segment_bytes=8 * BLOCK_BYTES,
    keep_free_bytes=0,
    io_bytes=4 * BLOCK_BYTES,
    deadline_s=10.0,
    rest_s=0.0,
)


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def name_of(key: bytes) -> str:
    return key.decode().rstrip(".")


def data_of(name: str, spec: PoolSpec = SPEC) -> bytearray:
    return bytearray(random.Random(name).randbytes(spec.block_bytes))


def metas(names: Sequence[str], *, below: str = "", spec: PoolSpec = SPEC, **said: Any) -> list[BlockMeta]:
    """Blocks of a chain; their names name their data."""
    parent = key(below) if below else b""
    directive = said.get("directive", Directive())
    found: list[BlockMeta] = []
    for depth, name in enumerate(names):
        checksum = xxhash.xxh3_64_intdigest(data_of(name, spec))
        found.append(BlockMeta(key(name), parent, depth, checksum, directive))
        parent = key(name)
    return found


async def put(tier: DiskTier, *names: str, below: str = "", spec: PoolSpec = SPEC, **said: Any) -> list[bool]:
    blocks = metas(names, below=below, spec=spec, **said)
    return await tier.write(spec, blocks, [memoryview(data_of(name, spec)) for name in names])


async def get(tier: DiskTier, *names: str, spec: PoolSpec = SPEC) -> list[str]:
    """The blocks that could be read; their data was compared."""
    into = [bytearray(spec.block_bytes) for _ in names]
    found = await tier.read(spec, [key(name) for name in names], [memoryview(block) for block in into])
    read = [name_of(meta.key) for meta in found]
    assert read == list(names[: len(read)])
    assert all(block == data_of(name, spec) for block, name in zip(into, read, strict=False))
    return read


def blocks_in(tier: DiskTier, spec: PoolSpec = SPEC) -> list[BlockMeta]:
    """Those that are present, one chain after the other, parents before their children."""
    shelf = tier._shelves.find(spec) or ()
    found = {block.key: meta for block in shelf if (meta := tier.find(spec, block.key)) is not None}

    def path(meta: BlockMeta) -> tuple[bytes, ...]:
        return (*(path(found[meta.parent]) if meta.parent else ()), meta.key)

    return sorted(found.values(), key=path)


def names_in(tier: DiskTier, spec: PoolSpec = SPEC) -> list[str]:
    return [name_of(meta.key) for meta in blocks_in(tier, spec)]


def check_slots(tier: DiskTier) -> None:
    """While nothing is under way: no slot is lost."""
    tier.check_integrity()
    for shelf in tier._shelves:
        slots = sum(segment.slots for segment in shelf.segments.values())
        assert shelf.free_slots + len(shelf) == slots


class Heard:
    """What a tier told of its changes; the blocks that follow from it."""

    def __init__(self) -> None:
        self.events: list[tuple[PoolSpec, KvEvent]] = []
        self.blocks: dict[PoolSpec, set[str]] = {}

    def __call__(self, spec: PoolSpec, events: Sequence[KvEvent]) -> None:
        blocks = self.blocks.setdefault(spec, set())
        for event in events:
            self.events.append((spec, event))
            match event:
                case Stored(parent, keys):
                    above = name_of(parent)
                    for name in map(name_of, unpack_keys(keys)):
                        assert above == "" or above in blocks
                        assert name not in blocks
                        blocks.add(name)
                        above = name
                case Removed(keys):
                    for name in map(name_of, unpack_keys(keys)):
                        blocks.remove(name)
                case _:
                    raise AssertionError(event)


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    warning = error = info


class Crash(BaseException):
    """The process ends here."""


class Calls(SystemCalls):
    """Real calls. ``fail_at``: the n-th call that changes something does not do so, and ``failure`` is raised; a write does half of
    its work before. ``hang``: the named calls wait for `release`. ``broken``: the named calls raise OSError with that number."""

    def __init__(
        self, fail_at: int = 0, failure: Callable[[], BaseException] = Crash, *, for_ever: bool = False
    ) -> None:
        self.fail_at = fail_at
        self.failure = failure
        self.for_ever = for_ever
        self.changes = 0
        self.broken: dict[str, int] = {}
        self.hang: set[str] = set()
        self.free = 1 << 50
        self._released = threading.Event()

    def release(self) -> None:
        self.hang = set()
        self._released.set()

    def _check(self, name: str) -> None:
        if name in self.hang:
            self._released.wait()
        if name in self.broken:
            raise OSError(self.broken[name], os.strerror(self.broken[name]))

    def _change(self, name: str) -> None:
        self._check(name)
        self.changes += 1
        if self.fail_at and (self.changes == self.fail_at or (self.for_ever and self.changes > self.fail_at)):
            raise self.failure()

    def write(self, fd: int, data: bytes | memoryview, at: int) -> int:
        try:
            self._change("write")
        except BaseException:
            if self.changes == self.fail_at and len(data) % 4096 == 0:
                super().write(fd, data[: len(data) // 8192 * 4096], at)
            elif self.changes == self.fail_at:
                super().write(fd, data[: len(data) // 2 + 1], at)
            raise
        return super().write(fd, data, at)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._change("allocate")
        super().allocate(fd, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._change("truncate")
        super().truncate(fd, size_bytes)

    def rename(self, old: Path, new: Path) -> None:
        self._change("rename")
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._change("remove")
        super().remove(path)

    def sync(self, fd: int) -> None:
        self._change("sync")

    def sync_directory(self, path: Path) -> None:
        self._change("sync_directory")

    def make_directory(self, path: Path) -> None:
        self._change("make_directory")
        super().make_directory(path)

    def read(self, fd: int, into: Sequence[memoryview], at: int) -> int:
        self._check("read")
        return super().read(fd, into, at)

    def free_bytes(self, path: Path) -> int:
        return self.free


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "full")


class Opened:
    """Tiers of a test, closed in the end; `kill` leaves one as kill -9 would: nothing more is written, its lock is gone."""

    def __init__(self) -> None:
        self._tiers: list[DiskTier] = []

    def make(self, directory: Path, limits: DiskLimits = LIMITS, **options: Any) -> tuple[DiskTier, Heard]:
        heard = Heard()
        options.setdefault("calls", Calls())
        tier = DiskTier(directory, limits, changed=heard, log=options.pop("log", None) or Log(), **options)
        self._tiers.append(tier)
        return tier, heard

    async def open(self, directory: Path, limits: DiskLimits = LIMITS, **options: Any) -> tuple[DiskTier, Heard]:
        tier, heard = self.make(directory, limits, **options)
        await tier.start()
        return tier, heard

    async def kill(self, tier: DiskTier) -> None:
        self._tiers.remove(tier)
        tier._is_open = False
        await tier._writes.call(lambda _: tier._shelves.close())
        tier._reads.stop()
        tier._writes.stop()

    async def close(self) -> None:
        for tier in self._tiers:
            calls = tier._place.calls
            if isinstance(calls, Calls):
                calls.release()
                calls.broken = {}
            await tier.close()


@contextlib.asynccontextmanager
async def tiers() -> AsyncIterator[Opened]:
    opened = Opened()
    try:
        yield opened
    finally:
        await opened.close()
