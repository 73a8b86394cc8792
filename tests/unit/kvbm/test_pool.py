import math

import pytest

from kvbus_blocks.retention import PLAIN, Directive
from kvbus_kvbm.core.errors import InvalidRequest, LeaseGone, TooManyKeys, TooManyLeases
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pool import Pool, PoolLimits
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.kvbm import BlockDirective, ReservedBlocks
from kvbus_wire.packing import unpack_keys

LIMITS = PoolLimits(lease_s=10.0, quarantine_s=30.0, max_leases_per_instance=4, max_keys_per_request=8)
A, B = "worker-a", "worker-b"


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def keys(*names: str) -> bytes:
    return b"".join(key(name) for name in names)


def make(slots: int = 4, limits: PoolLimits = LIMITS) -> Pool:
    return Pool("pool", slots, limits)


def names(packed: bytes) -> list[str]:
    return [k.decode().rstrip(".") for k in unpack_keys(packed)]


def readable(events: list[KvEvent]) -> list[tuple[str, ...]]:
    said: list[tuple[str, ...]] = []
    for event in events:
        match event:
            case Stored(parent, packed):
                said.append(("stored", parent.decode().rstrip("."), *names(packed)))
            case Removed(packed):
                said.append(("removed", *names(packed)))
            case _:
                raise AssertionError(event)
    return said


def store(pool: Pool, *chain: str, parent: str = "", now_s: float = 0.0, instance: str = A) -> ReservedBlocks:
    reserved = pool.reserve(instance, key(parent) if parent else b"", keys(*chain), now_s)
    if reserved.lease_id:
        pool.commit(reserved.lease_id, [None if s is None else 100 + s.index for s in reserved.slots], now_s)
    pool.check_integrity()
    return reserved


def present(pool: Pool) -> set[str]:
    return {name for chain in pool.chains() for name in names(chain.keys)}


def given(reserved: ReservedBlocks) -> list[bool]:
    return [slot is not None for slot in reserved.slots]


def test_a_committed_chain_can_be_pinned_with_its_checksums_and_generations() -> None:
    pool = make()
    reserved = store(pool, "a", "b", "c")
    pinned = pool.pin(B, keys("a", "b", "x"), 1.0)
    assert [s.index for s in pinned.slots] == [s.index for s in reserved.slots[:2] if s]
    assert [s.checksum for s in pinned.slots] == [100 + s.index for s in pinned.slots]
    assert [s.generation for s in pinned.slots] == [1, 1]
    assert pinned.lease_s == 10.0
    assert pool.usage().pinned == 2
    assert (pool.counters.hits, pool.counters.misses) == (2, 1)
    assert readable(pool.take_events()) == [("stored", "", "a", "b", "c")]
    assert pool.release(pinned.lease_id, [], 1.0) == 0
    assert pool.usage().pinned == 0
    pool.check_integrity()


def test_nothing_is_readable_before_its_commit() -> None:
    pool = make()
    reserved = pool.reserve(A, b"", keys("a"), 0.0)
    assert pool.pin(B, keys("a"), 0.0).lease_id == ""
    assert pool.take_events() == []
    assert (pool.usage().reserved, pool.usage().free) == (1, 3)
    pool.commit(reserved.lease_id, [1], 0.0)
    assert pool.pin(B, keys("a"), 0.0).lease_id


def test_a_miss_makes_no_lease() -> None:
    pool = make()
    pinned = pool.pin(A, keys("a"), 0.0)
    assert (pinned.lease_id, pinned.slots, pool.usage().leases) == ("", (), 0)


def test_a_worker_that_has_the_beginning_pins_the_rest_of_the_chain_only() -> None:
    pool = make()
    store(pool, "a", "b", "c")
    assert len(pool.pin(A, keys("b", "c", "d"), 0.0).slots) == 2
    assert len(pool.pin(A, keys("b", "a"), 0.0).slots) == 1, "no chain beyond b"
    assert pool.pin(A, keys("d"), 0.0).slots == ()


def test_only_missing_blocks_are_handed_out() -> None:
    pool = make()
    store(pool, "a", "b")
    assert given(pool.reserve(B, b"", keys("a", "b", "c"), 0.0)) == [False, False, True]
    again = pool.reserve(A, b"", keys("a", "b", "c"), 0.0)  # c is being written
    assert given(again) == [False, False, False]
    assert again.lease_id == ""


