import asyncio
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.errors import StorageRefused
from kvbus_kvbm.core.lower import LowerTier
from tests.integration.kvbm.disk_kit import (
    BLOCK_BYTES,
    LIMITS,
    OTHER,
    SPEC,
    Calls,
    Log,
    Opened,
    blocks_in,
    check_slots,
    data_of,
    get,
    key,
    metas,
    names_in,
    put,
    tiers,
)

PINNED = Directive("pinned", 3, 1e9, "tenant")


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    async with tiers() as found:
        yield found


def letters(count: int, first: str = "a") -> list[str]:
    return [f"{first}{number}" for number in range(count)]


async def test_what_was_written_is_read_back_and_told(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path / "g3")
    same: LowerTier = tier
    assert same.name == "g3"
    assert await put(tier, "a", "b", "c") == [True] * 3
    assert await get(tier, "a", "b", "c", "d") == ["a", "b", "c"]
    assert await get(tier, "b", "c") == ["b", "c"]
    assert await get(tier, "d") == []
    assert await tier.leading(SPEC, [key("a"), key("b"), key("x")]) == 2
    assert heard.blocks == {SPEC: {"a", "b", "c"}}
    assert [(m.parent, m.depth) for m in blocks_in(tier)] == [(b"", 0), (key("a"), 1), (key("b"), 2)]
    counters = tier.counters
    assert (counters.hits, counters.misses, counters.stored) == (5, 2, 3)
    assert (counters.written_bytes, counters.read_bytes) == (3 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    usage = tier.usage()
    assert (usage.blocks, usage.used_bytes, usage.available) == (3, 3 * BLOCK_BYTES, True)
    check_slots(tier)


async def test_a_block_whose_size_is_no_multiple_of_a_sector_is_kept_too(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    assert await put(tier, "a", "b", spec=OTHER) == [True, True]
    assert await get(tier, "a", "b", spec=OTHER) == ["a", "b"]


async def test_a_restart_has_all_blocks_with_their_directives_and_announces_them(
    tmp_path: Path, opened: Opened
) -> None:
    tier, _ = await opened.open(tmp_path, clock=lambda: 100.0, unix_clock=lambda: 1_000_100.0)
    await put(tier, "a", "b", directive=PINNED)
    await put(tier, "c", below="b")
    await put(tier, "x", "y", spec=OTHER)
    await tier.close()
    # Another machine life: the monotonic clock begins anew.
    again, heard = await opened.open(tmp_path, clock=lambda: 5.0, unix_clock=lambda: 1_000_200.0)
    assert heard.blocks == {SPEC: {"a", "b", "c"}, OTHER: {"x", "y"}}
    assert blocks_in(again)[0].directive == msgspec.structs.replace(PINNED, expires_s=1e9 - 100.0 + 5.0 - 100.0)
    assert blocks_in(again)[2].directive == Directive()
    assert await get(again, "a", "b", "c") == ["a", "b", "c"]
    assert await get(again, "x", "y", spec=OTHER) == ["x", "y"]
    check_slots(again)


async def test_after_a_restart_new_blocks_do_not_overwrite_kept_ones(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(6))
    await tier.close()
    again, _ = await opened.open(tmp_path)
    assert all(await put(again, *letters(10, "b")))
    assert await get(again, *letters(6)) == letters(6)
    assert await get(again, *letters(10, "b")) == letters(10, "b")


async def test_a_kill_loses_nothing_that_was_confirmed(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(6))
    await tier.drop(SPEC, [key("a5")])
    await opened.kill(tier)
    again, heard = await opened.open(tmp_path)
    assert names_in(again) == letters(5)
    assert heard.blocks[SPEC] == set(letters(5))
    assert await get(again, *letters(6)) == letters(5)


async def test_a_second_kvbm_on_the_same_directory_is_refused(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    second, _ = opened.make(tmp_path)
    with pytest.raises(StorageRefused, match="another kvbm"):
        await second.start()
    assert await put(tier, "a") == [True]
    await tier.close()
    await second.start()
    assert names_in(second) == ["a"]


async def test_more_than_the_disk_has_is_refused_with_the_numbers(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    calls.free = LIMITS.capacity_bytes + 99
    limits = msgspec.structs.replace(LIMITS, keep_free_bytes=100)
    tier, _ = opened.make(tmp_path, limits, calls=calls)
    with pytest.raises(StorageRefused, match=rf"{LIMITS.capacity_bytes} do not fit"):
        await tier.start()
    calls.free += 1
    await tier.start()


async def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "file").write_text("")
    tier, _ = opened.make(tmp_path / "file")
    with pytest.raises(StorageRefused, match="g3_dir"):
        await tier.start()


async def test_nobody_else_may_read_the_files(tmp_path: Path, opened: Opened) -> None:
    before = os.umask(0)
    try:
        tier, _ = await opened.open(tmp_path / "g3")
        await put(tier, "a")
    finally:
        os.umask(before)
    for path in (tmp_path / "g3", *(tmp_path / "g3").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


async def test_a_full_tier_evicts_leaves_and_can_be_read(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, *letters(16))
    assert await put(tier, *letters(4, "b")) == [True] * 4
    assert names_in(tier) == letters(12) + letters(4, "b")
    assert heard.blocks[SPEC] == {*letters(12), *letters(4, "b")}
    assert await get(tier, *letters(16)) == letters(12)
    assert tier.counters.evictions == {"normal": 4}
    check_slots(tier)
    await opened.kill(tier)
    again, _ = await opened.open(tmp_path)
    assert sorted(names_in(again)) == sorted(letters(12) + letters(4, "b"))
    assert await get(again, *letters(4, "b")) == letters(4, "b")


async def test_a_batch_larger_than_the_tier_is_kept_as_far_as_it_fits(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    assert await put(tier, *letters(20)) == [True] * 16 + [False] * 4
    assert await get(tier, *letters(20)) == letters(16)
    check_slots(tier)


async def test_nothing_is_kept_below_what_is_not_there(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    assert await put(tier, "b", below="a") == [False]
    assert tier.counters.refused == 1


async def test_ephemeral_blocks_are_not_written(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    assert await put(tier, "a", directive=Directive("ephemeral")) == [False]


async def test_data_that_is_not_what_its_checksum_says_is_not_kept(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    data = [memoryview(data_of(name)) for name in ("a", "b")]
    data[1][17] ^= 1
    assert await tier.write(SPEC, metas(["a", "b"]), data) == [True, False]
    assert tier.counters.corrupt == 1
    assert names_in(tier) == ["a"]
    check_slots(tier)


@pytest.mark.parametrize("bit", [0, 8 * 4096 + 3, 8 * BLOCK_BYTES - 1])
async def test_a_flipped_bit_is_found_on_reading_and_costs_that_block(tmp_path: Path, opened: Opened, bit: int) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, "a", "b", "c")
    flip(tmp_path, "*.segment", BLOCK_BYTES * 8 + bit)
    assert await get(tier, "a", "b", "c") == ["a"]
    assert heard.blocks[SPEC] == {"a"}
    assert tier.counters.corrupt == 1
    check_slots(tier)
    # What hung on it can be read by who has its prefix, and is told of again when that is back.
    assert await get(tier, "c") == ["c"]
    assert await put(tier, "b", below="a") == [True]
    assert heard.blocks[SPEC] == {"a", "b", "c"}
    assert await get(tier, "a", "b", "c") == ["a", "b", "c"]


async def test_verify_finds_what_does_not_hold(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, "a", "b", "c")
    flip(tmp_path, "*.segment", BLOCK_BYTES * 8 + 100)
    assert await tier.verify(SPEC, [key(name) for name in "abcx"]) == [key("b")]
    assert names_in(tier) == ["a"]


async def test_retain_reaches_the_journal(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, "a", "b")
    assert await tier.retain(SPEC, [key("a"), key("x")], [PINNED, PINNED]) == []
    await tier.close()
    again, _ = await opened.open(tmp_path)
    assert [m.directive.kind for m in blocks_in(again)] == ["pinned", "normal"]


@pytest.mark.parametrize("order", ["abc", "cba", "bca", "cabcab"])
async def test_drop_frees_children_first_and_not_what_others_hang_on(
    order: str, tmp_path: Path, opened: Opened
) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, "a", "b", "c")
    await put(tier, "z", below="a")
    assert await tier.drop(SPEC, [key(name) for name in order]) == 2
    assert heard.blocks[SPEC] == {"a", "z"}
    assert (await put(tier, "b", below="a")) == [True]


async def test_two_models_share_the_disk_and_leave_each_other_alone(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(8))
    await put(tier, *letters(4, "b"), spec=OTHER)
    await tier.close()
    again, _ = await opened.open(tmp_path)
    assert await get(again, *letters(8)) == letters(8)
    assert await get(again, *letters(4, "b"), spec=OTHER) == letters(4, "b")


async def test_a_model_nobody_uses_gives_way_and_one_in_use_keeps_its_share(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, *letters(16))
    # In use: it gives what is above its half.
    await put(tier, *letters(8, "b"), spec=OTHER)
    assert len(heard.blocks[OTHER]) == 5
    assert len(heard.blocks[SPEC]) == 8
    check_slots(tier)
    await tier.close()
    # Unused since the start: it gives all.
    again, heard = await opened.open(tmp_path)
    await put(again, *letters(8, "c"))
    assert heard.blocks[OTHER] == set()
    assert heard.blocks[SPEC] == {*letters(8), *letters(8, "c")}
    check_slots(again)


async def test_a_smaller_capacity_after_a_restart_is_kept_to(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(16))
    await tier.close()
    again, _ = await opened.open(tmp_path, msgspec.structs.replace(LIMITS, capacity_bytes=8 * BLOCK_BYTES))
    assert len(segments_in(tmp_path)) == 1
    assert await get(again, *letters(16)) in (letters(8), [])
    check_slots(again)


async def test_the_journal_stays_short_under_churn(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    for turn in range(220):
        await put(tier, *letters(8, f"{turn}-"))
    assert journal_bytes(tmp_path) < 1200 * 256
    await opened.kill(tier)
    again, _ = await opened.open(tmp_path)
    assert await get(again, *letters(8, "219-")) == letters(8, "219-")
    check_slots(again)


async def test_a_cancelled_write_leaves_the_callers_memory_alone(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    tier, _ = await opened.open(tmp_path, calls=calls)
    await put(tier, "a")
    calls.hang = {"write"}
    task = asyncio.create_task(put(tier, "b", below="a"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    calls.release()
    assert await put(tier, "c", below="a") == [True]
    check_slots(tier)


async def test_pinned_blocks_stay_while_others_go(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(4), directive=PINNED)
    for turn in range(4):
        await put(tier, *letters(12, f"{turn}-"))
    assert await get(tier, *letters(4)) == letters(4)
    check_slots(tier)


async def test_pins_that_hold_the_whole_disk_give_a_tenth_of_it(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path, msgspec.structs.replace(LIMITS, pin_share=1.0))
    # A pin at the end of a chain holds all of it.
    await put(tier, *letters(12))
    await put(tier, *letters(4, "b"), below="a11", directive=PINNED)
    assert await put(tier, *letters(8, "c")) == [True] * 2 + [False] * 6
    assert await get(tier, *letters(12), *letters(4, "b")) == [*letters(12), "b0", "b1"]


async def test_a_pin_that_has_expired_does_not_hold_also_after_a_restart(tmp_path: Path, opened: Opened) -> None:
    now = [100.0]
    tier, _ = await opened.open(tmp_path, clock=lambda: now[0], unix_clock=lambda: 1e6 + now[0])
    await put(tier, *letters(4), directive=Directive("pinned", 0, 150.0, "tenant"))
    await tier.close()
    now[0] = 160.0
    again, _ = await opened.open(tmp_path, clock=lambda: now[0], unix_clock=lambda: 1e6 + now[0])
    assert blocks_in(again)[0].directive.expires_s == 150.0
    await put(again, *letters(16, "b"))
    assert await get(again, *letters(4)) == []
    assert again.counters.evictions == {"normal": 4}


async def test_pins_end_at_the_share_of_their_tenant_and_that_is_told(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(6))
    keys = [key(name) for name in letters(6)]
    # A quarter of 16 blocks; one that is not here says nothing of the share.
    assert await tier.retain(SPEC, [*keys, key("x")], [PINNED] * 7) == [4, 5]
    assert [m.directive.kind for m in blocks_in(tier)] == ["pinned"] * 4 + ["normal"] * 2
    assert await tier.retain(SPEC, keys[4:], [msgspec.structs.replace(PINNED, tenant="other")] * 2) == []
    assert await tier.drop(SPEC, [keys[5]]) == 1


@pytest.mark.parametrize("expires_s", [1e300, float("inf"), -1e300, float("nan")])
async def test_no_expiry_is_too_far_away(tmp_path: Path, opened: Opened, expires_s: float) -> None:
    tier, _ = await opened.open(tmp_path)
    said = Directive("pinned", 1 << 70, expires_s, "tenant" * 100)
    assert await put(tier, "a", directive=said) == [True]
    await tier.close()
    again, _ = await opened.open(tmp_path)
    assert await get(again, "a") == ["a"]


async def test_writing_again_renews_the_directive_and_writes_no_data(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, "a", "b")
    told = len(heard.events)
    assert await put(tier, "a", "b", directive=PINNED) == [True, True]
    assert tier.counters.stored == 2
    assert len(heard.events) == told
    await tier.close()
    again, _ = await opened.open(tmp_path)
    assert [m.directive.kind for m in blocks_in(again)] == ["pinned", "pinned"]


async def test_neighbours_in_a_chain_are_neighbours_on_the_disk(tmp_path: Path, opened: Opened) -> None:
    class Counting(Calls):
        reads = 0

        def read(self, fd: int, into: Sequence[memoryview], at: int) -> int:
            self.reads += 1
            return super().read(fd, into, at)

    calls = Counting()
    tier, _ = await opened.open(tmp_path, calls=calls)
    await put(tier, *letters(16))
    await put(tier, *letters(8, "b"))
    calls.reads = 0
    assert await get(tier, *letters(8, "b")) == letters(8, "b")
    assert calls.reads == 2, "io_bytes is four blocks"


async def test_reads_and_writes_over_the_limit_are_misses_at_once(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    tier, _ = await opened.open(tmp_path, msgspec.structs.replace(LIMITS, max_waiting=1), calls=calls)
    await put(tier, "a")
    calls.hang = {"read", "write"}
    reading = asyncio.create_task(get(tier, "a"))
    writing = asyncio.create_task(put(tier, "b"))
    waiting = asyncio.create_task(put(tier, "c"))
    await asyncio.sleep(0)
    assert await get(tier, "a") == []
    assert await put(tier, "d") == [False]
    assert (tier.counters.misses, tier.counters.refused) == (1, 1)
    calls.release()
    assert (await reading, await writing, await waiting) == (["a"], [True], [True])
    check_slots(tier)


async def test_many_at_once_do_not_get_in_each_others_way(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path)

    async def live(name: str) -> None:
        for turn in range(15):
            names = letters(3, f"{name}{turn}-")
            assert await put(tier, *names) == [True] * 3
            assert await get(tier, *names) in (names, names[:2], names[:1], [])
            await tier.drop(SPEC, [key(names[2])])

    await asyncio.gather(*(live(name) for name in "abcd"))
    assert heard.blocks[SPEC] == set(names_in(tier))
    assert tier.counters.corrupt == 0
    check_slots(tier)


async def test_a_call_that_makes_no_sense_leaves_no_trace(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        await tier.write(SPEC, metas(["a", "b"]), [memoryview(data_of("a"))])
    check_slots(tier)
    assert heard.events == []
    assert await put(tier, "a", "b") == [True, True]


async def test_a_slot_that_is_read_is_not_given_to_others(tmp_path: Path, opened: Opened) -> None:
    calls = Calls()
    tier, _ = await opened.open(tmp_path, calls=calls)
    await put(tier, *letters(16))
    calls.hang = {"read"}
    reading = asyncio.create_task(get(tier, *letters(4)))
    await asyncio.sleep(0)
    assert await tier.drop(SPEC, [key(name) for name in letters(16)]) == 16
    assert await put(tier, *letters(16, "b")) == [True] * 12 + [False] * 4
    calls.release()
    assert await reading == letters(4)
    assert await put(tier, *letters(4, "c")) == [True] * 4
    check_slots(tier)


@pytest.mark.parametrize("call", ["open", "read"])
async def test_a_file_system_without_direct_access_will_do(tmp_path: Path, opened: Opened, call: str) -> None:
    class Buffered(Calls):
        def open(self, path: Path, flags: int) -> int:
            if call == "open" and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct access")
            return super().open(path, flags)

        def read(self, fd: int, into: Sequence[memoryview], at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct access")
            return super().read(fd, into, at)

    log = Log()
    tier, _ = await opened.open(tmp_path, calls=Buffered(), log=log)
    assert log.lines[-1][1]["direct"] is False
    await put(tier, *letters(16))
    assert await get(tier, *letters(16)) == letters(16)
    await tier.close()
    again, _ = await opened.open(tmp_path)
    assert await get(again, *letters(16)) == letters(16)


async def test_a_memory_file_system_will_do(opened: Opened) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier, _ = await opened.open(Path(directory))
        await put(tier, *letters(16))
        assert await get(tier, *letters(16)) == letters(16)
        await tier.close()


async def test_before_the_start_and_after_the_end_all_is_a_miss(tmp_path: Path, opened: Opened) -> None:
    tier, _ = opened.make(tmp_path)
    for _ in range(2):
        assert await put(tier, "a") == [False]
        assert await get(tier, "a") == []
        assert await tier.leading(SPEC, [key("a")]) == 0
        assert (await tier.drop(SPEC, [key("a")]), await tier.verify(SPEC, [key("a")])) == (0, [])
        assert not tier.usage().available
        await tier.close()


def segments_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.segment"))


def journal_bytes(directory: Path) -> int:
    return next(directory.rglob("journal")).stat().st_size


def flip(directory: Path, pattern: str, bit: int) -> None:
    path = sorted(directory.rglob(pattern))[0]
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
