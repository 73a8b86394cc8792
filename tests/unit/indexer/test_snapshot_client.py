from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvbus_indexer.adapters.snapshots import CHAINS_PER_SLICE, SnapshotClient
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_wire.subjects import Subjects
from kvbus_wire.worker import BlockSnapshot, BlockSnapshotChunk, SnapshotChain


def part(cursor: int | None, chains: int = 1) -> BlockSnapshotChunk:
    return BlockSnapshotChunk(
        snapshot_id="s",
        instance_id="w",
        incarnation=1,
        model="m",
        tier="g1",
        kv_seq=0,
        chains=tuple(SnapshotChain(parent=b"", keys=bytes(16)) for _ in range(chains)),
        next_cursor=cursor,
    )


class ScriptedBus:
    """Answers with what it was given, in order."""

    def __init__(self, parts: Sequence[BlockSnapshotChunk]) -> None:
        self.subjects = Subjects("test")
        self.requests: list[BlockSnapshot] = []
        self._parts = list(parts)

    async def request(self, subject: str, message: BlockSnapshot, *replies: Any, timeout_s: float) -> Any:
        self.requests.append(message)
        return self._parts.pop(0)


async def fetch(bus: ScriptedBus, max_parts: int = 10) -> list[BlockSnapshotChunk]:
    client = SnapshotClient(cast("Bus", bus), 1.0, max_parts)
    return [chunk async for chunk in client.parts("w")]


async def test_parts_are_asked_for_until_the_last() -> None:
    bus = ScriptedBus([part(4), part(9), part(None)])
    assert len(await fetch(bus)) == 3
    assert [(r.snapshot_id, r.cursor) for r in bus.requests] == [("", 0), ("s", 4), ("s", 9)]


async def test_a_large_part_is_handed_on_in_slices() -> None:
    slices = await fetch(ScriptedBus([part(None, chains=2 * CHAINS_PER_SLICE + 1)]))
    assert [len(chunk.chains) for chunk in slices] == [CHAINS_PER_SLICE, CHAINS_PER_SLICE, 1]


async def test_an_empty_part_is_handed_on_too() -> None:
    assert [chunk.chains for chunk in await fetch(ScriptedBus([part(None, chains=0)]))] == [()]


@pytest.mark.parametrize("cursors", [[3, 3], [3, 1]])
async def test_a_snapshot_that_goes_in_circles_is_a_failure(cursors: list[int]) -> None:
    with pytest.raises(RequestFailed, match="goes back"):
        await fetch(ScriptedBus([part(cursor) for cursor in cursors]))


async def test_a_snapshot_without_end_is_a_failure() -> None:
    with pytest.raises(RequestFailed, match="more than 3 parts"):
        await fetch(ScriptedBus([part(cursor) for cursor in range(1, 9)]), max_parts=3)
