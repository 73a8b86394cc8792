"""kvbm over lower tiers that do what the test tells them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import PoolSpec
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.event_log import EventLog
from kvbus_testkit.kvbm import by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_transfer import checksum
from kvbus_wire.kv_events import KvEvents, Removed, Stored, decode_events
from kvbus_wire.kvbm import (
    BlockDirective,
    DropBlocks,
    DroppedBlocks,
    PinBlocks,
    PinnedBlocks,
    RetainBlocks,
    Retained,
)
from kvbus_wire.packing import pack_keys, unpack_keys
from tests.integration.kvbm.tiering_kit import KVBM_ID, Stage, app_of, bring, evict_all, names, onboard


@pytest.fixture
async def stage(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(stack, nats_server.url, namespace, tmp_path)


async def test_new_blocks_go_down_to_all_tiers_and_come_up_again(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4")
    worker = await stage.worker()
    chain = names("a", 10)
    await worker.offload(chain)
    await eventually(lambda: all(len(tier.held) == 10 for tier in stage.tiers.values()))
    await evict_all(worker, running)
    assert await onboard(worker, chain) == [content(name) for name in chain]
    assert stage.tiers["g4"].reads == [], "the nearer tier is asked first"
    metrics = running.service.metrics
    assert metrics.value("load_blocks_total", {"tier": "g3"}) == 10
    assert metrics.value("write_through_written_total", {"tier": "g4"}) == 10
    assert metrics.value("tier_blocks", {"tier": "g3"}) == 10


async def test_what_the_disk_lacks_is_read_from_the_store_of_the_cluster(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4")
    worker = await stage.worker()
    chain = names("a", 8)
    await worker.offload(chain)
    await eventually(lambda: all(len(tier.held) == 8 for tier in stage.tiers.values()))
    spec = next(iter(app_of(running).pools)).spec
    await stage.tiers["g3"].drop(spec, [key(name) for name in chain[5:]])
    await evict_all(worker, running)
    assert await onboard(worker, [*chain, "unknown"]) == [content(name) for name in chain]
    assert sum(map(len, stage.tiers["g4"].reads)) == 3
    await eventually(lambda: len(stage.tiers["g3"].held) == 8, what="what came from the store on the disk")
    app_of(running)


async def test_a_reader_hears_where_its_blocks_came_from(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4")
    worker, other = await stage.worker(), await stage.worker("worker-b")
    chain = names("a", 8)
    await worker.offload(chain)
    assert (await bring(worker, chain)).brought == {}, "they are in G2"
    await eventually(lambda: all(len(tier.held) == 8 for tier in stage.tiers.values()))
    spec = next(iter(app_of(running).pools)).spec
    await stage.tiers["g3"].drop(spec, [key(name) for name in chain[5:]])
    await evict_all(worker, running)
    store = stage.tiers["g4"]
    store.open.clear()
    first = await bring(worker, chain, wait_s=600)
    assert (len(first.slots), first.brought, first.coming) == (5, {"g3": 5}, 3)
    late = await bring(worker, chain[5:], wait_s=0.05)
    assert (late.slots, late.coming, late.awaits) == ((), 3, "g4")
    store.open.set()
    rest = await bring(worker, chain[5:], wait_s=600)
    assert (len(rest.slots), rest.brought, rest.awaits) == (3, {"g4": 3}, "")
    assert (await bring(other, chain, wait_s=600)).brought == {}, "now they are in G2"


async def test_pieces_that_come_in_another_order_came_from_there_as_well(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await stage.kvbm("g3", load_chunk_bytes=1000)
    worker = await stage.worker()
    chain = names("a", 3)
    await worker.offload(chain)
    disk = stage.tiers["g3"]
    await eventually(lambda: len(disk.held) == 3)
    await evict_all(worker, running)
    read, behind = disk.read, asyncio.Event()

    async def first_one_last(spec: PoolSpec, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[BlockMeta]:
        if keys[0] == key(chain[0]):
            await behind.wait()
        metas = await read(spec, keys, into)
        if keys[0] == key(chain[2]):
            asyncio.get_running_loop().call_soon(behind.set)
        return metas

    monkeypatch.setattr(disk, "read", first_one_last)
    pinned = await bring(worker, chain, wait_s=600)
    assert (len(pinned.slots), pinned.brought) == (3, {"g3": 3})


async def test_a_question_that_waits_is_counted_once(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    chain = names("x", 4)
    await worker.offload(chain)
    await eventually(lambda: len(stage.tiers["g3"].held) == 4, what="all blocks in the tier")
    await evict_all(worker, running)
    (pool,) = app_of(running).pools
    hits, misses = pool.pool.counters.hits, pool.pool.counters.misses
    assert len((await bring(worker, chain, wait_s=600)).slots) == 4
    assert (pool.pool.counters.hits, pool.pool.counters.misses) == (hits, misses + 4), "they were not in G2"
    await bring(worker, chain, wait_s=600)
    assert (pool.pool.counters.hits, pool.pool.counters.misses) == (hits + 4, misses + 4)


async def test_a_tier_that_its_reader_does_not_want_is_not_read(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4")
    worker, other = await stage.worker(), await stage.worker("worker-b")
    chain = names("a", 8)
    await worker.offload(chain)
    await eventually(lambda: all(len(tier.held) == 8 for tier in stage.tiers.values()))
    spec = next(iter(app_of(running).pools)).spec
    await stage.tiers["g3"].drop(spec, [key(name) for name in chain[5:]])
    await evict_all(worker, running)
    assert len((await bring(worker, chain, wait_s=600, tiers=("g3",))).slots) == 5
    nothing = await bring(worker, chain[5:], wait_s=600, tiers=("g3",))
    assert (nothing.slots, nothing.coming) == ((), 0)
    assert stage.tiers["g4"].reads == []
    assert (await bring(worker, chain[5:], wait_s=600, tiers=("g5",))).coming == 0, "there is no such tier"
    await evict_all(worker, running)
    disk = stage.tiers["g3"]
    disk.open.clear()
    narrow = asyncio.ensure_future(bring(worker, chain, wait_s=600, tiers=("g3",)))
    await eventually(lambda: len(disk.reads) > 1, what="a load from the disk alone")
    wide = asyncio.ensure_future(bring(other, chain[:1], wait_s=600))
    loads = app_of(running).loads
    await eventually(lambda: [load.tiers for load in loads._living] == [frozenset()], what="both readers of one load")
    disk.open.set()
    await asyncio.gather(narrow, wide)
    await eventually(lambda: len(stage.tiers["g4"].reads) > 0, what="what the other one wants, too")


async def test_blocks_of_other_hosts_are_found_in_the_store(stage: Stage) -> None:
    running = await stage.kvbm("g4")
    worker = await stage.worker()
    store = stage.tiers["g4"]
    parent = b""
    for depth, name in enumerate(names("far", 6)):
        data = content(name)
        store.held[key(name)] = BlockMeta(key(name), parent, depth, checksum(data)), data
        parent = key(name)
    assert await onboard(worker, [*names("far", 6), "no"]) == [content(name) for name in names("far", 6)]
    assert store.asked <= 2
    app_of(running)


async def test_a_question_for_what_no_tier_has_is_answered_at_once(stage: Stage) -> None:
    await stage.kvbm("g3", "g4")
    worker = await stage.worker()
    pinned = await bring(worker, names("a", 4), wait_s=600)
    assert (pinned.slots, pinned.coming, pinned.lease_id) == ((), 0, "")


async def test_the_leading_run_is_given_at_once_and_the_rest_is_announced_as_coming(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    chain = names("a", 8)
    await worker.offload(chain)
    disk = stage.tiers["g3"]
    await eventually(lambda: len(disk.held) == 8)
    await evict_all(worker, running)
    await worker.offload(chain[:3])
    disk.open.clear()
    pinned = await bring(worker, chain, wait_s=600)
    assert (len(pinned.slots), pinned.coming) == (3, 5)
    later = await bring(worker, chain[3:], wait_s=0.05)
    assert (later.slots, later.coming) == ((), 5), "the wait has an end"
    disk.open.set()
    assert await onboard(worker, chain) == [content(name) for name in chain]


async def test_many_askers_share_one_load(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    workers = [await stage.worker(f"worker-{i}") for i in range(4)]
    chain = names("a", 6)
    await workers[0].offload(chain)
    disk = stage.tiers["g3"]
    await eventually(lambda: len(disk.held) == 6)
    await evict_all(workers[0], running)
    disk.open.clear()
    asking = [asyncio.ensure_future(onboard(worker, chain)) for worker in workers]
    await eventually(lambda: disk.busy)
    disk.open.set()
    assert await asyncio.gather(*asking) == [[content(name) for name in chain]] * 4
    assert sum(map(len, disk.reads)) == 6, "no block was read twice"


async def test_a_chain_may_be_asked_for_from_its_middle(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    chain = names("a", 8)
    await worker.offload(chain)
    await eventually(lambda: len(stage.tiers["g3"].held) == 8)
    await evict_all(worker, running)
    assert await onboard(worker, chain[4:]) == [content(name) for name in chain[4:]]


async def test_only_what_may_be_evicted_gives_way_to_what_comes_up(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    chain = names("a", 12)
    await worker.offload(chain)
    await eventually(lambda: len(stage.tiers["g3"].held) == 12)
    await evict_all(worker, running)
    await worker.offload(names("b", 10))
    pinned = await worker.pin(names("b", 10))
    assert len(await onboard(worker, chain)) == 6
    assert running.service.metrics.value("load_no_room_total", {"tier": "g3"}) > 0
    for name, slot in zip(names("b", 10), pinned.slots, strict=True):
        assert bytes(worker.slot(slot.index)) == content(name)
    await worker.release(pinned.lease_id)
    app_of(running)


async def test_a_hanging_tier_holds_a_part_of_g2_and_delays_nobody(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    disk.open.clear()
    await worker.offload(names("a", 16))
    await eventually(lambda: disk.busy)
    pool = next(iter(app_of(running).pools)).pool
    assert pool.usage().pinned == 4
    assert await worker.offload(names("b", 12)) == 12, "the rest of G2 is free for others"
    disk.open.set()
    await eventually(lambda: key("b11") in disk.held)
    app_of(running)


async def test_a_queue_that_is_full_drops_and_counts_and_takes_the_block_when_it_is_used_again(stage: Stage) -> None:
    running = await stage.kvbm("g3", tier_queue_blocks=4)
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    disk.open.clear()
    await worker.offload(["x"])
    await eventually(lambda: disk.busy)
    await worker.offload(names("a", 8))
    assert running.service.metrics.value("write_through_dropped_total", {"tier": "g3"}) == 4
    disk.open.set()
    await eventually(lambda: len(disk.held) == 5)
    await worker.onboard(names("a", 8))
    await eventually(lambda: len(disk.held) == 9)


async def test_nothing_is_lost_over_an_outage_of_a_tier(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    disk.broken = True
    await worker.offload(names("a", 8))
    assert await onboard(worker, names("a", 8)) == [content(name) for name in names("a", 8)]
    await eventually(lambda: app_of(running).tiers.edges[0].stuck)
    disk.broken = False
    await eventually(lambda: len(disk.held) == 8)


async def test_what_a_tier_refuses_is_not_offered_for_ever(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    stage.tiers["g3"].capacity = 0
    await worker.offload(names("a", 12))
    edge = app_of(running).tiers.edges[0]
    await asyncio.wait_for(edge.quiet.wait(), scaled(10))
    assert edge.counters.refused >= 12


async def test_an_exception_of_a_tier_does_not_end_kvbm(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4")
    worker = await stage.worker()
    disk, store = stage.tiers["g3"], stage.tiers["g4"]
    disk.raises = True
    await worker.offload(names("a", 4))
    await eventually(lambda: len(store.held) == 4)
    await evict_all(worker, running)
    assert await onboard(worker, names("a", 4)) == [content(name) for name in names("a", 4)]
    store.raises = True
    await evict_all(worker, running)
    assert await onboard(worker, names("a", 4)) == []
    assert await worker.offload(names("b", 2)) == 2


@pytest.mark.parametrize(("policy", "uses"), [("frequency:3", 2), ("priority:5", 0)])
async def test_a_policy_keeps_blocks_from_a_tier(stage: Stage, policy: str, uses: int) -> None:
    stage.policies["g3"] = policy
    await stage.kvbm("g3", "g4")
    worker = await stage.worker()
    await worker.offload(names("a", 2))
    await worker.offload(names("b", 2))
    await eventually(lambda: len(stage.tiers["g4"].held) == 4)
    assert stage.tiers["g3"].held == {}
    for _ in range(uses):
        await worker.onboard(names("a", 2))
    if uses:
        await eventually(lambda: set(stage.tiers["g3"].held) == {key("a0"), key("a1")})


async def test_events_of_each_tier_and_the_snapshot_tell_the_same(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4", snapshot_chunk_keys=3)
    worker = await stage.worker()
    seen: dict[str, list[KvEvents]] = {}

    def take(_subject: str, data: bytes, headers: Any, _seq: int) -> None:
        batch = decode_events(data, headers["Content-Type"])
        seen.setdefault(batch.tier, []).append(batch)

    log = await EventLog.open(worker.service.bus)
    await log.follow(worker.service.bus.subjects.kv_events("*", "*"), take)
    for i in range(6):
        await worker.offload(names(f"{i}-", 4))
    await eventually(lambda: all(len(tier.held) == 24 for tier in stage.tiers.values()))
    spec = next(iter(app_of(running).pools)).spec
    await stage.tiers["g3"].drop(spec, [key("2-3"), key("2-2")])
    chunks = await worker.snapshot()
    told: dict[str, set[bytes]] = {}
    for chunk in chunks:
        told.setdefault(chunk.tier, set()).update(k for chain in chunk.chains for k in unpack_keys(chain.keys))
    assert {tier: len(keys) for tier, keys in told.items()} == {"g2": 16, "g3": 22, "g4": 24}
    last = {chunk.tier: chunk.kv_seq for chunk in chunks}
    await eventually(lambda: {tier: batches[-1].last_seq for tier, batches in seen.items()} == last)
    for tier, batches in seen.items():
        present: set[bytes] = set()
        expected = 1
        for batch in batches:
            assert batch.first_seq == expected, "no number is left out"
            expected = batch.last_seq + 1
            for event in batch.events:
                if isinstance(event, Stored):
                    present |= set(unpack_keys(event.keys))
                elif isinstance(event, Removed):
                    present -= set(unpack_keys(event.keys))
        assert present == told[tier]


async def test_an_orderly_end_writes_what_still_waits(stage: Stage) -> None:
    async with AsyncExitStack() as stack:
        inner = Stage(stack, stage._nats_url, stage._namespace, stage._arena_dir)
        await inner.kvbm("g3", tier_gather_s=0.2)
        worker = await stage.worker()
        await worker.offload(names("a", 16))
        disk = inner.tiers["g3"]
        assert len(disk.held) < 16
    assert (len(disk.held), disk.closed) == (16, True)


async def test_a_pool_that_gives_way_keeps_what_it_has_below(stage: Stage) -> None:
    running = await stage.kvbm("g3", absent_grace_s=0.0)
    async with by_hand(stage._nats_url, stage._namespace, "worker-gone", KVBM_ID) as gone:
        await gone.attach()
        await gone.offload(names("a", 8))
        disk = stage.tiers["g3"]
        await eventually(lambda: len(disk.held) == 8)
        disk.open.clear()
        await gone.offload(names("b", 4))
        await eventually(lambda: disk.busy)
    second = await stage._stack.enter_async_context(by_hand(stage._nats_url, stage._namespace, "worker-b", KVBM_ID))
    second.model = "other"

    async def attached() -> bool:
        with contextlib.suppress(Exception):
            await second.attach()
            return True
        return False

    condition: Callable[[], Any] = attached
    await eventually(condition)
    assert disk.busy == 0, "nobody writes from memory that is gone"
    disk.open.set()
    await second.offload(names("c", 4))
    await eventually(lambda: key("c3") in disk.held)
    assert len(disk.held) == 12
    app_of(running)


async def test_what_was_dropped_while_a_write_of_it_was_broken_off_does_not_stay(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    disk, app = stage.tiers["g3"], app_of(running)
    write = disk.write

    async def to_the_end(spec: PoolSpec, blocks: Sequence[BlockMeta], data: Sequence[memoryview]) -> list[bool]:
        """As a disk does that has begun."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await write(spec, blocks, data)
        raise asyncio.CancelledError

    monkeypatch.setattr(disk, "write", to_the_end)
    await worker.offload(names("x", 2))
    (edge,) = app.tiers.edges
    await eventually(lambda: edge.writing, what="a write that hangs")
    gone = DropBlocks(model="tiny", keys=pack_keys(map(key, names("x", 2))))
    await worker.service.bus.request(worker.service.bus.subjects.control(KVBM_ID), gone, DroppedBlocks, timeout_s=10)
    (pool,) = app.pools
    await app.tiers.give_up(pool.pool_id)
    assert not disk.held
    assert not edge.doomed