def test_nothing_is_stored_below_an_unknown_parent() -> None:
    pool = make()
    reserved = pool.reserve(A, key("z"), keys("a", "b"), 0.0)
    assert (reserved.lease_id, reserved.slots) == ("", (None, None))
    assert pool.counters.refused == 2


def test_blocks_below_a_reserved_parent_become_present_with_it() -> None:
    pool = make()
    first = pool.reserve(A, b"", keys("a", "b"), 0.0)
    second = pool.reserve(B, key("b"), keys("c", "d"), 0.0)
    pool.commit(second.lease_id, [3, 4], 0.0)
    pool.check_integrity()
    assert present(pool) == set()
    assert pool.take_events() == []
    pool.commit(first.lease_id, [1, 2], 0.0)
    pool.check_integrity()
    assert readable(pool.take_events()) == [("stored", "", "a", "b", "c", "d")]


@pytest.mark.parametrize("how", ["abort", "expire", "not written"])
def test_blocks_below_a_reservation_that_fails_go_with_it(how: str) -> None:
    pool = make()
    first = pool.reserve(A, b"", keys("a", "b"), 0.0)
    second = pool.reserve(B, key("b"), keys("c", "d"), 1.0)
    pool.commit(second.lease_id, [3, 4], 1.0)
    if how == "abort":
        pool.release(first.lease_id, [], 2.0)
    elif how == "expire":
        pool.expire(10.0)
    else:
        pool.commit(first.lease_id, [1, None], 2.0)
    pool.check_integrity()
    assert present(pool) == ({"a"} if how == "not written" else set())
    usage = pool.usage()
    assert usage.free + usage.quarantined + usage.present == 4
    assert usage.quarantined == (2 if how == "expire" else 0)


def test_a_writer_below_a_failed_reservation_keeps_its_slots_until_its_own_lease_ends() -> None:
    pool = make()
    first = pool.reserve(A, b"", keys("a"), 0.0)
    second = pool.reserve(B, key("a"), keys("b"), 0.0)
    pool.release(first.lease_id, [], 0.0)
    pool.check_integrity()
    assert (pool.usage().free, pool.usage().reserved) == (3, 1)
    pool.commit(second.lease_id, [1], 0.0)
    pool.check_integrity()
    assert (pool.usage().free, pool.usage().present) == (4, 0)


def test_a_slot_of_an_expired_reservation_rests_before_it_is_used_again() -> None:
    pool = make(slots=1)
    reserved = pool.reserve(A, b"", keys("a"), 0.0)
    pool.expire(9.9)
    assert pool.usage().reserved == 1
    assert given(pool.reserve(B, b"", keys("b"), 10.0)) == [False]
    assert (pool.usage().quarantined, pool.counters.leases_expired) == (1, 1)
    with pytest.raises(LeaseGone):
        pool.commit(reserved.lease_id, [1], 10.0)
    assert pool.next_due_s() == 40.0
    assert given(pool.reserve(B, b"", keys("b"), 39.9)) == [False]
    later = pool.reserve(B, b"", keys("b"), 40.0)
    assert later.slots[0] is not None
    assert later.slots[0].generation == 2
    assert pool.next_due_s() == 50.0


def test_an_aborted_reservation_gives_its_slots_back_at_once() -> None:
    pool = make(slots=1)
    reserved = pool.reserve(A, b"", keys("a"), 0.0)
    pool.release(reserved.lease_id, [], 0.0)
    assert given(pool.reserve(B, b"", keys("b"), 0.0)) == [True]


def test_the_least_recently_used_leaf_is_evicted_first_and_parents_after_their_children() -> None:
    pool = make(slots=4)
    store(pool, "a", "b")
    store(pool, "x", "y")
    pool.release(pool.pin(A, keys("a", "b"), 0.0).lease_id, [], 0.0)
    pool.take_events()
    store(pool, "n")
    assert present(pool) == {"a", "b", "x", "n"}
    store(pool, "m")
    assert present(pool) == {"a", "b", "m", "n"}
    store(pool, "o")
    assert present(pool) == {"a", "m", "n", "o"}
    assert readable(pool.take_events()) == [
        ("removed", "y"),
        ("stored", "", "n"),
        ("removed", "x"),
        ("stored", "", "m"),
        ("removed", "b"),
        ("stored", "", "o"),
    ]
    assert pool.counters.evictions == 3


