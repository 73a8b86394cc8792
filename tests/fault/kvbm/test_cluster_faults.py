"""G4 when its store hangs, fails, is full, or goes away: bypassed within a deadline, and used again when it is back."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.cluster.directory import DirectoryStore
from kvbus_kvbm.adapters.cluster.s3 import S3Bucket
from kvbus_kvbm.adapters.cluster.store import StoreFailed
from kvbus_kvbm.core.errors import StorageRefused
from kvbus_testkit.kvbm import STREAM_BYTES, by_hand, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.s3_server import BUCKET, S3Server
from kvbus_testkit.timing import eventually
from kvbus_wire.kv_tools import DescribedTiers, DescribeTiers
from tests.contract.kvbm.cluster_kit import SPEC, Host, host, names


class AilingStore:
    """A directory that has the trouble a test wants: ``trouble`` of writing, deleting or all: hang, fail, full or break."""

    def __init__(self, folder: Path) -> None:
        self._real = DirectoryStore(folder, 4)
        self.place = self._real.place
        self.trouble: dict[str, str] = {}
        self.asked = 0

    async def _suffer(self, call: str) -> None:
        self.asked += 1
        match self.trouble.get(call) or self.trouble.get("all"):
            case "hang":
                await asyncio.Event().wait()
            case "fail":
                raise StoreFailed("it does not work")
            case "full":
                raise StoreFailed("no room", full=True)
            case "refuse":
                raise StoreFailed("not for you", refused=True)
            case "break":
                raise MemoryError

    async def put(self, name: str, data: bytes | bytearray) -> None:
        await self._suffer("put")
        await self._real.put(name, data)

    async def get(self, name: str, limit_bytes: int) -> memoryview | None:
        await self._suffer("get")
        return await self._real.get(name, limit_bytes)

    async def size(self, name: str) -> int | None:
        await self._suffer("size")
        return await self._real.size(name)

    async def delete(self, names: Sequence[str]) -> None:
        await self._suffer("delete")
        await self._real.delete(names)

    async def names(self, prefix: str) -> list[str]:
        await self._suffer("names")
        return await self._real.names(prefix)

    async def close(self) -> None:
        await self._real.close()


QUICK: dict[str, Any] = {"rest_s": 0.05, "flush_s": 0.02}
SHORT: dict[str, Any] = {**QUICK, "read_deadline_s": 1.0, "write_deadline_s": 1.0}
"""Long enough for a store that works, on a busy machine, too."""


@pytest.fixture
def store(tmp_path: Path) -> AilingStore:
    return AilingStore(tmp_path / "store")


@pytest.mark.parametrize("trouble", ["hang", "fail", "break"])
async def test_a_store_in_trouble_is_a_miss_then_left_alone_then_used_again(store: AilingStore, trouble: str) -> None:
    async with host(store, **(SHORT if trouble == "hang" else QUICK)) as a:
        assert all(await a.write(names("x", 3)))
        store.trouble["all"] = trouble
        for _ in range(4):
            assert await a.read(names("x", 3)) == []
            assert await a.tier.leading(SPEC, [key("y0")]) == 0
            assert await a.write(names("y", 3)) == [False] * 3
        assert not a.tier.usage().available
        assert a.tier.counters.failures > 0
        store.trouble.clear()

        async def works() -> bool:
            return await a.read(names("x", 3)) == names("x", 3) and all(await a.write(names("z", 2)))

        await until(works, a)
        assert a.told == {key(name) for name in [*names("x", 3), *names("z", 2)]}


async def until(works: Callable[[], Awaitable[bool]], a: Host) -> None:
    async def checked() -> bool | None:
        return await works()

    condition: Callable[[], bool | Awaitable[bool | None] | None] = checked
    await eventually(condition)
    await eventually(lambda: a.tier.usage().available)


async def test_while_it_is_left_alone_nobody_asks_it(store: AilingStore) -> None:
    async with host(store, **{**SHORT, "rest_s": 1000.0}) as a:
        store.trouble["all"] = "hang"
        await a.read(["x"])
        asked = store.asked
        for _ in range(100):
            assert await a.read(["x"]) == []
            assert await a.tier.leading(SPEC, [key("x")]) == 0
        assert store.asked == asked
        store.trouble.clear()


async def test_a_full_store_is_read_and_older_blocks_make_room(store: AilingStore) -> None:
    async with host(store, **QUICK) as a:
        await a.write(names("x", 6))
        store.trouble["put"] = "full"
        assert await a.write(names("y", 2)) == [False] * 2
        assert await a.read(["x0"]) == ["x0"]
        assert a.told < {key(name) for name in names("x", 6)}
        assert sum(a.tier.counters.evictions.values()) == 2
        store.trouble.clear()

        async def works() -> bool:
            return all(await a.write(names("y", 2)))

        await until(works, a)


async def test_deletions_are_neither_forgotten_nor_tried_for_ever(store: AilingStore) -> None:
    async with host(store, blocks=3, **QUICK) as a:
        await a.write(names("x", 3))
        store.trouble["delete"] = "fail"
        await a.tier.drop(SPEC, [key(name) for name in names("x", 3)])
        assert len(await store.names("v1/blocks/")) == 3
        store.trouble.clear()

        async def are_gone() -> bool:
            return not await store.names("v1/blocks/")

        await until(are_gone, a)
        await a.write(names("y", 3))
        store.trouble["delete"] = "fail"
        await a.tier.drop(SPEC, [key(name) for name in names("y", 3)])
        await eventually(lambda: not a.tier._state.doomed, what="it is given up")
        store.trouble.clear()


async def test_a_store_that_is_away_at_the_start_is_used_when_it_comes(tmp_path: Path, store: AilingStore) -> None:
    async with host(AilingStore(tmp_path / "store")) as a:
        await a.write(names("x", 3))
    store.trouble["all"] = "fail"
    async with host(store, **QUICK) as a:
        assert not a.tier.usage().available
        assert a.told == set()
        store.trouble.clear()
        await eventually(lambda: a.told == {key(name) for name in names("x", 3)}, what="it knows its blocks again")


async def test_a_store_that_refuses_us_ends_the_start(store: AilingStore) -> None:
    store.trouble["names"] = "refuse"
    with pytest.raises(StorageRefused, match="not for you"):
        async with host(store):
            pass


async def test_a_directory_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StorageRefused, match="Not a directory"):
        async with host(DirectoryStore(tmp_path / "file" / "store", 2)):
            pass


async def test_a_write_that_is_cancelled_uses_nothing_of_the_caller_and_what_it_left_is_deleted(
    store: AilingStore,
) -> None:
    async with host(store, **{**QUICK, "write_deadline_s": 1000.0}) as a:
        store.trouble["put"] = "hang"
        a.tier._is_recovered = True
        write = asyncio.create_task(a.write(names("x", 3)))
        await eventually(lambda: a.tier.usage().blocks == 3)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        store.trouble.clear()
        assert a.tier.usage().blocks == 0
        assert all(await a.write(names("x", 3)))


async def test_a_lease_far_in_the_future_is_no_trouble(tmp_path: Path, store: AilingStore) -> None:
    async with host(AilingStore(tmp_path / "store")) as a:
        assert await a.write(["x"], Directive("pinned", expires_s=1e300)) == [True]
        assert await a.tier.retain(SPEC, [key("x")], [Directive("pinned", expires_s=1e300)]) == []
        assert await a.read(["x"]) == ["x"]
    async with host(store) as a:
        assert a.told == {key("x")}


async def test_calls_that_hang_in_the_file_system_are_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = DirectoryStore(folder, 1)
    await store.put("v1/blocks/x", b"x")
    (folder / "v1/blocks/x").unlink()
    os.mkfifo(folder / "v1/blocks/x")  # opening it for reading waits for a writer, for ever
    tasks = [asyncio.create_task(store.get("v1/blocks/x", 10)) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(StoreFailed, match="64 calls hang"):
        await store.size("v1/blocks/y")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    async def is_free() -> bool | None:
        try:
            return await store.size("v1/blocks/y") is None
        except StoreFailed:
            return False

    condition: Callable[[], bool | Awaitable[bool | None] | None] = is_free
    writer = os.open(folder / "v1/blocks/x", os.O_RDWR)
    try:
        await eventually(condition)
    finally:
        os.close(writer)
    await store.close()


async def test_an_s3_server_that_answers_nobody_is_bypassed_and_used_again(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    async with host(S3Bucket(f"s3://{BUCKET}/dead", 10.0)) as a:
        assert all(await a.write(names("x", 3)))
    async with host(S3Bucket(f"s3://{BUCKET}/dead", 2.0), **SHORT) as a:
        await eventually(lambda: a.told == {key(name) for name in names("x", 3)}, what="it knows its blocks again")
        s3_server.pause()
        try:
            assert await a.read(names("x", 3)) == []
            assert await a.write(names("y", 3)) == [False] * 3
            assert not a.tier.usage().available
        finally:
            s3_server.resume()

        async def works() -> bool:
            return await a.read(names("x", 3)) == names("x", 3) and all(await a.write(names("y", 3)))

        await until(works, a)


async def test_s3_without_the_right_credentials_or_bucket_ends_the_start(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageRefused, match=r"g4_url: s3://nowhere/p: .*404 Not Found"):
        async with host(S3Bucket("s3://nowhere/p", 5.0)):
            pass
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageRefused, match=r"g4_url: s3://blocks/p: .*403 Forbidden"):
        async with host(S3Bucket(f"s3://{BUCKET}/p", 5.0)):
            pass


async def test_nothing_listens_where_s3_should_be(monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    async with host(S3Bucket(f"s3://{BUCKET}/p", 0.5), **QUICK) as a:
        assert await a.read(["x"]) == []
        assert await a.write(["x"]) == [False]
        assert not a.tier.usage().available


async def test_kvbm_killed_while_it_writes_leaves_nothing_that_its_next_life_does_not_count(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    flags = {
        "--nats": nats_server.url,
        "--namespace": namespace,
        "--instance-id": "k1",
        "--host-id": "host-1",
        "--arena-dir": str(tmp_path),
        "--g2-bytes": str(256 * 1024),
        "--lease-ttl-s": "2",
        "--kv-stream-max-bytes": str(STREAM_BYTES),
        "--g4-url": f"file://{tmp_path}/store",
        "--g4-bytes": str(1 << 20),
        "--g4-parallel": "2",
        "--tier-gather-s": "0",
    }
    arguments = [word for pair in flags.items() for word in pair]
    objects = tmp_path / "store" / "v1" / "blocks"

    def count() -> int:
        return sum(file.is_file() and not file.name.startswith(".") for file in objects.rglob("*"))

    with ServiceProcess("kvbus_kvbm", arguments) as kvbm:
        kvbm.wait_ready()
        async with by_hand(nats_server.url, namespace, "worker-a", "k1") as worker:
            await worker.attach()
            for chain in range(6):
                await worker.offload(names(f"{chain}-", 30))
            await eventually(lambda: count() > 0, what="the first objects")
            kvbm.kill()
    left = count()
    assert left > 0
    with ServiceProcess("kvbus_kvbm", arguments) as kvbm:
        kvbm.wait_ready()
        async with by_hand(nats_server.url, namespace, "worker-b", "k1") as worker:
            bus = worker.service.bus
            told: DescribedTiers = await bus.request(
                bus.subjects.control("k1"), DescribeTiers(), DescribedTiers, timeout_s=10
            )
            assert {tier.tier: tier.blocks for tier in told.tiers} == {"g2": 0, "g4": left}
