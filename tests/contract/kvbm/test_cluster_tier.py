"""G4 over each kind of store."""

import asyncio
from collections.abc import Awaitable, Callable

from kvbus_blocks.retention import Directive
from kvbus_kvbm.adapters.cluster.store import ClusterStore
from kvbus_kvbm.core.cluster_objects import HEADER_BYTES, layout_tag, object_name
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_testkit.kvbm import key
from kvbus_testkit.timing import eventually
from tests.contract.kvbm.cluster_kit import ONE, SPEC, Host, chain, host, lies_there, names


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async def checked() -> bool | None:
        return await check()

    condition: Callable[[], bool | Awaitable[bool | None] | None] = checked
    await eventually(condition)


async def test_another_host_finds_and_reads_what_one_has_written(open_store: Callable[[], ClusterStore]) -> None:
    async with host(open_store(), "a") as a, host(open_store(), "b") as b:
        told = names("x", 40)
        assert await a.write(told) == [True] * 40
        assert a.told == {key(name) for name in told}
        for asked in (0, 1, 2, 7, 39, 40):
            assert await b.tier.leading(SPEC, [key(name) for name in told[:asked]]) == asked
        longer = [*told[:23], *names("other", 30)]
        assert await b.tier.leading(SPEC, [key(name) for name in longer]) == 23
        assert await b.read(longer) == told[:23]
        assert b.told == {key(name) for name in told[:23]}
        assert b.tier.counters.hits == 23
        assert b.tier.counters.corrupt == 0


async def test_an_empty_store_answers_with_one_question(store: ClusterStore) -> None:
    async with host(store) as a:
        assert await a.tier.leading(SPEC, [key(name) for name in names("x", 1000)]) == 0
        assert await a.read(["x0"]) == []
        assert a.tier.counters.misses == 1


async def test_two_hosts_write_the_same_blocks_at_the_same_time(open_store: Callable[[], ClusterStore]) -> None:
    async with host(open_store(), "a") as a, host(open_store(), "b") as b:
        told = names("x", 20)
        done = await asyncio.gather(a.write(told), b.write(told))
        assert list(done) == [[True] * 20] * 2
        assert await a.read(told) == await b.read(told) == told


async def test_what_another_host_has_written_is_not_written_again_and_not_deleted_with_ours(
    open_store: Callable[[], ClusterStore],
) -> None:
    async with host(open_store(), "a") as a, host(open_store(), "b", blocks=4) as b:
        await a.write(names("x", 3))
        assert await b.write(names("x", 3)) == [True] * 3
        assert await b.write(names("y", 4)) == [True] * 4  # b forgets x
        assert b.told == {key(name) for name in names("y", 4)}
        assert await a.read(names("x", 3)) == names("x", 3)


async def test_a_flipped_byte_anywhere_is_a_miss_and_the_object_goes(store: ClusterStore) -> None:
    async with host(store) as a:
        for at in (0, 9, 60, HEADER_BYTES - 1, HEADER_BYTES, ONE - 1):
            await a.write(["x", "y"])
            name = object_name(layout_tag(SPEC), key("x"))
            data = await store.get(name, ONE)
            assert data is not None
            damaged = bytearray(data)
            damaged[at] ^= 1
            await store.put(name, damaged)
            before = a.tier.counters.corrupt
            assert await a.read(["x", "y"]) == []
            assert a.tier.counters.corrupt == before + 1
            assert a.told == set()
            await is_deleted(store, name)


async def is_deleted(store: ClusterStore, name: str) -> None:
    async def is_gone() -> bool:
        return await store.size(name) is None

    await until(is_gone)


async def test_objects_cut_short_grown_or_under_another_name_are_misses(store: ClusterStore) -> None:
    async with host(store) as a:
        await a.write(["x"])
        whole = await store.get(object_name(layout_tag(SPEC), key("x")), ONE)
        assert whole is not None
        wrong = {"cut": whole[:-1], "short": whole[:100], "empty": b"", "grown": bytes(whole) + b"x", "renamed": whole}
        for name, data in wrong.items():
            await store.put(object_name(layout_tag(SPEC), key(name)), bytes(data))
            assert await a.read([name]) == []
        assert a.tier.counters.corrupt == len(wrong)
        assert await a.read(["x"]) == ["x"]


