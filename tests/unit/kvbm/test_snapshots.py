from itertools import count

import pytest

from kvbus_kvbm.core.errors import SnapshotGone
from kvbus_kvbm.core.snapshots import Chunk, Feed, Snapshots
from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import unpack_keys
from kvbus_wire.worker import SnapshotChain


def make(chunk_keys: int = 3, max_snapshots: int = 2) -> Snapshots:
    numbers = count(1)
    return Snapshots(chunk_keys=chunk_keys, max_snapshots=max_snapshots, ttl_s=30.0, new_id=lambda: f"s{next(numbers)}")


def chain(first: int, last: int, parent: int = 0) -> SnapshotChain:
    keys = b"".join(i.to_bytes(16, "big") for i in range(first, last + 1))
    return SnapshotChain(parent=parent.to_bytes(16, "big") if parent else b"", keys=keys)


def fetch(snapshots: Snapshots, first: Chunk) -> list[Chunk]:
    chunks = [first]
    while chunks[-1].next_cursor is not None:
        chunks.append(snapshots.chunk(first.snapshot_id, chunks[-1].next_cursor, 0.0))
    return chunks


def test_all_feeds_come_in_chunks_of_bounded_size_with_parents_right_across_the_cuts() -> None:
    snapshots = make(chunk_keys=3)
    feeds = [
        Feed("a", "g2", 7, (chain(1, 5), chain(6, 7, parent=2))),
        Feed("b", "g2", 9, (chain(20, 20),)),
        Feed("c", "g2", 4, ()),
    ]
    chunks = fetch(snapshots, snapshots.take(feeds, 0.0))
    assert [(c.feed.model, c.feed.kv_seq) for c in chunks] == [("a", 7), ("a", 7), ("a", 7), ("b", 9), ("c", 4)]
    assert all(sum(len(unpack_keys(part.keys)) for part in c.feed.chains) <= 3 for c in chunks)
    edges: dict[int, int] = {}
    for chunk in chunks[:3]:
        for part in chunk.feed.chains:
            above = int.from_bytes(part.parent, "big")
            for key in unpack_keys(part.keys):
                edges[int.from_bytes(key, "big")] = above
                above = int.from_bytes(key, "big")
    assert edges == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 2, 7: 6}


def test_without_any_model_the_snapshot_is_one_empty_chunk() -> None:
    snapshots = make()
    chunk = snapshots.take([], 0.0)
    assert (chunk.feed, chunk.next_cursor) == (Feed("", "g2", 0, ()), None)
    assert len(snapshots) == 0


def test_a_chunk_can_be_asked_for_again() -> None:
    snapshots = make(chunk_keys=1)
    first = snapshots.take([Feed("a", "g2", 1, (chain(1, 3),))], 0.0)
    assert snapshots.chunk(first.snapshot_id, 2, 0.0) == snapshots.chunk(first.snapshot_id, 2, 1.0)
    assert snapshots.chunk(first.snapshot_id, 0, 1.0) == first


def test_a_snapshot_is_forgotten_after_its_time_or_for_younger_ones() -> None:
    snapshots = make(chunk_keys=1, max_snapshots=2)
    ids = [snapshots.take([Feed("a", "g2", 1, (chain(1, 2),))], float(i)).snapshot_id for i in range(3)]
    for bad_id, cursor, now_s in ((ids[0], 1, 3.0), (ids[1], 2, 3.0), (ids[1], -1, 3.0), ("none", 0, 3.0)):
        with pytest.raises(SnapshotGone) as caught:
            snapshots.chunk(bad_id, cursor, now_s)
        assert caught.value.reply.code is ErrorCode.GONE
    assert snapshots.next_due_s() == 31.0
    snapshots.chunk(ids[1], 1, 20.0)
    assert snapshots.next_due_s() == 32.0
    snapshots.expire(32.0)
    assert len(snapshots) == 1
    snapshots.expire(50.0)
    assert snapshots.next_due_s() is None
