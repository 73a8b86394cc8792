import asyncio
import os
import stat
from collections.abc import AsyncIterator
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
    Opened,
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
    assert [(m.parent, m.depth) for m in tier.blocks(SPEC)] == [(b"", 0), (key("a"), 1), (key("b"), 2)]
    counters = tier.counters
    assert (counters.hits, counters.misses, counters.stored) == (5, 2, 3)
    assert (counters.written_bytes, counters.read_bytes) == (3 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    usage = tier.usage()
    assert (usage.blocks, usage.used_bytes, usage.available) == (3, 3 * BLOCK_BYTES, True)
    tier.check_integrity()


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
    assert again.blocks(SPEC)[0].directive == msgspec.structs.replace(PINNED, expires_s=1e9 - 100.0 + 5.0 - 100.0)
    assert again.blocks(SPEC)[2].directive == Directive()
    assert await get(again, "a", "b", "c") == ["a", "b", "c"]
    assert await get(again, "x", "y", spec=OTHER) == ["x", "y"]
    again.check_integrity()


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
    tier.check_integrity()
    await opened.kill(tier)
    again, _ = await opened.open(tmp_path)
    assert sorted(names_in(again)) == sorted(letters(12) + letters(4, "b"))
    assert await get(again, *letters(4, "b")) == letters(4, "b")


async def test_a_batch_larger_than_the_tier_is_kept_as_far_as_it_fits(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    assert await put(tier, *letters(20)) == [True] * 16 + [False] * 4
    assert await get(tier, *letters(20)) == letters(16)
    tier.check_integrity()


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
    tier.check_integrity()


@pytest.mark.parametrize("bit", [0, 8 * 4096 + 3, 8 * BLOCK_BYTES - 1])
async def test_a_flipped_bit_is_found_on_reading_and_costs_that_block(tmp_path: Path, opened: Opened, bit: int) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, "a", "b", "c")
    flip(tmp_path, "*.segment", BLOCK_BYTES * 8 + bit)
    assert await get(tier, "a", "b", "c") == ["a"]
    assert heard.blocks[SPEC] == {"a"}
    assert tier.counters.corrupt == 1
    tier.check_integrity()
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
    assert [m.directive.kind for m in again.blocks(SPEC)] == ["pinned", "normal"]


async def test_drop_frees_children_first_and_not_what_others_hang_on(tmp_path: Path, opened: Opened) -> None:
    tier, heard = await opened.open(tmp_path)
    await put(tier, "a", "b", "c")
    await put(tier, "z", below="a")
    assert await tier.drop(SPEC, [key(name) for name in ("a", "b", "c")]) == 2
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
    tier.check_integrity()
    await tier.close()
    # Unused since the start: it gives all.
    again, heard = await opened.open(tmp_path)
    await put(again, *letters(8, "c"))
    assert heard.blocks[OTHER] == set()
    assert heard.blocks[SPEC] == {*letters(8), *letters(8, "c")}
    again.check_integrity()


async def test_a_smaller_capacity_after_a_restart_is_kept_to(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    await put(tier, *letters(16))
    await tier.close()
    again, _ = await opened.open(tmp_path, msgspec.structs.replace(LIMITS, capacity_bytes=8 * BLOCK_BYTES))
    assert len(segments_in(tmp_path)) == 1
    assert await get(again, *letters(16)) in (letters(8), [])
    again.check_integrity()


async def test_the_journal_stays_short_under_churn(tmp_path: Path, opened: Opened) -> None:
    tier, _ = await opened.open(tmp_path)
    for turn in range(220):
        await put(tier, *letters(8, f"{turn}-"))
    assert journal_bytes(tmp_path) < 1200 * 256
    await opened.kill(tier)
    again, _ = await opened.open(tmp_path)
    assert await get(again, *letters(8, "219-")) == letters(8, "219-")
    again.check_integrity()


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
    tier.check_integrity()


def segments_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.segment"))


def journal_bytes(directory: Path) -> int:
    return next(directory.rglob("journal")).stat().st_size


def flip(directory: Path, pattern: str, bit: int) -> None:
    path = sorted(directory.rglob(pattern))[0]
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