def test_pinned_and_reserved_blocks_are_never_evicted() -> None:
    pool = make(slots=2)
    store(pool, "a")
    pool.pin(B, keys("a"), 0.0)
    pool.reserve(B, b"", keys("r"), 0.0)
    assert given(pool.reserve(A, b"", keys("n"), 0.0)) == [False]
    assert present(pool) == {"a"}
    pool.check_integrity()


def test_a_chain_never_evicts_what_it_hangs_on() -> None:
    pool = make(slots=2)
    store(pool, "a", "b")
    assert given(pool.reserve(A, key("b"), keys("c"), 0.0)) == [False]
    assert present(pool) == {"a", "b"}


def test_a_chain_larger_than_the_pool_is_stored_as_far_as_it_fits() -> None:
    pool = make(slots=3)
    assert given(store(pool, "a", "b", "c", "d", "e")) == [True, True, True, False, False]
    assert present(pool) == {"a", "b", "c"}
    assert pool.counters.refused == 2


def test_a_corrupt_block_goes_with_all_that_is_below_it() -> None:
    pool = make(slots=5)
    store(pool, "a", "b", "c")
    store(pool, "d", parent="b")
    pinned = pool.pin(B, keys("a", "b", "c"), 0.0)
    pool.take_events()
    assert pool.release(pinned.lease_id, [1], 0.0) == 1
    pool.check_integrity()
    assert present(pool) == {"a"}
    (event,) = readable(pool.take_events())
    assert set(event[1:3]) == {"c", "d"}
    assert (event[0], event[3]) == ("removed", "b")
    assert (pool.usage().free, pool.counters.corrupt) == (4, 1)


def test_a_dropped_block_keeps_its_slot_while_another_reads_it() -> None:
    pool = make(slots=1)
    store(pool, "a")
    reader, reporter = pool.pin(A, keys("a"), 0.0), pool.pin(B, keys("a"), 0.0)
    pool.release(reporter.lease_id, [0], 0.0)
    pool.check_integrity()
    assert pool.pin(B, keys("a"), 0.0).slots == ()
    assert given(pool.reserve(B, b"", keys("n"), 0.0)) == [False]
    pool.release(reader.lease_id, [0], 0.0)
    assert pool.counters.corrupt == 1
    assert given(pool.reserve(B, b"", keys("n"), 0.0)) == [True]


def test_a_corruption_report_of_an_ended_lease_drops_nothing() -> None:
    pool = make()
    store(pool, "a")
    pinned = pool.pin(B, keys("a"), 0.0)
    assert pool.release(pinned.lease_id, [0], 10.0) == 0
    assert present(pool) == {"a"}


def test_an_expired_pin_lets_its_blocks_go() -> None:
    pool = make(slots=1)
    store(pool, "a")
    pool.pin(B, keys("a"), 0.0)
    assert given(pool.reserve(A, b"", keys("n"), 9.9)) == [False]
    assert given(pool.reserve(A, b"", keys("n"), 10.0)) == [True]


def test_committing_and_releasing_twice_is_harmless() -> None:
    pool = make()
    reserved = pool.reserve(A, b"", keys("a"), 0.0)
    pool.commit(reserved.lease_id, [1], 0.0)
    pool.commit(reserved.lease_id, [1], 0.0)
    pinned = pool.pin(A, keys("a"), 0.0)
    pool.release(pinned.lease_id, [], 0.0)
    pool.release(pinned.lease_id, [], 0.0)
    pool.check_integrity()
    assert pool.usage().leases == 0
    with pytest.raises(LeaseGone):
        pool.commit("pool.77", [1], 0.0)
    with pytest.raises(LeaseGone):
        pool.commit(pool.pin(A, keys("a"), 0.0).lease_id, [1], 0.0)


def test_the_leases_of_an_instance_that_left_end_and_those_of_others_stay() -> None:
    pool = make()
    store(pool, "a")
    pool.pin(A, keys("a"), 0.0)
    gone = pool.reserve(A, b"", keys("x"), 0.0)
    kept = pool.reserve(B, b"", keys("y"), 0.0)
    assert pool.drop_instance(A, 1.0) == 2
    pool.check_integrity()
    assert (pool.usage().pinned, pool.usage().quarantined, pool.usage().leases) == (0, 1, 1)
    pool.commit(kept.lease_id, [1], 1.0)
    with pytest.raises(LeaseGone):
        pool.commit(gone.lease_id, [1], 1.0)
    assert pool.drop_instance(A, 1.0) == 0


