import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_runtime.streams.stream import StepStream, StreamLost, StreamOverflow
from kvbus_wire.frontend import Delta, Ended, Started, TokenLogprob, Usage
from kvbus_wire.packing import pack_tokens, unpack_tokens

USAGE = Usage(prompt_tokens=1, output_tokens=1)
END = Ended(request_id="r", reason="stop", usage=USAGE)


def make(limit: int = 100) -> tuple[StepStream, list[str]]:
    closed: list[str] = []
    return StepStream("w", limit, lambda: closed.append("closed")), closed


def delta(start: int, *tokens: int) -> Delta:
    return Delta("r", start, pack_tokens(tokens))


async def drain(stream: StepStream) -> list[object]:
    return [item async for item in stream]


async def test_events_come_in_order_and_the_iteration_ends_behind_the_end() -> None:
    stream, closed = make()
    for item in (Started("r", 0), delta(0, 1, 2), END):
        stream.push(item)
    assert await drain(stream) == [Started("r", 0), delta(0, 1, 2), END]
    assert closed == ["closed"]
    stream.close()
    assert closed == ["closed"]


async def test_deltas_join_while_the_consumer_is_behind() -> None:
    stream, _ = make()
    stream.push(Delta("r", 0, pack_tokens([1]), (TokenLogprob(1, -1.0),)))
    stream.push(Delta("r", 1, pack_tokens([2]), (TokenLogprob(2, -2.0),)))
    stream.push(END)
    joined = Delta("r", 0, pack_tokens([1, 2]), (TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)))
    assert await drain(stream) == [joined, END]


async def test_a_waiting_consumer_is_woken() -> None:
    stream, _ = make()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.push(delta(0, 1))
    assert await waiting == delta(0, 1)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=20))
def test_repeated_output_is_trimmed_and_missing_output_is_a_loss(pieces: list[tuple[int, int]]) -> None:
    output = list(range(100, 130))
    stream, _ = make()
    known: int | None = None
    lost = False
    for start, count in pieces:
        stream.push(delta(start, *output[start : start + count]))
        if not lost and known is not None and start > known:
            lost = True
        if not lost:
            known = max(known or 0, start + count) if known is not None else start + count
    stream.push(END)

    async def read() -> tuple[list[int], bool]:
        tokens: list[int] = []
        first: int | None = None
        try:
            async for item in stream:
                if isinstance(item, Delta):
                    first = item.start if first is None else first
                    tokens += unpack_tokens(item.tokens)
        except StreamLost:
            return tokens, True
        return tokens, False

    tokens, was_lost = asyncio.run(read())
    assert was_lost == lost
    first = pieces[0][0] if pieces else 0
    assert tokens == output[first : known if known is not None else first]


async def test_more_than_the_limit_of_waiting_tokens_is_an_overflow_and_what_came_before_is_delivered() -> None:
    stream, closed = make(limit=3)
    stream.push(delta(0, 1, 2, 3))
    stream.push(delta(3, 4))
    assert await anext(stream) == delta(0, 1, 2, 3)
    with pytest.raises(StreamOverflow) as overflow:
        await anext(stream)
    assert overflow.value.limit == 3
    assert closed == ["closed"]


async def test_reading_makes_room_again() -> None:
    stream, _ = make(limit=3)
    for start in range(0, 30, 3):
        stream.push(delta(start, 1, 2, 3))
        await anext(stream)
    assert not stream.is_over


async def test_a_loss_after_the_end_changes_nothing() -> None:
    stream, _ = make()
    stream.push(END)
    stream.fail(StreamLost("w", "late"))
    assert await drain(stream) == [END]


async def test_a_lost_stream_raises_again_to_no_one_and_ends() -> None:
    stream, _ = make()
    stream.fail(StreamLost("w", "because"))
    with pytest.raises(StreamLost) as lost:
        await anext(stream)
    assert (lost.value.worker_id, lost.value.reason) == ("w", "because")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_wakes_the_consumer() -> None:
    stream, closed = make()
    waiting = asyncio.create_task(drain(stream))
    await asyncio.sleep(0)
    stream.close()
    assert await waiting == []
    assert closed == ["closed"]


async def test_what_waits_for_the_worker_is_left_when_the_stream_fails() -> None:
    stream = StepStream("w", 10, lambda: None)
    asyncio.get_running_loop().call_soon(stream.fail, StreamLost("w", "it is gone"))
    with pytest.raises(StreamLost, match="it is gone"):
        async with stream.unless_failed():
            await asyncio.Event().wait()
    with pytest.raises(StreamLost, match="it is gone"):
        async with stream.unless_failed():
            pytest.fail("it was entered")


async def test_what_does_not_fail_is_not_disturbed() -> None:
    stream = StepStream("w", 10, lambda: None)
    async with stream.unless_failed():
        await asyncio.sleep(0)
    stream.fail(StreamLost("w", "later"))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with StepStream("w", 10, lambda: None).unless_failed():
            raise TimeoutError
    with pytest.raises(asyncio.CancelledError):
        async with StepStream("w", 10, lambda: None).unless_failed():
            raise asyncio.CancelledError
