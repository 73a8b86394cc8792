"""G3 when the process, the power or the disk fails, at every point where something is written."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.disk import journal
from kvbus_kvbm.adapters.disk.tier import DiskTier
from kvbus_kvbm.core.disk_records import RECORD_BYTES, Kept, decode_all
from kvbus_testkit.timing import eventually, scaled
from tests.integration.kvbm.disk_kit import (
    BLOCK_BYTES,
    LIMITS,
    OTHER,
    SPEC,
    Calls,
    Crash,
    Heard,
    Opened,
    check_slots,
    get,
    key,
    name_of,
    names_in,
    put,
    tiers,
)

PIN = Directive("pinned", 0, 1e12, "t")


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    async with tiers() as found:
        yield found


@pytest.fixture(autouse=True)
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_SMALL_RECORDS", 8)


class Story:
    """Blocks come and go: both models, eviction, drops, leases, a segment that changes its owner, a rewritten journal."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self.tried: set[str] = set()
        self.dropped: set[str] = set()

    async def run(self, tier: DiskTier) -> None:
        await self._put(tier, ["a1", "a2", "a3", "a4"])
        await self._put(tier, ["a5", "a6"], below="a4", directive=PIN)
        await self._put(tier, ["b1", "b2", "b3", "b4", "b5", "b6"])
        await self._drop(tier, ["b5", "b6"])
        await self._put(tier, ["c1", "c2", "c3", "c4"])
        await tier.retain(SPEC, [key("a1")], [PIN])
        await self._put(tier, ["d1", "d2", "d3", "d4"])
        await self._put(tier, ["o1", "o2"], spec=OTHER)
        await self._put(tier, ["e1", "e2"])
        await self._drop(tier, ["e2"])

    async def _put(self, tier: DiskTier, names: list[str], below: str = "", **options: object) -> None:
        self.tried.update(names)
        await put(tier, *names, below=below, **options)  # type: ignore[arg-type]

    async def _drop(self, tier: DiskTier, names: list[str]) -> None:
        before = self._heard.blocks.get(SPEC, set()) & set(names)
        await tier.drop(SPEC, [key(name) for name in names])
        self.dropped |= before


def all_in(tier: DiskTier) -> set[str]:
    return {name_of(block.key) for shelf in tier._shelves for block in shelf}


async def read_all(tier: DiskTier) -> set[str]:
    """Every block that is there, read by itself."""
    found: set[str] = set()
    for shelf in tier._shelves:
        for name in [name_of(block.key) for block in shelf]:
            found.update(await get(tier, name, spec=shelf.spec))
    return found


@pytest.mark.parametrize("part", range(4))
async def test_killed_at_any_write_nothing_confirmed_is_lost_and_nothing_else_is_there(
    tmp_path: Path, opened: Opened, part: int
) -> None:
    for fail_at in range(part + 1, 1000, 4):
        directory = tmp_path / str(fail_at)
        calls = Calls(fail_at, for_ever=True)
        tier, heard = opened.make(directory, calls=calls)
        story = Story(heard)
        try:
            await tier.start()
        except Crash:
            pass
        else:
            await story.run(tier)
        confirmed = set().union(*heard.blocks.values())
        if calls.changes < fail_at:
            break
        await opened.kill(tier)
        again, announced = await opened.open(directory)
        recovered = all_in(again)
        # What was evicted in the same write that was cut short may still be there: it holds, too.
        assert confirmed <= recovered <= story.tried, fail_at
        assert await read_all(again) == recovered, fail_at
        assert again.counters.corrupt == 0
        assert set().union(*announced.blocks.values()) == {b for b in recovered if b in announced_all(announced)}
        check_slots(again)
        assert await put(again, "z1", "z2") == [True, True]
        await again.close()
    else:
        raise AssertionError("the story never ended")
    assert calls.changes > 60