def test_requests_over_the_limits_are_refused_with_a_code() -> None:
    pool = make()
    nine = keys(*"abcdefghi")
    for refused in (lambda: pool.reserve(A, b"", nine, 0.0), lambda: pool.pin(A, nine, 0.0)):
        with pytest.raises(TooManyKeys) as caught:
            refused()
        assert caught.value.reply.code is ErrorCode.PAYLOAD_TOO_LARGE
        assert caught.value.reply.details == {"limit": 8}
    assert len(pool.reserve(A, b"", nine[:-16], 0.0).slots) == 8


def test_an_instance_has_a_limited_number_of_leases() -> None:
    pool = make()
    store(pool, "a")
    leases = [pool.pin(A, keys("a"), 0.0) for _ in range(4)]
    for refused in (lambda: pool.pin(A, keys("a"), 0.0), lambda: pool.reserve(A, b"", keys("n"), 0.0)):
        with pytest.raises(TooManyLeases) as caught:
            refused()
        assert caught.value.reply.retryable
    assert pool.pin(B, keys("a"), 0.0).lease_id
    pool.release(leases[0].lease_id, [], 0.0)
    assert pool.pin(A, keys("a"), 0.0).lease_id


def test_what_is_no_chain_is_refused_and_changes_nothing() -> None:
    pool = make(slots=6)
    store(pool, "a", "b")
    store(pool, "x")
    for parent, chain in [
        (b"", b""),
        (b"", b"short"),
        (b"", keys("n", "n")),
        (b"", keys("b")),
        (b"", keys("x", "a")),
        (b"", keys("n", "a")),
        (key("a"), keys("x")),
        (key("b"), keys("n", "b")),
    ]:
        with pytest.raises(InvalidRequest):
            pool.reserve(A, parent, chain, 0.0)
    pool.check_integrity()
    assert (pool.usage().free, pool.usage().leases) == (3, 0)


def test_a_commit_that_does_not_fit_its_lease_is_refused_and_the_lease_lives_on() -> None:
    pool = make()
    reserved = pool.reserve(A, b"", keys("a", "b"), 0.0)
    for checksums in ([1], [1, 2, 3], [1, -1], [1 << 64, 1]):
        with pytest.raises(InvalidRequest):
            pool.commit(reserved.lease_id, checksums, 0.0)
    pool.commit(reserved.lease_id, [(1 << 64) - 1, 0], 0.0)
    assert present(pool) == {"a", "b"}
    pinned = pool.pin(A, keys("a"), 0.0)
    with pytest.raises(InvalidRequest):
        pool.release(pinned.lease_id, [1], 0.0)


def test_the_snapshot_holds_branches_with_their_parents_first() -> None:
    pool = make(slots=6)
    store(pool, "a", "b", "c")
    store(pool, "d", "e", parent="a")
    pool.reserve(A, key("c"), keys("w"), 0.0)
    seen = {""}
    for chain in pool.chains():
        assert chain.parent.decode().rstrip(".") in seen
        seen |= set(names(chain.keys))
    assert seen == {"", "a", "b", "c", "d", "e"}


