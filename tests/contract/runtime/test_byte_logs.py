"""Logs of bytes on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.byte_logs import PART_BYTES, ByteLogs, LogLimits
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer


@pytest.fixture
async def bus(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="one") as one:
        yield one


def logs(bus: Bus, total_bytes: int = 1 << 30) -> ByteLogs:
    limits = LogLimits(total_bytes=total_bytes, age_s=60.0)
    return ByteLogs(bus, bus.subjects.response_events_stream, bus.subjects.response_events, limits)


async def everything(log: ByteLogs, name: str) -> bytes:
    async with aclosing(log.follow(name, idle_s=60.0)) as pieces:
        return b"".join([piece.data async for piece in pieces if piece is not None])


async def test_a_finished_log_is_read_from_its_beginning(bus: Bus) -> None:
    writer = logs(bus)
    await writer.append("a", b"one ")
    await writer.append("b", b"not this")
    await writer.append("a", b"two", last=True)
    assert await everything(logs(bus), "a") == b"one two"


async def test_a_log_is_followed_while_it_is_written(bus: Bus) -> None:
    writer = logs(bus)
    async with aclosing(logs(bus).follow("a", idle_s=60.0)) as pieces:
        for word, last in ((b"one", False), (b"two", False), (b"", True)):
            await writer.append("a", word, last=last)
            piece = await anext(pieces)
            assert piece is not None
            assert (piece.data, piece.last) == (word, last)
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)


async def test_a_deleted_log_begins_again(bus: Bus) -> None:
    writer = logs(bus)
    await writer.delete("a")
    await writer.append("a", b"old", last=True)
    await writer.append("b", b"other", last=True)
    await writer.delete("a")
    await writer.append("a", b"new", last=True)
    assert await everything(logs(bus), "a") == b"new"
    assert await everything(logs(bus), "b") == b"other"


async def test_a_large_piece_comes_whole(bus: Bus) -> None:
    data = b"x" * (2 * PART_BYTES + 1)
    await logs(bus).append("a", data, last=True)
    assert await everything(logs(bus), "a") == data


async def test_whoever_waits_is_told_that_nothing_has_come(bus: Bus) -> None:
    async with aclosing(logs(bus).follow("a", idle_s=0.01)) as pieces:
        assert await anext(pieces) is None


async def test_beyond_the_bytes_the_oldest_pieces_go(bus: Bus) -> None:
    writer = logs(bus, total_bytes=2 * PART_BYTES)
    for letter in (b"a", b"b", b"c"):
        await writer.append("a", letter * (PART_BYTES // 2))
    await writer.append("b", b"d" * PART_BYTES, last=True)
    await writer.append("a", b"end", last=True)
    kept = await everything(logs(bus, total_bytes=2 * PART_BYTES), "a")
    assert kept.endswith(b"end")
    assert not kept.startswith(b"a")


async def test_a_reader_lives_through_an_outage(namespace: str) -> None:
    with NatsServer() as server:
        async with open_bus(CommonSettings(nats=server.url, namespace=namespace), name="one") as bus:
            writer = logs(bus)
            await writer.append("a", b"one ")
            reading = asyncio.create_task(everything(logs(bus), "a"))
            await asyncio.sleep(0)
            server.restart()
            await writer.append("a", b"two", last=True)
            assert await reading == b"one two"