def announced_all(heard: Heard) -> set[str]:
    return set().union(*heard.blocks.values())


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_a_call_that_fails_costs_its_own_blocks_and_the_disk_says_what_memory_says(
    tmp_path: Path, opened: Opened, part: int, code: int
) -> None:
    for fail_at in range(part + 1, 1000, 4):
        directory = tmp_path / str(fail_at)
        calls = Calls(0, lambda: OSError(code, os.strerror(code)))
        tier, heard = await opened.open(directory, calls=calls)
        calls.changes, calls.fail_at = 0, fail_at
        story = Story(heard)
        await story.run(tier)
        if calls.changes < fail_at:
            break
        check_slots(tier)
        present = all_in(tier)
        assert set().union(*heard.blocks.values()) == present, fail_at
        assert await read_all(tier) == present
        assert tier.counters.corrupt == 0
        assert await put(tier, "z1") == [True]
        present = all_in(tier)
        await tier.close()
        again, _ = await opened.open(directory)
        assert all_in(again) == present, fail_at
        assert await read_all(again) == present
        check_slots(again)
        await again.close()
    else:
        raise AssertionError("the story never ended")


async def kept_journal(directory: Path, opened: Opened) -> tuple[Path, bytes]:
    tier, _ = await opened.open(directory)
    await put(tier, "a1", "a2", "a3")
    await put(tier, "b1", "b2")
    await tier.drop(SPEC, [key("b2")])
    await tier.close()
    path = find(directory, "journal")
    return path, read_file(path)


def find(directory: Path, pattern: str) -> Path:
    return sorted(directory.rglob(pattern))[0]


def read_file(path: Path) -> bytes:
    return path.read_bytes()


def write_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def expected(content: bytes) -> set[str]:
    """What a journal says, record by record."""
    found: set[str] = set()
    for record in decode_all(content):
        if isinstance(record, Kept):
            found.add(name_of(record.key))
        elif record is not None:
            found.discard(name_of(record.key))
    return found


def cuts(size: int) -> Iterator[int]:
    yield from range(0, size, 37)
    for at in range(0, size + 1, RECORD_BYTES):
        yield from (max(0, at - 1), at, min(size, at + 1))


