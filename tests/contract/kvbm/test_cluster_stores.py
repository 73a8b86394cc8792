"""What every store of the cluster does."""

import asyncio
from collections.abc import Callable

import pytest

from kvbus_kvbm.adapters.cluster.store import ClusterStore

NAME = "v1/blocks/00ff/ab/abcdef"


async def test_what_was_put_is_read_whole_and_another_host_sees_it(open_store: Callable[[], ClusterStore]) -> None:
    one, other = open_store(), open_store()
    data = bytes(range(256)) * 9000
    await one.put(NAME, data)
    got = await other.get(NAME, len(data))
    assert got is not None
    assert bytes(got) == data
    assert await other.size(NAME) == len(data)


async def test_an_empty_object_is_there(store: ClusterStore) -> None:
    await store.put(NAME, b"")
    got = await store.get(NAME, 10)
    assert got is not None
    assert len(got) == 0
    assert await store.size(NAME) == 0


async def test_what_is_not_there_is_no_failure(store: ClusterStore) -> None:
    assert await store.get(NAME, 10) is None
    assert await store.size(NAME) is None
    assert await store.names("v1/blocks/") == []
    await store.delete([NAME])


async def test_a_second_put_takes_the_place_of_the_first(store: ClusterStore) -> None:
    await store.put(NAME, b"longer than the second")
    await store.put(NAME, b"second")
    got = await store.get(NAME, 100)
    assert got is not None
    assert bytes(got) == b"second"


async def test_of_an_object_that_is_too_long_one_byte_more_than_wanted_is_read(store: ClusterStore) -> None:
    await store.put(NAME, b"0123456789")
    got = await store.get(NAME, 4)
    assert got is not None
    assert bytes(got[:5]) == b"01234"


async def test_deleting_takes_those_that_are_there(store: ClusterStore) -> None:
    names = [f"v1/blocks/00/{i:02x}/{i:032x}" for i in range(20)]
    await asyncio.gather(*(store.put(name, b"x") for name in names))
    await store.delete([*names[:15], "v1/blocks/00/ee/never"])
    assert await store.names("v1/blocks/") == names[15:]


async def test_names_come_in_order_and_of_the_prefix_only(store: ClusterStore) -> None:
    for name in ("v1/owners/ab/2", "v1/owners/ab/10", "v1/owners/ab/1", "v1/owners/abc/1", "v1/blocks/1"):
        await store.put(name, b"x")
    assert await store.names("v1/owners/ab/") == ["v1/owners/ab/1", "v1/owners/ab/10", "v1/owners/ab/2"]


async def test_writers_of_one_name_leave_one_of_their_objects_whole(open_store: Callable[[], ClusterStore]) -> None:
    stores = [open_store() for _ in range(4)]
    versions = [bytes([i]) * 100_000 for i in range(4)]
    await asyncio.gather(*(s.put(NAME, v) for s, v in zip(stores, versions, strict=True) for _ in range(3)))
    got = await stores[0].get(NAME, 100_000)
    assert got is not None
    assert bytes(got) in versions


async def test_a_cancelled_call_leaves_the_store_usable(store: ClusterStore) -> None:
    for _ in range(10):
        call = asyncio.create_task(store.put(NAME, b"x" * 1_000_000))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await store.put(NAME, b"after")
    assert await store.size(NAME) in (5, 1_000_000)  # what was begun may end later