async def test_blocks_of_other_hosts_are_found_from_the_middle_of_a_chain(stage: Stage) -> None:
    running = await stage.kvbm("g4")
    worker = await stage.worker()
    store = stage.tiers["g4"]
    await worker.offload(names("far", 3))
    await eventually(lambda: len(store.held) == 3)
    parent = key("far2")
    for depth in range(3, 8):
        data = content(f"far{depth}")
        store.held[key(f"far{depth}")] = BlockMeta(key(f"far{depth}"), parent, depth, checksum(data)), data
        parent = key(f"far{depth}")
    request = PinBlocks(
        pool_id=worker.pool_id,
        instance_id=worker.service.instance_id,
        keys=pack_keys(map(key, names("far", 8)[3:])),
        wait_s=5.0,
        parent=key("far2"),
    )
    pinned: PinnedBlocks = await worker.ask(request, PinnedBlocks)
    assert len(pinned.slots) + pinned.coming == 5
    assert await onboard(worker, names("far", 8)) == [content(name) for name in names("far", 8)]
    app_of(running)


async def test_blocks_that_nobody_wants_any_more_do_not_come_back(stage: Stage) -> None:
    """Neither from a batch that is being written when they are dropped, nor from a load."""
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    chain = names("a", 4)
    disk.open.clear()
    await worker.offload(chain)
    await eventually(lambda: disk.busy)
    app = app_of(running)
    pool = next(iter(app.pools))
    await app.tiers.drop(pool.spec, pool.pool_id, [key(name) for name in chain])
    disk.open.set()
    await eventually(lambda: app.tiers.edges[0].quiet.is_set())
    assert disk.held == {}
    await worker.onboard(chain)
    await eventually(lambda: len(disk.held) == 4)
    await evict_all(worker, running)
    disk.open.clear()
    asking = asyncio.ensure_future(bring(worker, chain))
    await eventually(lambda: disk.busy)
    await app.loads.stop(pool.pool_id, [key(chain[2])])
    assert (await asking).slots == ()
    assert (len(app.loads), disk.busy) == (0, 0)
    disk.open.set()
    app_of(running)


