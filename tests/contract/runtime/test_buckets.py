"""Key-value buckets for values of any size on a real nats-server."""

import random
from collections.abc import AsyncIterator

import pytest

from kvbus_runtime.buckets import PART_BYTES, Bucket, BucketLimits
from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.errors import ObjectFailed
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer


@pytest.fixture
async def bus(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="one") as one:
        yield one


def bucket(bus: Bus, **limits: int) -> Bucket:
    return Bucket(bus, bus.subjects.responses_bucket, BucketLimits(**limits))


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3_000_000])
async def test_what_is_put_comes_back(bus: Bus, size: int) -> None:
    data = random.Random(size).randbytes(size)
    await bucket(bus).put("k", data)
    assert await bucket(bus).get("k") == data


async def test_a_key_that_is_not_there_is_none(bus: Bus) -> None:
    assert await bucket(bus).get("k") is None


async def test_the_newest_value_counts_whatever_its_size(bus: Bus) -> None:
    one = bucket(bus)
    for data in (b"a" * 2_000_000, b"b", b"c" * 1_500_000):
        await one.put("k", data)
        assert await one.get("k") == data


async def test_deleting_takes_all_parts_along(bus: Bus) -> None:
    one = bucket(bus)
    await one.put("k", b"a" * 2_000_000)
    await one.put("kk", b"other")
    await one.delete("k")
    await one.delete("never")
    assert await one.get("k") is None
    assert await one.get("kk") == b"other"
    assert (await one.state()).entries == 1


async def test_a_value_above_the_limit_is_refused(bus: Bus) -> None:
    one = bucket(bus, value_bytes=10)
    await one.put("k", b"x" * 10)
    with pytest.raises(ObjectFailed, match="too_large"):
        await one.put("k", b"x" * 11)


async def test_beyond_the_number_of_entries_the_oldest_go(bus: Bus) -> None:
    one = bucket(bus, entries=3)
    for key in "abcd":
        await one.put(key, key.encode())
    assert [await one.get(key) for key in "abcd"] == [None, b"b", b"c", b"d"]
    assert (await one.state()).entries == 3


async def test_beyond_the_bytes_the_oldest_go_and_a_value_without_its_parts_is_gone(bus: Bus) -> None:
    one = bucket(bus, total_bytes=3 * PART_BYTES)
    await one.put("big", b"a" * (2 * PART_BYTES))
    await one.put("next", b"b" * PART_BYTES)
    assert await one.get("big") is None
    assert await one.get("next") == b"b" * PART_BYTES
    state = await one.state()
    assert state.total_bytes <= 3 * PART_BYTES


async def test_of_several_who_create_a_key_one_succeeds(bus: Bus) -> None:
    assert await bucket(bus).create("k", b"first")
    assert not await bucket(bus).create("k", b"second")
    assert await bucket(bus).get("k") == b"first"


async def test_a_bus_that_lost_the_bucket_gets_a_new_one(namespace: str) -> None:
    with NatsServer() as server:
        async with open_bus(CommonSettings(nats=server.url, namespace=namespace), name="one") as bus:
            one = bucket(bus)
            await one.put("k", b"x")
            server.restart(wipe=True)
            assert await one.get("k") is None
            await one.put("k", b"y")
            assert await one.get("k") == b"y"


async def test_values_survive_a_restart_of_the_bus(namespace: str) -> None:
    with NatsServer() as server:
        async with open_bus(CommonSettings(nats=server.url, namespace=namespace), name="one") as bus:
            await bucket(bus).put("k", b"x" * 2_000_000)
            server.restart()
            assert await bucket(bus).get("k") == b"x" * 2_000_000
