import asyncio
import threading

import pytest

from kvbus_transfer.backends.nixl_threads import CopyThreads


def nothing() -> None:
    pass


async def test_work_is_done_in_a_thread_and_what_it_raises_is_raised() -> None:
    threads = CopyThreads()
    assert await threads.do(threading.get_ident, nothing) != threading.get_ident()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.do(lambda: 1 // 0, nothing)
    await threads.stop()
    await threads.stop()
    assert await threads.do(threading.get_ident, nothing) == threading.get_ident(), "nothing is lost after the end"


async def test_a_cancelled_step_has_ended_when_it_ends_however_often_it_is_cancelled() -> None:
    threads = CopyThreads()
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
    await threads.stop()
