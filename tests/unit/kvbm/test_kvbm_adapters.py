import asyncio
import os
import stat
from pathlib import Path
from unittest import mock

import pytest

from kvbus_kvbm.adapters import probe
from kvbus_kvbm.adapters.arenas import Arenas, check_place
from kvbus_kvbm.adapters.wakeups import Wakeups
from kvbus_kvbm.core.errors import NoRoomForPool
from kvbus_kvbm.core.pools import Plan, PoolSpec
from kvbus_runtime.settings import BadSettings
from kvbus_transfer import Arena, ArenaNoRoom

PLAN = Plan("pool1", PoolSpec("m", "l", 64, 16), 4)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def test_an_arena_is_named_after_its_owner_and_removed_at_the_end(tmp_path: Path) -> None:
    arenas = Arenas(str(tmp_path), "my/space", "kvbm-1", str(os.getegid()))
    path = Path(await arenas.create(PLAN))
    assert path == tmp_path / "kvbus-my%2Fspace-kvbm-1-pool1.arena"
    assert modes(tmp_path) == {path.name: 0o660}
    assert await Arenas(str(tmp_path), "other", "kvbm-2", "").sweep() == []
    await arenas.close()
    await arenas.close()
    assert modes(tmp_path) == {}


async def test_a_dead_owners_arena_is_swept(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "kvbus-default-dead-pool9.arena", 64, 4)
    arena.close()  # as the end of its process would
    assert await Arenas(str(tmp_path), "other", "kvbm-2", "").sweep() == [arena.path]


async def test_an_arena_that_is_made_while_kvbm_closes_is_removed(tmp_path: Path) -> None:
    arenas = Arenas(str(tmp_path), "default", "kvbm-1", "")
    await arenas.close()
    await arenas.create(PLAN)
    assert modes(tmp_path) == {}


async def test_a_file_system_without_room_is_a_refusal_that_says_what_to_do(tmp_path: Path) -> None:
    arenas = Arenas(str(tmp_path), "default", "kvbm-1", "")
    full = ArenaNoRoom(tmp_path, "full", 256)
    with mock.patch.object(Arena, "create", side_effect=full), pytest.raises(NoRoomForPool) as caught:
        await arenas.create(PLAN)
    assert "g2_bytes" in str(caught.value)
    assert caught.value.details == {"wanted_bytes": 256}
    (tmp_path / "kvbus-default-kvbm-1-pool1.arena").write_bytes(b"")
    with pytest.raises(NoRoomForPool):
        await arenas.create(PLAN)


def test_long_names_fit_into_a_file_name(tmp_path: Path) -> None:
    path = Arenas(str(tmp_path), "n" * 400, "kvbm-1", "").path("pool1")
    assert len(path.name) == 255
    assert path.name.endswith("-pool1.arena")


def test_a_bad_place_is_a_bad_setting(tmp_path: Path) -> None:
    for directory, group in ((str(tmp_path / "missing"), ""), (str(tmp_path), "no-such-group-here")):
        with pytest.raises(BadSettings):
            check_place(directory, group)
    assert check_place(str(tmp_path), "root") == (tmp_path, 0)


def test_the_probe_takes_the_best_round() -> None:
    ticks = iter([0.0, 4.0, 10.0, 11.0, 20.0, 22.0])
    assert probe.onboard_bytes_per_s(lambda: next(ticks)) == 4 << 20
    assert probe.onboard_bytes_per_s() > 0


class Ticker:
    """Something that is due at given times."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        self.runs = asyncio.Queue[float]()

    def next_due_s(self) -> float | None:
        return self.due_s

    def run(self) -> None:
        self.due_s = None
        self.runs.put_nowait(asyncio.get_running_loop().time())


async def test_the_timer_runs_what_is_due_and_sleeps_while_nothing_is() -> None:
    ticker = Ticker()
    with mock.patch("kvbus_kvbm.adapters.wakeups._MIN_WAIT_S", 0.01):
        wakeups = Wakeups(ticker.next_due_s, ticker.run)
        task = asyncio.create_task(wakeups.run_forever())
        now_s = asyncio.get_running_loop().time()
        ticker.due_s = now_s + 3600
        wakeups.changed()
        await asyncio.sleep(0)
        ticker.due_s = now_s + 0.02
        wakeups.changed()
        assert await asyncio.wait_for(ticker.runs.get(), 10) >= now_s + 0.02
        ticker.due_s = now_s  # long past
        wakeups.changed()
        await asyncio.wait_for(ticker.runs.get(), 10)
        assert ticker.runs.empty()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
