import asyncio

import pytest

from kvbus_runtime.tasks import Tasks


async def forever() -> None:
    await asyncio.Event().wait()


async def test_leaving_cancels_what_still_runs() -> None:
    async with Tasks() as tasks:
        task = tasks.spawn(forever(), name="t")
    assert task.cancelled()


async def test_a_crashed_task_ends_the_body_with_its_cause() -> None:
    async def crash() -> None:
        raise LookupError("cause")

    async def body() -> None:
        async with Tasks() as tasks:
            tasks.spawn(crash(), name="t")
            await forever()

    with pytest.raises(LookupError, match="cause"):
        await body()


async def test_an_error_of_the_body_is_raised_as_it_is() -> None:
    async def body() -> None:
        async with Tasks() as tasks:
            tasks.spawn(forever(), name="t")
            raise LookupError("cause")

    with pytest.raises(LookupError, match="cause"):
        await body()


async def test_a_task_that_swallows_one_cancellation_is_cancelled_again() -> None:
    async def stubborn() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await forever()

    async with Tasks() as tasks:
        task = tasks.spawn(stubborn(), name="t")
        await asyncio.sleep(0)
    assert task.cancelled()


async def test_nothing_starts_after_the_end() -> None:
    async with Tasks() as tasks:
        pass
    assert tasks.closed
    with pytest.raises(RuntimeError, match="late"):
        tasks.spawn(forever(), name="late")
