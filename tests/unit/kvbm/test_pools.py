from itertools import count

import pytest

from kvbus_kvbm.core.errors import InvalidRequest, NoRoomForPool, PoolGone, Unsupported
from kvbus_kvbm.core.pool import PoolLimits
from kvbus_kvbm.core.pools import Budget, OpenPool, Pools, PoolSpec
from kvbus_wire.errors import ErrorCode

LIMITS = PoolLimits(lease_s=10.0, quarantine_s=30.0, max_leases_per_instance=4, max_keys_per_request=8)
KEY = b"k" * 16


def make(
    *, g2_bytes: int = 6400, pool_share: float = 0.5, max_pools: int = 3, max_models: int = 9, min_slots: int = 2
) -> Pools:
    numbers = count(1)
    budget = Budget(
        g2_bytes=g2_bytes, pool_share=pool_share, max_pools=max_pools, max_models=max_models, min_slots=min_slots
    )
    return Pools(budget, LIMITS, lambda: f"pool{next(numbers)}")


def spec(model: str = "m", *, layout: str = "l", block_bytes: int = 64, block_size: int = 16) -> PoolSpec:
    return PoolSpec(model, layout, block_bytes, block_size)


def open_pool(pools: Pools, wanted: PoolSpec, worker: str | None = "w") -> OpenPool:
    plan = pools.plan(wanted)
    for pool_id in plan.reclaim:
        pools.remove(pool_id)
    pool = pools.add(plan, f"/memory/{plan.pool_id}")
    if worker is not None:
        pools.attach(pool, worker, 1, 0.0)
    return pool


def test_a_new_pool_takes_its_share_of_what_is_left_and_the_last_one_all() -> None:
    pools = make(g2_bytes=6400, min_slots=10)
    assert [open_pool(pools, spec(name)).pool.slots for name in "abc"] == [50, 25, 12]
    pools = make(g2_bytes=6400, min_slots=40)
    assert [open_pool(pools, spec(name)).pool.slots for name in "ab"] == [50, 50]
    assert pools.assigned_bytes == 6400


def test_slots_begin_on_a_cache_line() -> None:
    assert [spec(block_bytes=size).slot_bytes for size in (1, 64, 65)] == [64, 64, 128]
    assert open_pool(make(), spec(block_bytes=100)).size_bytes == 25 * 128


def test_the_same_spec_finds_its_pool_and_another_layout_gets_its_own() -> None:
    pools = make()
    pool = open_pool(pools, spec())
    assert pools.find(spec()) is pool
    assert pools.find(spec(layout="other")) is None
    assert open_pool(pools, spec(layout="other")).pool_id != pool.pool_id
    assert len(pools.of_model("m")) == 2
    assert pools.models() == ["m"]


def test_without_room_the_refusal_has_the_numbers() -> None:
    pools = make(g2_bytes=6400)
    with pytest.raises(NoRoomForPool) as caught:
        pools.plan(spec(block_bytes=6400))
    reply = caught.value.reply
    assert (reply.code, reply.retryable) == (ErrorCode.OVERLOADED, False)
    assert reply.details == {"g2_bytes": 6400, "assigned_bytes": 0, "slot_bytes": 6400, "pools": 0}


def test_the_number_of_pools_is_limited_while_workers_use_them() -> None:
    pools = make(max_pools=2, min_slots=1)
    open_pool(pools, spec("a"))
    open_pool(pools, spec("b"))
    with pytest.raises(NoRoomForPool):
        pools.plan(spec("c"))


def test_a_pool_that_no_worker_uses_gives_way_when_room_is_needed_oldest_first() -> None:
    pools = make(max_pools=2, min_slots=1)
    first, second = open_pool(pools, spec("a")), open_pool(pools, spec("b"))
    pools.detach("w", 1.0)
    assert pools.plan(spec("c")).reclaim == (first.pool_id,)
    pools.attach(first, "w", 1, 1.0)
    assert pools.plan(spec("c")).reclaim == (second.pool_id,)
    open_pool(pools, spec("c"))
    with pytest.raises(PoolGone) as caught:
        pools.get(second.pool_id)
    assert (caught.value.reply.code, caught.value.reply.details) == (ErrorCode.GONE, {"what": "pool"})


def test_an_idle_pool_is_kept_while_there_is_room() -> None:
    pools = make()
    open_pool(pools, spec("a"), worker=None)
    assert pools.plan(spec("b")).reclaim == ()


def test_a_model_has_one_block_size_at_a_time() -> None:
    pools = make()
    old = open_pool(pools, spec(block_size=16))
    with pytest.raises(Unsupported) as caught:
        pools.plan(spec(block_size=32))
    assert caught.value.reply.details == {"block_size": 16}
    pools.detach("w", 0.0)
    assert pools.plan(spec(block_size=32)).reclaim == (old.pool_id,)


def test_the_number_of_models_over_the_whole_run_is_limited() -> None:
    pools = make(max_models=2)
    for name in "ab":
        pools.remove(open_pool(pools, spec(name)).pool_id)
    with pytest.raises(NoRoomForPool):
        pools.plan(spec("c"))
    assert pools.plan(spec("a")).slots


def test_an_impossible_block_is_refused() -> None:
    for bad in (spec(block_bytes=0), spec(block_bytes=-1), spec(block_size=0)):
        with pytest.raises(InvalidRequest):
            make().plan(bad)


def test_a_worker_that_was_started_anew_loses_the_leases_of_its_former_life_in_all_pools() -> None:
    pools = make()
    one, two = open_pool(pools, spec("a")), open_pool(pools, spec("b"))
    one.pool.reserve("w", b"", KEY, 0.0)
    two.pool.reserve("w", b"", KEY, 0.0)
    two.pool.reserve("other", b"", b"o" * 16, 0.0)
    pools.attach(one, "w", 1, 1.0)
    assert pools.leases() == 3
    pools.attach(one, "w", 2, 1.0)
    assert pools.leases() == 1
    assert set(two.attached) == set()
    assert one.attached["w"].incarnation == 2


def test_a_worker_that_never_came_into_the_directory_does_not_hold_a_pool_for_ever() -> None:
    pools = make()
    pool = open_pool(pools, spec(), worker="w")
    pools.attach(pool, "live", 1, 0.0)
    pool.pool.pin("w", KEY, 0.0)
    pools.detach_absent({"live"}, 59.9, 60.0)
    assert set(pool.attached) == {"w", "live"}
    pools.detach_absent({"live"}, 60.0, 60.0)
    assert set(pool.attached) == {"live"}


def test_leases_are_found_by_their_pool_and_deadlines_over_all_pools() -> None:
    pools = make()
    one, two = open_pool(pools, spec("a")), open_pool(pools, spec("b"))
    assert pools.next_due_s() is None
    two.pool.reserve("w", b"", KEY, 5.0)
    lease_id = one.pool.reserve("w", b"", KEY, 3.0).lease_id
    assert pools.of_lease(lease_id) is one
    assert pools.of_lease("nowhere.1") is None
    assert pools.next_due_s() == 13.0
    pools.expire(20.0)
    assert pools.leases() == 0
