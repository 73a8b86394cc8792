import pytest

from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import unpack_keys
from kvbus_wire.worker import BlockSnapshot
from kvbus_worker.core.snapshots import Snapshots
from kvbus_worker.engines.base import EngineError

KEYS = [bytes([i]) * 16 for i in range(6)]
LINKS = [(KEYS[0], b""), (KEYS[1], KEYS[0]), (KEYS[2], KEYS[1]), (KEYS[3], KEYS[0]), (KEYS[4], KEYS[3])]


def _snapshots(**kwargs: float) -> Snapshots:
    return Snapshots(limit=2, ttl_s=10.0, chunk_blocks=int(kwargs.get("chunk_blocks", 2)))


def test_chunks_of_one_snapshot_add_up_to_all_links_at_one_event_number() -> None:
    snapshots = _snapshots()
    seen: list[tuple[bytes, bytes]] = []
    part = snapshots.answer(BlockSnapshot(), lambda: (LINKS, 7), 0.0)
    while True:
        assert part.kv_seq == 7
        for chain in part.chains:
            parent = chain.parent
            for key in unpack_keys(chain.keys):
                seen.append((key, parent))
                parent = key
        if part.next_cursor is None:
            break
        message = BlockSnapshot(snapshot_id=part.snapshot_id, cursor=part.next_cursor)
        part = snapshots.answer(message, lambda: ([], 99), 1.0)
    assert seen == LINKS


def test_an_empty_cache_gives_one_empty_chunk() -> None:
    part = _snapshots().answer(BlockSnapshot(), lambda: ([], 0), 0.0)
    assert (part.chains, part.next_cursor) == ((), None)


def test_a_chunk_may_be_asked_for_again_until_the_snapshot_expires() -> None:
    snapshots = _snapshots()
    first = snapshots.answer(BlockSnapshot(), lambda: (LINKS, 7), 0.0)
    again = BlockSnapshot(snapshot_id=first.snapshot_id, cursor=4)
    assert snapshots.answer(again, lambda: ([], 0), 9.0) == snapshots.answer(again, lambda: ([], 0), 18.0)
    with pytest.raises(EngineError) as caught:
        snapshots.answer(again, lambda: ([], 0), 28.0)
    assert caught.value.reply.code is ErrorCode.GONE


def test_the_oldest_snapshot_makes_room_at_the_limit() -> None:
    snapshots = _snapshots()
    first = snapshots.answer(BlockSnapshot(), lambda: (LINKS, 1), 0.0)
    snapshots.answer(BlockSnapshot(), lambda: (LINKS, 2), 0.0)
    snapshots.answer(BlockSnapshot(), lambda: (LINKS, 3), 0.0)
    assert len(snapshots) == 2
    with pytest.raises(EngineError):
        snapshots.answer(BlockSnapshot(snapshot_id=first.snapshot_id, cursor=2), lambda: ([], 0), 0.0)


@pytest.mark.parametrize("cursor", [-1, 6])
def test_a_cursor_outside_of_the_snapshot_is_refused(cursor: int) -> None:
    snapshots = _snapshots()
    first = snapshots.answer(BlockSnapshot(), lambda: (LINKS, 1), 0.0)
    with pytest.raises(EngineError) as caught:
        snapshots.answer(BlockSnapshot(snapshot_id=first.snapshot_id, cursor=cursor), lambda: ([], 0), 0.0)
    assert caught.value.reply.code is ErrorCode.INVALID_REQUEST