async def test_a_load_that_is_stopped_before_it_has_begun_stands_in_nobodys_way(stage: Stage) -> None:
    running = await stage.kvbm("g3", max_loads=1)
    worker = await stage.worker()
    chain = names("a", 4)
    await worker.offload(chain)
    await eventually(lambda: len(stage.tiers["g3"].held) == 4)
    await evict_all(worker, running)
    app = app_of(running)
    pool = next(iter(app.pools))
    load = app.loads.bring_up(pool, [key(name) for name in chain])
    assert load is not None
    await app.loads.stop(pool.pool_id, [key(chain[0])])
    assert (load.over, len(app.loads)) == (True, 0)
    assert await onboard(worker, chain) == [content(name) for name in chain]


async def test_a_load_that_reaches_its_deadline_gives_its_room_back(stage: Stage) -> None:
    running = await stage.kvbm("g3", load_deadline_s=0.05)
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    await worker.offload(names("a", 8))
    await eventually(lambda: len(disk.held) == 8)
    await evict_all(worker, running)
    disk.open.clear()
    pinned = await bring(worker, names("a", 8), wait_s=600)
    assert (pinned.slots, pinned.coming) == ((), 0)
    assert running.service.metrics.value("load_late_total", {"tier": "g2"}) == 1
    assert next(iter(app_of(running).pools)).pool.usage().free == 16
    disk.open.set()


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0])
async def test_a_wait_that_makes_no_sense_is_none(stage: Stage, wait_s: float) -> None:
    await stage.kvbm("g3")
    worker = await stage.worker()
    assert (await bring(worker, names("a", 2), wait_s=wait_s)).slots == ()


