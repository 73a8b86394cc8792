import pytest

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.tier_index import TierIndex
from kvbus_kvbm.core.write_through import BadPolicy, EdgePolicy, Pacer, WriteQueue
from kvbus_wire.kv_events import Cleared, Removed, Stored
from kvbus_wire.packing import pack_keys, unpack_keys


def keys(*names: str) -> list[bytes]:
    return [name.encode().ljust(16, b".") for name in names]


NORMAL, PINNED, EPHEMERAL = Directive(priority=3), Directive(kind="pinned"), Directive(kind="ephemeral", priority=9)


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("all", {"normal", "pinned"}),
        ("frequency:2", {"normal", "pinned"}),
        ("frequency:3", set()),
        ("priority:3", {"normal", "pinned"}),
        ("priority:4", {"pinned"}),
        ("priority:-1", {"normal", "pinned"}),
    ],
)
def test_a_policy_says_what_a_tier_takes_and_ephemeral_blocks_never_go_down(text: str, admitted: set[str]) -> None:
    policy = EdgePolicy.parse(text)
    assert {of.kind for of in (NORMAL, PINNED, EPHEMERAL) if policy.admits(of, uses=2)} == admitted


@pytest.mark.parametrize(
    "text", ["", "some", "frequency", "frequency:", "frequency:x", "priority:1.5", "all:1", "priority:9999999999"]
)
def test_another_text_is_no_policy(text: str) -> None:
    with pytest.raises(BadPolicy):
        EdgePolicy.parse(text)


def test_the_queue_takes_turns_between_pools_and_keeps_the_order_within_one() -> None:
    queue = WriteQueue(100)
    queue.push("p", keys("a", "b", "c"))
    queue.push("q", keys("x"))
    queue.push("p", keys("b", "d"))
    assert len(queue) == 5
    assert queue.take(lambda _: 2) == ("p", keys("a", "b"))
    assert queue.take(lambda _: 2) == ("q", keys("x"))
    queue.put_back("p", keys("a", "c"))
    assert queue.take(lambda _: 9) == ("p", keys("a", "c", "d"))
    assert (queue.take(lambda _: 9), len(queue)) == (None, 0)


def test_a_full_queue_drops_what_comes_and_counts_it() -> None:
    queue = WriteQueue(3)
    queue.push("p", keys("a", "b", "c", "d", "a"))
    assert (len(queue), queue.dropped) == (3, 1)
    queue.discard("p", keys("b", "x"))
    queue.discard("gone", keys("b"))
    queue.push("p", keys("e"))
    assert queue.take(lambda _: 9) == ("p", keys("a", "c", "e"))
    queue.push("q", keys("f", "g"))
    assert (queue.forget("q"), queue.forget("q"), len(queue), queue.dropped) == (2, 0, 0, 3)


def test_a_rate_limit_lets_the_first_batch_through_and_makes_the_next_one_wait() -> None:
    pacer = Pacer(100.0)
    assert pacer.wait_s(5.0) == 0
    pacer.spent(200, 5.0)
    assert pacer.wait_s(5.5) == 1.5
    pacer.spent(100, 6.0)
    assert pacer.wait_s(6.0) == 2.0
    assert pacer.wait_s(9.0) == 0
    free = Pacer(0.0)
    free.spent(1 << 40, 0.0)
    assert free.wait_s(0.0) == 0


def test_the_index_follows_the_events_of_a_tier_parents_first() -> None:
    index = TierIndex()
    a, b, c, d = keys("a", "b", "c", "d")
    index.apply([Stored(b"", pack_keys([a, b])), Stored(a, pack_keys([d])), Stored(b, pack_keys([c]))])
    assert (len(index), index.leading([a, b, c, d]), index.parent(c), index.parent(b"x")) == (4, 4, b, None)
    told = [(chain.parent, unpack_keys(chain.keys)) for chain in index.chains()]
    assert told == [(b"", [a, b]), (a, [d]), (b, [c])]
    index.apply([Removed(pack_keys([c, b])), Stored(a, pack_keys([b]))])
    assert [(chain.parent, unpack_keys(chain.keys)) for chain in index.chains()] == [(b"", [a, d]), (a, [b])]
    index.apply([Cleared()])
    assert (len(index), list(index.chains())) == (0, [])