async def test_scrubbing_names_and_drops_what_does_not_hold(store: ClusterStore) -> None:
    async with host(store) as a:
        told = names("x", 6)
        await a.write(told)
        name = object_name(layout_tag(SPEC), key("x4"))
        await store.put(name, b"damaged")
        await store.delete([object_name(layout_tag(SPEC), key("x2"))])
        keys = [key(name) for name in told]
        assert await a.tier.verify(SPEC, keys) == [key("x2"), key("x4")]
        assert a.told == {key("x0"), key("x1")}
        assert await a.tier.verify(SPEC, keys[:2]) == []


async def test_it_never_takes_more_room_than_it_may_and_leaves_go_first(store: ClusterStore) -> None:
    async with host(store, blocks=10) as a:
        for turn in range(5):
            assert await a.write(["root", *names(f"t{turn}-", 5)]) == [True] * 6
            assert a.tier.usage().used_bytes <= 10 * ONE
        assert key("root") in a.told
        assert a.tier.counters.evictions == {"normal": 16}
        kept = [n for t in range(5) for n in names(f"t{t}-", 5) if key(n) in a.told]
        assert await a.read(["root", *names("t4-", 5)]) == ["root", *names("t4-", 5)]
        objects = await store.names("v1/blocks/")
        assert len(objects) == 1 + len(kept) == 10


async def test_a_batch_larger_than_the_tier_is_written_as_far_as_it_fits(store: ClusterStore) -> None:
    async with host(store, blocks=4) as a:
        done = await a.write(names("x", 10))
        assert done == [True] * 4 + [False] * 6
        assert a.told == {key(name) for name in names("x", 4)}
        assert a.tier.counters.refused == 6


async def test_a_block_larger_than_the_tier_is_refused(store: ClusterStore) -> None:
    async with host(store, blocks=1) as a:
        await a.write(["x"])
        large = PoolSpec("large", "layout", 50_000, 16)
        meta = BlockMeta(key("big"), b"", 0, 0)
        assert await a.tier.write(large, [meta], [memoryview(bytes(50_000))]) == [False]
        assert await a.read(["x"]) == ["x"]


async def test_ephemeral_blocks_never_go_there(store: ClusterStore) -> None:
    async with host(store) as a:
        assert await a.write(["x"], Directive("ephemeral")) == [False]
        assert await store.names("v1/blocks/") == []


async def test_pinned_blocks_stay_within_the_tenants_share_and_the_rest_is_reported(store: ClusterStore) -> None:
    async with host(store, blocks=12, pin_share=0.25) as a:
        lease = Directive("pinned", expires_s=1e12, tenant="t")
        await a.write(names("p", 5))
        keys = [key(name) for name in names("p", 5)]
        assert await a.tier.retain(SPEC, keys, [lease] * 5) == [3, 4]
        for turn in range(4):
            await a.write(names(f"t{turn}-", 9))
        assert {key(name) for name in names("p", 3)} <= a.told


async def test_a_restart_knows_its_blocks_and_their_leases(open_store: Callable[[], ClusterStore]) -> None:
    lease = Directive("pinned", priority=3, expires_s=1e12, tenant="t")
    async with host(open_store(), blocks=20) as a:
        await a.write(names("x", 6))
        await a.tier.retain(SPEC, [key("x0"), key("x1")], [lease] * 2)
    async with host(open_store(), blocks=20) as a:
        assert a.told == {key(name) for name in names("x", 6)}
        assert a.tier.usage().used_bytes == 6 * ONE
        directives = {meta.key: meta.directive for meta in a.blocks()}
        assert directives[key("x1")].kind == "pinned"
        assert directives[key("x1")].tenant == "t"
        assert directives[key("x2")].kind == "normal"
        assert await a.write(names("y", 18)) == [True] * 18
        assert {key("x0"), key("x1")} <= a.told


