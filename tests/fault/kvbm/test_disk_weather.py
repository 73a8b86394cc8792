"""G3 under load on a disk that fails in all ways at random: no wrong data, nothing lost for ever, nothing that grows."""

import asyncio
import errno
import random
import threading
from pathlib import Path

import msgspec
import pytest

from kvbus_blocks.retention import Directive, Kind
from kvbus_kvbm.adapters.disk import journal
from kvbus_kvbm.adapters.disk.tier import DiskTier
from kvbus_testkit.timing import eventually
from tests.integration.kvbm.disk_kit import (
    LIMITS,
    OTHER,
    SPEC,
    Calls,
    Heard,
    blocks_in,
    check_slots,
    get,
    key,
    name_of,
    put,
    tiers,
)

FAILURES = [errno.EIO, errno.ENOSPC, errno.ENXIO]
CALLS = ["write", "read", "sync", "allocate", "truncate", "rename", "remove", "sync_directory"]


async def use(tier: DiskTier, rng: random.Random, number: int) -> None:
    """One agent: chains that grow, are read, leased, dropped."""
    spec = rng.choice([SPEC, SPEC, OTHER])
    for turn in range(6):
        names = [f"{number}.{turn}.{i}" for i in range(rng.randrange(1, 5))]
        kinds: list[Kind] = ["normal", "normal", "pinned"]
        said = Directive(rng.choice(kinds), rng.randrange(0, 100), rng.choice([None, 1e9, 0.0]), f"tenant{number % 3}")
        await put(tier, *names, spec=spec, directive=said)
        await get(tier, *names, spec=spec)
        if rng.random() < 0.3:
            await tier.retain(spec, [key(name) for name in names], [said] * len(names))
        if rng.random() < 0.3:
            await tier.drop(spec, [key(name) for name in names])
        if rng.random() < 0.1:
            await tier.verify(spec, [key(name) for name in names])


async def make_weather(calls: Calls, rng: random.Random) -> None:
    for _ in range(60):
        kind = rng.random()
        if kind < 0.5:
            calls.broken = {name: rng.choice(FAILURES) for name in rng.sample(CALLS, 2)}
        elif kind < 0.6:
            calls.hang = {rng.choice(["write", "read", "sync"])}
        calls.free = rng.choice([0, 1 << 50])
        await asyncio.sleep(rng.random() * 0.01)
        calls.release()
        calls.broken, calls.free = {}, 1 << 50
        await asyncio.sleep(rng.random() * 0.01)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("seed", range(3))
async def test_in_any_weather_data_is_right_and_nothing_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(journal, "_SMALL_RECORDS", 32)
    rng = random.Random(seed)
    limits = msgspec.structs.replace(LIMITS, deadline_s=0.02, min_bytes_per_s=1e9, rest_s=0.001, failures=2)
    files, threads = open_files(), threading.active_count()
    async with tiers() as opened:
        for life in range(3):
            calls = Calls()
            tier, heard = await opened.open(tmp_path, limits, calls=calls)
            weather = asyncio.create_task(make_weather(calls, rng))
            await asyncio.gather(*(use(tier, rng, life * 100 + number) for number in range(20)))
            await weather
            await clear_up(tier)
            check_slots(tier)
            assert told(heard) == whole(tier)
            assert journal_records(tmp_path) < 2 * 40 + 2 * 32
            await tier.close()
        tier, _ = await opened.open(tmp_path)
        check_slots(tier)
        for shelf in tier._shelves:
            for name in [name_of(block.key) for block in shelf]:
                assert await get(tier, name, spec=shelf.spec) == [name]
        assert tier.counters.corrupt == 0
        assert disk_bytes(tmp_path) <= LIMITS.capacity_bytes + 64 * 1024
    await eventually(lambda: threading.active_count() <= threads, what="the end of the threads")
    assert open_files() <= files


async def clear_up(tier: DiskTier) -> None:
    """The weather is fine again, and the disk is used again."""

    async def works() -> bool:
        written = await put(tier, "x", spec=SPEC), await put(tier, "y", spec=OTHER)
        await get(tier, "x")
        return all(map(all, written)) and tier.usage().available

    await eventually(works, what="that the tier is used again")  # type: ignore[arg-type]


def told(heard: Heard) -> set[tuple[str, str]]:
    return {(spec.model, name) for spec, names in heard.blocks.items() for name in names}


def whole(tier: DiskTier) -> set[tuple[str, str]]:
    return {(spec.model, name_of(meta.key)) for spec in (SPEC, OTHER) for meta in blocks_in(tier, spec)}


def journal_records(directory: Path) -> int:
    return sum(path.stat().st_size // 256 for path in directory.rglob("journal"))


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
