import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvbus_transfer.backends.copy_threads import CopyThreads

INLINE_BYTES = 2 << 20


@pytest.fixture
async def threads() -> AsyncIterator[CopyThreads]:
    threads = CopyThreads("test", INLINE_BYTES)
    yield threads
    await threads.stop()


async def test_work_is_done_in_a_thread_and_what_it_raises_is_raised(threads: CopyThreads) -> None:
    assert await threads.do(threading.get_ident) != threading.get_ident()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.do(lambda: 1 // 0)
    await threads.stop()
    await threads.stop()
    assert await threads.do(threading.get_ident) == threading.get_ident(), "nothing is lost after the end"


async def test_a_cancelled_step_has_ended_when_it_ends_however_often_it_is_cancelled(threads: CopyThreads) -> None:
    began, go, told = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended: list[bool] = []

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        go.wait()
        ended.append(True)

    step = asyncio.create_task(threads.do(work, told.set))
    await began.wait()
    for _ in range(3):
        step.cancel()
        await asyncio.sleep(0)
    assert told.is_set()
    assert not step.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert ended


async def test_two_steps_go_at_a_time_and_a_third_waits(threads: CopyThreads) -> None:
    together, go = threading.Barrier(3), threading.Event()
    third = threading.Event()

    def work() -> None:
        together.wait(30)
        go.wait(30)

    steps = [asyncio.create_task(threads.do(each)) for each in (work, work, third.set)]
    await asyncio.to_thread(together.wait, 30)
    assert not third.is_set()
    go.set()
    await asyncio.gather(*steps)
    assert third.is_set()


async def test_large_reads_are_for_threads_and_medium_ones_when_they_overlap(threads: CopyThreads) -> None:
    with threads:
        assert not await threads.are_for(64 << 10)
        assert not await threads.are_for(INLINE_BYTES), "it is alone"
        assert await threads.are_for(INLINE_BYTES + 1)

    async def read() -> bool:
        with threads:
            found = await threads.are_for(INLINE_BYTES)
            await asyncio.sleep(0)
            return found

    assert all(await asyncio.gather(read(), read())), "they began in the same moment"
    with threads, threads:
        assert not await threads.are_for(64 << 10)
    with threads:
        assert not await threads.are_for(INLINE_BYTES), "alone again"