def test_a_chain_of_many_thousand_blocks_needs_no_deep_stack() -> None:
    count = 20_000
    pool = make(count, PoolLimits(lease_s=10, quarantine_s=1, max_leases_per_instance=4, max_keys_per_request=count))
    chain = b"".join(i.to_bytes(16, "little") for i in range(1, count + 1))
    reserved = pool.reserve(A, b"", chain, 0.0)
    pool.commit(reserved.lease_id, [0] * count, 0.0)
    stored = [event for event in pool.take_events() if isinstance(event, Stored)]
    assert b"".join(event.keys for event in stored) == chain
    assert [event.parent for event in stored[1:]] == [event.keys[-16:] for event in stored[:-1]]
    assert all(len(event.keys) <= 8192 * 16 for event in stored), "each fits into a message"
    pinned = pool.pin(A, chain, 0.0)
    assert len(pinned.slots) == count
    pool.release(pinned.lease_id, [0], 0.0)
    removed = [event for event in pool.take_events() if isinstance(event, Removed)]
    assert [len(event.keys) // 16 for event in removed] == [8192, 8192, 3616]
    assert pool.usage().free == count


def test_a_cleared_pool_tells_of_every_block_and_keeps_what_is_read_or_written() -> None:
    pool = make(slots=6)
    store(pool, "a", "b")
    store(pool, "x")
    pool.pin(A, keys("x"), 0.0)
    pool.reserve(A, key("b"), keys("w"), 0.0)
    pool.take_events()
    pool.clear()
    pool.check_integrity()
    assert readable(pool.take_events()) == [("removed", "b", "a", "x")]
    assert (present(pool), pool.usage().free) == (set(), 4)


def test_the_eviction_order_stays_bounded_when_the_same_blocks_are_read_again_and_again() -> None:
    pool = make()
    store(pool, "a", "b")
    for _ in range(1000):
        pool.release(pool.pin(A, keys("a", "b"), 0.0).lease_id, [], 0.0)
    assert len(pool._keeping.order) <= 2 * 2 + 64 + 1
    pool.check_integrity()


PINNED_AB = BlockDirective(start=0, end=2, kind="pinned", ttl_s=60.0, tenant="t")


def retained(pool: Pool, *chain: str, directive: BlockDirective, now_s: float = 0.0) -> tuple[int, ...]:
    unpinned = pool.retain(keys(*chain), (directive,), now_s).unpinned
    pool.check_integrity()
    return unpinned


def test_blocks_pinned_with_their_reservation_outlast_newer_ones_until_their_time_is_over() -> None:
    pool = make(slots=4)
    reserved = pool.reserve(A, b"", keys("a", "b"), 0.0, (PINNED_AB,))
    pool.commit(reserved.lease_id, [1, 2], 0.0)
    assert pool.usage().retained == 2
    for name in "uvwx":
        store(pool, name, now_s=1.0)
    assert present(pool) == {"a", "b", "w", "x"}
    store(pool, "y", now_s=60.0)
    assert present(pool) == {"a", "w", "x", "y"}
    assert (pool.usage().retained, pool.counters.evicted_normal, pool.counters.evicted_pinned) == (0, 3, 0)


def test_each_use_renews_a_pin() -> None:
    pool = make(slots=4)
    store(pool, "a", "b")
    assert retained(pool, "a", "b", directive=PINNED_AB) == ()
    assert retained(pool, "a", "b", directive=PINNED_AB, now_s=50.0) == ()
    pool.reserve(B, b"", keys("a", "b"), 51.0)
    for name in "uvw":
        store(pool, name, now_s=100.0)
    assert {"a", "b"} <= present(pool), "a mere use shortens no pin"


def test_pins_above_a_tenants_share_are_reported_and_are_worth_a_priority() -> None:
    pool = make(slots=4)
    store(pool, "a", "b", "c")
    assert retained(pool, "a", "b", "c", "absent", directive=BlockDirective(start=0, end=9, kind="pinned")) == (2,)
    assert (pool.usage().retained, pool.counters.unpinned) == (2, 1)
    store(pool, "x")
    store(pool, "y")
    assert present(pool) == {"a", "b", "c", "y"}


def test_ephemeral_blocks_go_first_and_become_normal_with_another_user() -> None:
    pool = make(slots=4)
    ephemeral = (BlockDirective(start=0, end=1, kind="ephemeral"),)
    for name in "ef":
        pool.commit(pool.reserve(A, b"", keys(name), 0.0, ephemeral).lease_id, [1], 0.0)
    store(pool, "n")
    store(pool, "o")
    pool.reserve(B, b"", keys("f"), 1.0)
    store(pool, "p")
    assert present(pool) == {"f", "n", "o", "p"}
    store(pool, "q")
    assert present(pool) == {"f", "o", "p", "q"}, "f is worth more: it was used twice"
    assert (pool.counters.evicted_ephemeral, pool.counters.evicted_normal, pool.counters.evictions) == (1, 1, 2)


def test_dropped_blocks_go_children_first_but_not_those_in_use_or_with_others_below_them() -> None:
    pool = make(slots=6)
    store(pool, "a", "b", "c")
    store(pool, "d", parent="b")
    store(pool, "x")
    pool.pin(B, keys("x"), 0.0)
    assert pool.drop_blocks(keys("x", "a", "c", "b"), 0.0) == 1
    assert present(pool) == {"a", "b", "d", "x"}
    pool.take_events()
    assert pool.drop_blocks(keys("a", "b", "d", "nowhere"), 0.0) == 3
    pool.check_integrity()
    assert readable(pool.take_events()) == [("removed", "d", "b", "a")]
    assert pool.counters.freed == 4


def test_a_block_that_only_kvbm_reads_can_be_dropped_and_keeps_its_slot_until_then() -> None:
    pool = make(slots=1)
    store(pool, "a")
    held = pool.moves.hold([key("a")])
    assert pool.drop_blocks(keys("a"), 0.0) == 1
    pool.check_integrity()
    assert (present(pool), pool.usage().free) == (set(), 0)
    pool.moves.let_go(held)
    pool.check_integrity()
    assert pool.usage().free == 1


def test_blocks_brought_up_bring_their_pins_and_take_no_room_from_pinned_ones() -> None:
    pool = make(slots=4)
    store(pool, "a", "b")
    retained(pool, "a", "b", directive=PINNED_AB)
    room = pool.moves.make_room(b"", [key("x"), key("y"), key("z")])
    assert [block.key for block in room] == [key("x"), key("y")], "a and b stay"
    living, over = Directive("pinned", 0, 90.0, "u"), Directive("pinned", 0, 0.0, "u")
    metas = [BlockMeta(key("x"), b"", 0, 7, living), BlockMeta(key("y"), key("x"), 1, 8, over)]
    assert pool.moves.fill(room, metas) == 2
    pool.check_integrity()
    assert pool.usage().retained == 3, "the pin that was over is not given anew"
    assert pool.moves.make_room(b"", [key("z")])
    assert present(pool) == {"a", "b", "x"}


def test_what_is_said_of_a_block_while_it_is_brought_up_holds_beside_what_it_brings() -> None:
    pool = make(slots=4)
    room = pool.moves.make_room(b"", [key("a"), key("b")])
    retained(pool, "a", "b", directive=PINNED_AB)
    longer = Directive("pinned", 0, 1e6, "u")
    metas = [BlockMeta(key("a"), b"", 0, 7, PLAIN), BlockMeta(key("b"), key("a"), 1, 8, longer)]
    assert pool.moves.fill(room, metas) == 2
    pool.check_integrity()
    assert pool.usage().retained == 2
    found = [pool.find(key(name)) for name in "ab"]
    assert [block is not None and block.directive.kind for block in found] == ["pinned", "pinned"]
    assert found[1] is not None
    assert found[1].directive.expires_s == 1e6


@pytest.mark.parametrize(
    "directive",
    [
        BlockDirective(start=0, end=1, kind="for ever"),
        BlockDirective(start=0, end=1, kind="pinned", ttl_s=math.nan),
        BlockDirective(start=0, end=1, kind="pinned", ttl_s=-1.0),
        BlockDirective(start=1, end=0),
        BlockDirective(start=-1, end=1),
    ],
)
def test_a_directive_without_sense_is_refused_and_changes_nothing(directive: BlockDirective) -> None:
    pool = make()
    store(pool, "a")
    with pytest.raises(InvalidRequest):
        pool.retain(keys("a"), (directive,), 0.0)
    with pytest.raises(InvalidRequest):
        pool.reserve(A, b"", keys("a", "b"), 0.0, (directive,))
    pool.check_integrity()
    assert (pool.usage().reserved, pool.usage().leases) == (0, 0)


def test_there_are_only_so_many_directives_in_a_request() -> None:
    pool = make()
    store(pool, "a")
    pool.retain(keys("a"), (PINNED_AB,) * 256, 0.0)
    with pytest.raises(InvalidRequest, match="257"):
        pool.retain(keys("a"), (PINNED_AB,) * 257, 0.0)


def test_a_ttl_beyond_all_measure_is_cut() -> None:
    pool = make()
    store(pool, "a")
    retained(pool, "a", directive=BlockDirective(start=0, end=1, kind="pinned", ttl_s=1e300))
    assert pool.usage().retained == 1


def test_directives_count_nothing_where_the_pool_goes_by_recency_alone() -> None:
    limits = PoolLimits(
        lease_s=10, quarantine_s=1, max_leases_per_instance=4, max_keys_per_request=8, pin_share=1.0, lru=True
    )
    pool = make(2, limits)
    store(pool, "a")
    retained(pool, "a", directive=PINNED_AB)
    store(pool, "b")
    store(pool, "c")
    assert present(pool) == {"b", "c"}
