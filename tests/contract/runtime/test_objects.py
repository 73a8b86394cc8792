"""Objects by content hash on a real nats-server."""

import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.errors import ObjectFailed
from kvbus_runtime.object_bucket import CHUNK_BYTES, ObjectBucket
from kvbus_runtime.objects import ObjectStore
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer


@pytest.fixture
async def bus(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    async with open_bus(CommonSettings(nats=nats_server.url, namespace=namespace), name="one") as one:
        yield one


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_000])
async def test_what_is_put_comes_back(bus: Bus, size: int) -> None:
    data = random.Random(size).randbytes(size)
    store = ObjectStore(bus)
    assert not await store.exists(named(data))
    await store.put(named(data), data)
    assert await store.exists(named(data))
    assert await ObjectStore(bus).get(named(data)) == data


async def test_putting_again_stores_nothing_more(bus: Bus) -> None:
    store = ObjectStore(bus)
    await store.put(named(b"x"), b"x")
    before = await jetstream.stream_info(bus, f"OBJ_{bus.subjects.models_bucket}")
    await store.put(named(b"x"), b"x")
    assert await jetstream.stream_info(bus, f"OBJ_{bus.subjects.models_bucket}") == before


async def test_a_missing_object_is_told(bus: Bus) -> None:
    store = ObjectStore(bus)
    with pytest.raises(ObjectFailed) as before_any:
        await store.get("00")
    await store.put(named(b"x"), b"x")
    with pytest.raises(ObjectFailed) as failure:
        await store.get("00")
    assert before_any.value.reason == failure.value.reason == "missing"


async def test_a_name_that_is_not_the_hash_is_refused(bus: Bus) -> None:
    with pytest.raises(ObjectFailed) as failure:
        await ObjectStore(bus).put("name", b"x")
    assert failure.value.reason == "corrupt"


async def test_size_limits_hold_on_both_sides(bus: Bus) -> None:
    data = bytes(2000)
    await ObjectStore(bus, max_bytes=2000).put(named(data), data)
    assert await ObjectStore(bus, max_bytes=2000).get(named(data)) == data
    with pytest.raises(ObjectFailed) as putting:
        await ObjectStore(bus, max_bytes=1999).put(named(data), data)
    with pytest.raises(ObjectFailed) as getting:
        await ObjectStore(bus).get(named(data), max_bytes=1999)
    assert putting.value.reason == getting.value.reason == "too_large"


async def test_changed_content_is_found_out(bus: Bus) -> None:
    store = ObjectStore(bus)
    data = random.Random(1).randbytes(10)
    await store.put(named(data), data)
    stream = f"OBJ_{bus.subjects.models_bucket}"
    meta = await jetstream.last_message(bus, stream, f"$O.{bus.subjects.models_bucket}.M.>")
    chunk = await jetstream.next_message(bus, stream, f"$O.{bus.subjects.models_bucket}.C.>", 1)
    assert meta is not None
    assert chunk is not None
    await jetstream.call(bus, f"STREAM.PURGE.{stream}", {"filter": chunk.subject})
    with pytest.raises(ObjectFailed) as gone:
        await store.get(named(data))
    await jetstream.publish(bus, chunk.subject, b"0123456789", {})
    with pytest.raises(ObjectFailed) as changed:
        await store.get(named(data))
    assert (gone.value.reason, changed.value.reason) == ("missing", "corrupt")


async def test_other_clients_can_read_the_bucket(bus: Bus, nats_server: NatsServer) -> None:
    import nats

    data = random.Random(2).randbytes(300_000)
    await ObjectStore(bus).put(named(data), data)
    client = await nats.connect(nats_server.url)
    try:
        bucket = await client.jetstream().object_store(bus.subjects.models_bucket)
        assert (await bucket.get(named(data))).data == data
    finally:
        await client.close()


async def test_versions_come_newest_first_and_a_removed_one_leaves_nothing(bus: Bus) -> None:
    bucket = ObjectBucket(
        bus, f"versions_{bus.subjects.namespace}", max_bytes=1 << 20, store_bytes=1 << 22, max_age_s=60.0
    )
    assert await bucket.newest() == []
    for name in ("b", "a", "c"):
        await bucket.put(name, name.encode() * 200_000)
    versions = await bucket.newest()
    assert [version.name for version in versions] == ["c", "a", "b"]
    await bucket.remove(versions[1])
    assert [version.name for version in await bucket.newest()] == ["c", "b"]
    with pytest.raises(ObjectFailed) as gone:
        await bucket.get("a")
    assert gone.value.reason == "missing"
    assert await bucket.get("b") == b"b" * 200_000
    info = await jetstream.stream_info(bus, f"OBJ_versions_{bus.subjects.namespace}")
    assert info is not None
    assert info.state.messages == 2 * (1 + 2)


async def test_a_full_bucket_gives_up_its_oldest_and_that_is_found_out(bus: Bus) -> None:
    bucket = ObjectBucket(bus, f"full_{bus.subjects.namespace}", max_bytes=1 << 20, store_bytes=500_000)
    for name in ("old", "new"):
        await bucket.put(name, bytes(300_000))
    assert await bucket.get("new") == bytes(300_000)
    with pytest.raises(ObjectFailed):
        await bucket.get("old")