async def test_whoever_is_killed_leaves_nothing_that_nobody_counts(open_store: Callable[[], ClusterStore]) -> None:
    killed = Host(open_store(), "a", 20)
    await killed.tier.start()
    metas, data = chain(names("x", 8))

    async def dies(name: str, data: bytes | bytearray) -> None:
        if len(await store.names("v1/blocks/")) >= 3 and "/blocks/" in name:
            await asyncio.Event().wait()
        await put(name, data)

    store = killed.store
    put = store.put
    store.put = dies  # type: ignore[method-assign]
    write = asyncio.create_task(killed.tier.write(SPEC, metas, data))

    async def is_begun() -> bool:
        return len(await store.names("v1/blocks/")) >= 3

    await until(is_begun)
    async with host(open_store(), blocks=20) as a:  # while the first never comes to an end
        objects = await store.names("v1/blocks/")
        assert len(objects) >= 3
        assert a.tier.usage().blocks == len(objects)
        assert await a.tier.drop(SPEC, [meta.key for meta in metas]) == len(objects)
        assert await store.names("v1/blocks/") == []
    write.cancel()
    await asyncio.wait([write])
    await killed.tier.close()


async def test_the_log_stays_short_and_true_however_much_is_written(open_store: Callable[[], ClusterStore]) -> None:
    async with host(open_store(), blocks=8, log_parts=4) as a:
        for turn in range(20):
            assert all(await a.write(names(f"t{turn}-", 4)))

        async def is_short() -> bool:
            return len(await a.store.names("v1/owners/")) <= 5

        await until(is_short)
        told = set(a.told)
    async with host(open_store(), blocks=8) as a:
        assert a.told == told
        assert len(await a.store.names("v1/blocks/")) == 8


async def test_each_part_of_the_log_may_be_lost_without_losing_the_others(
    open_store: Callable[[], ClusterStore],
) -> None:
    store = open_store()
    killed = Host(store, "a", 100)
    await killed.tier.start()
    for batch in ("x", "y", "z"):
        await killed.write(names(batch, 2))
    parts = await store.names("v1/owners/")
    assert len(parts) == 4
    data = await store.get(parts[2], 1 << 20)
    assert data is not None
    damaged = bytearray(data)
    damaged[-1] ^= 1
    await store.put(parts[2], damaged)
    async with host(open_store()) as a:
        assert a.told == {key(name) for batch in ("x", "z") for name in names(batch, 2)}
        assert a.tier.counters.corrupt == 1
        assert len(await store.names("v1/owners/")) == 1  # written anew, in one part
    await killed.tier.close()


async def test_dropping_frees_own_and_others_blocks_but_not_what_has_others_below_it(
    open_store: Callable[[], ClusterStore],
) -> None:
    async with host(open_store(), "a") as a, host(open_store(), "b") as b:
        await a.write(["root", "a1"])
        await a.write(["root", "a2"])
        await b.write(["root2", "b1"])
        assert await a.tier.drop(SPEC, [key(name) for name in ("root", "a1", "root2", "b1", "never")]) == 3
        assert a.told == {key("root"), key("a2")}
        assert not await lies_there(a.store, "b1")
        assert await b.read(["root2", "b1"]) == []
        assert b.told == set()


async def test_two_models_of_one_layout_do_not_touch_each_other(open_store: Callable[[], ClusterStore]) -> None:
    async with host(open_store(), "a") as a:
        other = PoolSpec("other", "layout", SPEC.block_bytes, 16)
        await a.write(names("x", 3))
        await a.write(names("y", 3), spec=other)
        assert {meta.key for meta in a.blocks()} == {key(name) for name in names("x", 3)}
        assert await a.tier.drop(other, [key(name) for name in names("y", 3)]) == 3
        assert await a.read(names("x", 3)) == names("x", 3)
        assert len(a.tier.specs) == 1