async def test_a_journal_cut_at_any_byte_keeps_all_before_the_cut(tmp_path: Path, opened: Opened) -> None:
    path, content = await kept_journal(tmp_path, opened)
    for cut in sorted(set(cuts(len(content)))):
        write_file(path, content[:cut])
        tier, _ = await opened.open(tmp_path)
        # Of a block whose removal is cut off the data is still there.
        assert all_in(tier) == expected(content[: cut // RECORD_BYTES * RECORD_BYTES])
        assert await read_all(tier) == all_in(tier)
        # What is appended then is not lost behind the torn end.
        assert await put(tier, "n1") == [True]
        await opened.kill(tier)
        again, _ = await opened.open(tmp_path)
        assert "n1" in all_in(again)
        assert await read_all(again) == all_in(again)
        await again.close()


async def test_a_flipped_bit_in_the_journal_costs_one_record(tmp_path: Path, opened: Opened) -> None:
    path, content = await kept_journal(tmp_path, opened)
    everything = expected(content)
    for at in range(0, len(content), 23):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        write_file(path, bytes(damaged))
        tier, heard = await opened.open(tmp_path)
        assert all_in(tier) == expected(bytes(damaged))
        assert len(all_in(tier) ^ everything) <= 1
        assert await read_all(tier) == all_in(tier)
        told = heard.blocks.get(SPEC, set())
        # Only what hangs on the lost one is not told of, until it is back.
        assert await put(tier, "a1", "a2", "a3") == [True] * 3
        assert told | {"a1", "a2", "a3"} == heard.blocks[SPEC]
        check_slots(tier)
        await tier.close()


async def test_a_segment_that_was_cut_loses_what_lay_behind_the_cut(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *[f"a{i}" for i in range(8)])
    await tier.close()
    os.truncate(find(tmp_path, "*.segment"), 3 * BLOCK_BYTES + 100)
    again, _ = await opened.open(tmp_path)
    assert names_in(again) == ["a0", "a1", "a2"]
    assert await read_all(again) == {"a0", "a1", "a2"}
    assert await put(again, *[f"a{i}" for i in range(8)]) == [True] * 8
    assert await get(again, *[f"a{i}" for i in range(8)]) == [f"a{i}" for i in range(8)]
    check_slots(again)


async def test_a_segment_that_is_gone_costs_its_blocks_only(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *[f"a{i}" for i in range(12)])
    await tier.close()
    find(tmp_path, "000002.segment").unlink()
    again, _ = await opened.open(tmp_path)
    assert await get(again, *[f"a{i}" for i in range(12)]) == [f"a{i}" for i in range(8)]
    assert all(await put(again, *[f"a{i}" for i in range(12)]))
    check_slots(again)


async def test_either_copy_of_what_a_shelf_is_for_is_enough(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, "a")
    await tier.close()
    for name, content in (("spec", b"rubbish"), ("spec.copy", b"")):
        path = find(tmp_path, name)
        good = read_file(path)
        write_file(path, content)
        again, _ = await opened.open(tmp_path)
        assert await get(again, "a") == ["a"]
        await again.close()
        write_file(path, good)


async def test_a_full_disk_stops_growth_and_nothing_else(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    limits = msgspec.structs.replace(LIMITS, rest_s=1000.0)
    tier, _ = await opened.open(tmp_path, limits, calls=calls)
    assert await put(tier, *[f"a{i}" for i in range(8)]) == [True] * 8
    calls.free = 0
    assert not any(await put(tier, "b0", "b1"))
    assert tier.usage().available
    # From now on room is made by eviction.
    assert await put(tier, "b0", "b1") == [True, True]
    assert await get(tier, "a0", "b0") == ["a0"]
    assert await get(tier, "b0", "b1") == ["b0", "b1"]
    check_slots(tier)


async def test_a_disk_without_room_for_the_journal_is_bypassed_but_read(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    now = [0.0]
    limits = msgspec.structs.replace(LIMITS, rest_s=100.0)
    tier, _ = await opened.open(tmp_path, limits, calls=calls, clock=lambda: now[0])
    await put(tier, "a")
    calls.broken = {"write": errno.ENOSPC}
    for name in ("b", "c", "d"):
        assert await put(tier, name) == [False]
    assert not tier.usage().available
    calls.broken = {}
    assert await put(tier, "e") == [False], "not tried while it rests"
    assert await get(tier, "a") == ["a"]
    now[0] += 101
    assert await put(tier, "e") == [True]
    assert tier.usage().available


async def test_a_disk_that_hangs_in_writing_is_bypassed_within_the_deadline_and_comes_back(
    tmp_path: Path, opened: Opened
) -> None:
    calls = Calls()
    now = [0.0]
    limits = msgspec.structs.replace(LIMITS, deadline_s=scaled(0.4), rest_s=100.0)
    tier, heard = await opened.open(tmp_path, limits, calls=calls, clock=lambda: now[0])
    await put(tier, "a")
    calls.hang = {"write"}
    assert await put(tier, "b") == [False]
    assert not tier.usage().available
    assert await put(tier, "c") == [False]
    assert await get(tier, "a") == ["a"]
    assert await tier.leading(SPEC, [key("a")]) == 1
    # The trial hangs behind the first: it must not take the breaker along for ever.
    now[0] += 101
    assert await put(tier, "c") == [False]
    calls.release()
    now[0] += 1000
    while not await put(tier, "d"):
        now[0] += 1000
    assert "d" in heard.blocks[SPEC]
    assert tier.usage().available
    check_slots(tier)


async def test_a_disk_that_hangs_in_reading_is_bypassed_within_the_deadline_and_comes_back(
    tmp_path: Path, opened: Opened
) -> None:
    calls = Calls()
    now = [0.0]
    limits = msgspec.structs.replace(LIMITS, deadline_s=scaled(0.4), rest_s=100.0, read_threads=1)
    tier, _ = await opened.open(tmp_path, limits, calls=calls, clock=lambda: now[0])
    await put(tier, "a", "b")
    calls.hang = {"read"}
    into = [bytearray(BLOCK_BYTES)]
    assert await tier.read(SPEC, [key("a")], [memoryview(into[0])]) == []
    assert await tier.leading(SPEC, [key("a")]) == 0
    assert await get(tier, "a") == []
    assert await put(tier, "c") == [True]
    now[0] += 101
    assert await tier.leading(SPEC, [key("a")]) == 1, "a trial is due"
    assert await get(tier, "a") == []
    calls.release()
    now[0] += 1000
    while await get(tier, "a", "b") != ["a", "b"]:
        now[0] += 1000
    assert into[0] == bytes(BLOCK_BYTES), "it was written after the answer"
    assert tier.usage().available
    check_slots(tier)


async def test_a_bad_place_on_the_disk_costs_its_block_only(tmp_path: Path, opened: Opened) -> None:
    class BadPlace(Calls):
        def read(self, fd: int, into: object, at: int) -> int:
            size = len(into[0])  # type: ignore[index]
            if at <= BLOCK_BYTES < at + size and size % BLOCK_BYTES == 0:
                raise OSError(errno.EIO, "bad")
            return super().read(fd, into, at)  # type: ignore[arg-type]

    tier, heard = await opened.open(tmp_path, calls=BadPlace())
    await put(tier, "a", "b", "c")
    assert await get(tier, "a", "b", "c") == ["a"]
    assert heard.blocks[SPEC] == {"a"}
    assert await get(tier, "c") == ["c"]
    assert tier.usage().available


async def test_reads_that_fail_open_the_breaker_and_one_that_works_closes_it(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    now = [0.0]
    limits = msgspec.structs.replace(LIMITS, rest_s=100.0)
    tier, _ = await opened.open(tmp_path, limits, calls=calls, clock=lambda: now[0])
    await put(tier, "a", "b")
    calls.broken = {"read": errno.ENXIO}
    for _ in range(3):
        assert await get(tier, "a", "b") == []
    assert await tier.leading(SPEC, [key("a")]) == 0
    calls.broken = {}
    assert await get(tier, "a", "b") == []
    now[0] += 101
    assert await get(tier, "a", "b") == ["a", "b"]
    assert tier.usage().available


async def test_an_error_nobody_thought_of_is_a_failure_of_the_disk(tmp_path: Path, opened: Opened) -> None:
    calls = Calls(0, MemoryError)
    tier, _ = await opened.open(tmp_path, calls=calls)
    await put(tier, "a")
    calls.fail_at = calls.changes + 1
    assert await put(tier, "b") == [False]
    assert await put(tier, "b") == [True]
    assert tier.counters.failures == 1


async def test_a_disk_that_hangs_at_the_start_delays_nobody_and_opens_later(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, "a")
    await tier.close()
    calls = Calls()
    calls.hang = {"read"}
    again, heard = await opened.open(tmp_path, msgspec.structs.replace(LIMITS, start_s=0.05), calls=calls)
    assert not again.usage().available
    assert await get(again, "a") == []
    calls.release()
    await eventually(lambda: heard.blocks)
    assert await get(again, "a") == ["a"]


async def test_a_start_that_hangs_can_be_given_up(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    calls.hang = {"make_directory"}
    tier, heard = await opened.open(tmp_path / "g3", msgspec.structs.replace(LIMITS, start_s=0.05), calls=calls)
    await tier.close()
    assert heard.events == []


async def test_closing_ends_although_the_disk_hangs(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    limits = msgspec.structs.replace(LIMITS, deadline_s=scaled(0.4))
    tier, _ = await opened.open(tmp_path, limits, calls=calls)
    await put(tier, "a")
    calls.hang = {"write"}
    assert await put(tier, "b") == [False]
    await tier.close()
    await tier.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from kvbus_kvbm.adapters.disk import journal
from kvbus_kvbm.adapters.disk.tier import DiskTier
from tests.integration.kvbm.disk_kit import LIMITS, Log, put, key, SPEC
journal._SMALL_RECORDS = 8

async def main():
    tier = DiskTier(Path(sys.argv[1]), LIMITS, changed=lambda *_: None, log=Log())
    await tier.start()
    for turn in range(10**6):
        names = [f"{sys.argv[2]}-{turn}-{i}" for i in range(3)]
        done = await put(tier, *names)
        print(turn, *(name for name, is_done in zip(names, done) if is_done), flush=True)

asyncio.run(main())
"""


async def test_a_real_kill_9_in_the_middle_of_writing_keeps_what_was_confirmed(tmp_path: Path, opened: Opened) -> None:
    rng = random.Random(6)
    for life in range(4):
        confirmed = write_until_killed(tmp_path, str(life), rng.randrange(3, 40))
        tier, _ = await opened.open(tmp_path)
        recovered = all_in(tier)
        assert await read_all(tier) == recovered
        # The last turns fit into the tier for certain, but for what the next write had evicted.
        assert set(confirmed[-2]) <= recovered
        assert tier.counters.corrupt == 0
        check_slots(tier)
        await tier.close()


def write_until_killed(directory: Path, life: str, turns: int) -> list[list[str]]:
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), life], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    with process:
        confirmed = [process.stdout.readline().split()[1:] for _ in range(turns)]
        process.send_signal(signal.SIGKILL)
        confirmed += [line.split()[1:] for line in process.stdout if line.endswith("\n")]
    assert all(confirmed)
    return confirmed