async def test_more_loads_than_the_limit_are_refused_and_counted(stage: Stage) -> None:
    running = await stage.kvbm("g3", max_loads=1)
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    for prefix in "ab":
        await worker.offload(names(prefix, 4))
    await eventually(lambda: len(disk.held) == 8)
    await evict_all(worker, running)
    disk.open.clear()
    assert (await bring(worker, names("a", 4), wait_s=0.01)).coming == 4
    assert (await bring(worker, names("b", 4), wait_s=600)).coming == 0
    assert running.service.metrics.value("load_refused_total", {"tier": "g2"}) == 1
    disk.open.set()
    assert await onboard(worker, names("a", 4)) == [content(name) for name in names("a", 4)]


@pytest.mark.parametrize("step", [1, -1])
async def test_dropped_blocks_leave_all_tiers_also_more_than_fit_into_one_request(step: int, stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4", max_keys_per_request=3)
    worker = await stage.worker()
    for at in range(0, 8, 2):
        await worker.offload(names("a", 8)[at : at + 2], parent=f"a{at - 1}" if at else "")
    await worker.offload(["b"], parent="a1")
    await eventually(lambda: all(len(tier.held) == 9 for tier in stage.tiers.values()))
    subject = worker.service.bus.subjects.control(KVBM_ID)
    request = DropBlocks(model="tiny", keys=pack_keys(map(key, names("a", 8)[::step])))
    dropped: DroppedBlocks = await worker.service.bus.request(subject, request, DroppedBlocks, timeout_s=10)
    assert dropped.blocks["g2"] == 6, "what has other blocks below it stays"
    assert dropped.blocks["g3"] == dropped.blocks["g4"] == 8, "(these tiers do not look)"
    assert await worker.onboard(["a0", "a1", "b"]) == [content(name) for name in ("a0", "a1", "b")]
    bad = DropBlocks(model="tiny", keys=b"123")
    with pytest.raises(RequestFailed):
        await worker.service.bus.request(subject, bad, DroppedBlocks, timeout_s=10)
    app_of(running)


async def test_leases_travel_down_and_come_back_up(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    await worker.offload(names("a", 4))
    await eventually(lambda: len(disk.held) == 4)

    async def retain(*said: BlockDirective) -> Retained:
        request = RetainBlocks(
            pool_id=worker.pool_id,
            instance_id=worker.service.instance_id,
            keys=pack_keys(map(key, names("a", 4))),
            directives=said,
        )
        retained: Retained = await worker.ask(request, Retained)
        return retained

    assert (await retain(BlockDirective(start=0, end=2, kind="pinned", ttl_s=60.0, tenant="t"))).unpinned == ()
    await eventually(lambda: disk.held[key("a1")][0].directive.kind == "pinned")
    assert disk.held[key("a2")][0].directive.kind == "normal"
    await evict_all(worker, running)
    assert len(await onboard(worker, names("a", 4))) == 4
    pool = next(iter(app_of(running).pools)).pool
    kinds = [block.directive.kind for name in names("a", 4) if (block := pool.find(key(name)))]
    assert kinds == ["pinned", "pinned", "normal", "normal"]
    await evict_all(worker, running)
    await retain(BlockDirective(start=2, end=4, kind="pinned", ttl_s=60.0, tenant="t"))
    assert disk.held[key("a3")][0].directive.kind == "pinned", "what lies only below is asked for there"


async def test_what_left_g2_before_the_store_had_it_goes_there_from_the_disk(stage: Stage) -> None:
    running = await stage.kvbm("g3", "g4")
    worker = await stage.worker()
    disk, store = stage.tiers["g3"], stage.tiers["g4"]
    store.open.clear()
    await worker.offload(["x"])
    await eventually(lambda: store.busy)
    await worker.offload(names("a", 8))
    await eventually(lambda: len(disk.held) == 9)
    await evict_all(worker, running)
    store.open.set()
    await eventually(lambda: len(store.held) == 9)
    assert running.service.metrics.value("write_through_missed_total", {"tier": "g4"}) == 0
    app_of(running)


async def test_the_time_that_blocks_spare_is_told_by_tier(stage: Stage) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    await worker.offload(names("a", 4))
    await eventually(lambda: len(stage.tiers["g3"].held) == 4)
    await worker.onboard(names("a", 4))
    metrics = running.service.metrics
    # The worker by hand says that it computes one token per second; a block has 16.
    assert metrics.value("saved_seconds_total", {"tier": "g2"}) == 64
    await evict_all(worker, running)
    assert len(await onboard(worker, names("a", 4))) == 4
    assert metrics.value("saved_seconds_total", {"tier": "g3"}) == 64
    assert metrics.value("saved_seconds_total", {"tier": "g2"}) == 64


async def test_what_breaks_inside_a_move_costs_that_move_only(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await stage.kvbm("g3")
    worker = await stage.worker()
    disk = stage.tiers["g3"]
    app = app_of(running)

    def no_memory(*_: Any) -> memoryview:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(app._arenas, "view", no_memory)
        await worker.offload(names("a", 4))
        await eventually(lambda: app.tiers.edges[0].counters.failures)
        assert await worker.offload(names("b", 4)) == 4
    await worker.onboard(names("a", 4))
    await eventually(lambda: all(key(name) in disk.held for name in names("a", 4)))
    await evict_all(worker, running)
    with monkeypatch.context() as patch:
        patch.setattr(app._arenas, "view", no_memory)
        assert (await bring(worker, names("a", 4))).slots == ()
    assert running.service.metrics.value("load_failed_total", {"tier": "g2"}) == 1
    assert await onboard(worker, names("a", 4)) == [content(name) for name in names("a", 4)]
    app_of(running)
