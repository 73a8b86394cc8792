import asyncio
import mmap
import threading

import pytest

from kvbus_kvbm.adapters.disk.lane import Lane
from kvbus_kvbm.adapters.disk.threads import Buffer, IoThreads, copy


def test_threads_do_not_keep_the_process_alive_and_end_when_told() -> None:
    threads = IoThreads("t", 2)
    release = threading.Event()
    hanging = threads.submit(lambda _: release.wait())
    assert threads.submit(lambda _: threading.current_thread().daemon).result(10)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda _: 1 // 0).result(10)
    threads.stop()
    release.set()
    assert hanging.result(10)


def test_a_buffer_grows_and_is_aligned() -> None:
    buffer = Buffer()
    assert len(buffer.view(10)) == 10
    assert len(buffer.view(mmap.PAGESIZE * 3)) == mmap.PAGESIZE * 3
    assert len(buffer.view(5)) == 5


@pytest.mark.parametrize("data", [memoryview(b"abc"), memoryview(bytearray(b"abc"))])
def test_copying_takes_any_memory(data: memoryview) -> None:
    into = bytearray(5)
    copy(memoryview(into)[1:4], data)
    assert into == b"\0abc\0"


async def test_a_lane_is_given_on_in_order_and_only_so_many_wait() -> None:
    lane = Lane(max_waiting=2)
    assert lane.try_enter()
    order: list[int] = []

    async def pass_through(number: int) -> None:
        assert await lane.enter(10.0)
        order.append(number)
        lane.leave()

    tasks = [asyncio.create_task(pass_through(number)) for number in range(2)]
    await asyncio.sleep(0)
    assert not await lane.enter(10.0)
    lane.leave()
    await asyncio.gather(*tasks)
    assert order == [0, 1]
    assert lane.try_enter()


async def test_who_waits_too_long_or_is_cancelled_leaves_the_lane_to_others() -> None:
    lane = Lane(max_waiting=8)
    assert lane.try_enter()
    assert not await lane.enter(0.0)
    waiting = asyncio.create_task(lane.enter(10.0))
    given = asyncio.create_task(lane.enter(10.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    lane.leave()
    given.cancel()  # it has the lane already, and cannot know
    with pytest.raises(asyncio.CancelledError):
        await given
    assert waiting.cancelled()
    assert lane.try_enter()
