from kvbus_worker.core.load_pacing import LoadPacing
from kvbus_worker.core.offload import OffloadBatch, OffloadQueue
from kvbus_worker.engines.base import BlocksStored


def _chain(parent: bytes, keys: bytes) -> BlocksStored:
    split = tuple(bytes([key]) for key in keys)
    return BlocksStored(parent, split, tuple(b"" for _ in split))


def test_blocks_leave_in_chains_of_at_most_a_batch() -> None:
    queue = OffloadQueue(limit_blocks=10, batch_blocks=2)
    queue.push(_chain(b"", b"abc"))
    queue.push(_chain(b"c", b"d"))
    queue.push(_chain(b"", b"x"))
    present = {b"a", b"b", b"c", b"d", b"x"}
    batches = [queue.take(present) for _ in range(4)]
    assert batches == [
        OffloadBatch(b"", (b"a", b"b")),
        OffloadBatch(b"b", (b"c", b"d")),
        OffloadBatch(b"", (b"x",)),
        None,
    ]


def test_blocks_that_left_g1_are_skipped() -> None:
    queue = OffloadQueue(limit_blocks=10, batch_blocks=8)
    queue.push(_chain(b"", b"abc"))
    assert queue.take({b"a", b"c"}) == OffloadBatch(b"", (b"a",))
    assert queue.take({b"a", b"c"}) == OffloadBatch(b"b", (b"c",))
    queue.push(_chain(b"", b"abc"))
    assert queue.take(set()) is None
    assert len(queue) == 0
    assert (queue.evicted, queue.dropped) == (4, 0)


def test_a_full_queue_drops_its_oldest_blocks() -> None:
    queue = OffloadQueue(limit_blocks=2, batch_blocks=8)
    queue.push(_chain(b"", b"abc"))
    assert (len(queue), queue.dropped) == (2, 1)
    assert queue.take({b"a", b"b", b"c"}) == OffloadBatch(b"a", (b"b", b"c"))


def test_a_batch_that_is_put_back_is_the_next_one_as_far_as_there_is_room() -> None:
    queue = OffloadQueue(limit_blocks=4, batch_blocks=2)
    queue.push(_chain(b"", b"abc"))
    present = {bytes([key]) for key in b"abcxyz"}
    batch = queue.take(present)
    assert batch is not None
    queue.put_back(batch)
    assert queue.take(present) == batch == OffloadBatch(b"", (b"a", b"b"))
    queue.push(_chain(b"", b"xy"))
    queue.put_back(batch)
    assert (len(queue), queue.dropped) == (4, 1), "the beginning, which is the oldest"
    assert queue.take(present) == OffloadBatch(b"a", (b"b", b"c"))
    queue.push(_chain(b"y", b"zz"))
    queue.put_back(batch)
    assert (len(queue), queue.dropped) == (4, 3)


def test_blocks_that_kvbm_has_are_not_queued() -> None:
    queue = OffloadQueue(limit_blocks=9, batch_blocks=8)
    queue.push(_chain(b"", b"abc"), skip={b"a", b"b"})
    assert queue.take({b"a", b"b", b"c"}) == OffloadBatch(b"b", (b"c",))


def test_a_new_kvbm_is_offered_the_beginnings_of_the_chains() -> None:
    queue = OffloadQueue(limit_blocks=2, batch_blocks=8)
    queue.push(_chain(b"", b"z"))
    queue.offer([(b"a", b""), (b"b", b"a"), (b"c", b"b")])
    assert queue.take({b"a", b"b", b"c", b"z"}) == OffloadBatch(b"", (b"a", b"b"))


def test_load_is_told_soon_after_a_change_but_never_too_often() -> None:
    pacing = LoadPacing(min_interval_s=0.25, idle_interval_s=2.0)
    assert pacing.wait_s(100.0) == 0.0
    pacing.published(100.0)
    assert pacing.wait_s(100.0) == 2.0
    pacing.changed()
    assert pacing.wait_s(100.1) == 0.25 - (100.1 - 100.0)
    assert pacing.wait_s(100.5) == 0.0
    pacing.published(100.5)
    assert pacing.wait_s(101.0) == 1.5
