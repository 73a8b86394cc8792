"""Asks instances which blocks they hold."""

from collections.abc import AsyncIterator

import msgspec

from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode
from kvbus_wire.worker import BlockSnapshot, BlockSnapshotChunk

CHAINS_PER_SLICE = 256
"""A part is handed on in slices, between which the loop does other work: a large one takes a tenth of a second to store."""


class SnapshotClient:
    """Snapshots over the bus, part by part."""

    def __init__(self, bus: Bus, timeout_s: float, max_parts: int) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._max_parts = max_parts

    async def parts(self, instance_id: str) -> AsyncIterator[BlockSnapshotChunk]:
        """Raise RequestFailed: nobody answers, the snapshot has expired, or it has no end."""
        request = BlockSnapshot()
        for _ in range(self._max_parts):
            part: BlockSnapshotChunk = await self._bus.request(
                self._bus.subjects.control(instance_id), request, BlockSnapshotChunk, timeout_s=self._timeout_s
            )
            for first in range(0, max(1, len(part.chains)), CHAINS_PER_SLICE):
                yield msgspec.structs.replace(part, chains=part.chains[first : first + CHAINS_PER_SLICE])
            if part.next_cursor is None:
                return
            if part.next_cursor <= request.cursor:
                raise RequestFailed.of(ErrorCode.INTERNAL, f"the snapshot goes back to {part.next_cursor}")
            request = BlockSnapshot(cursor=part.next_cursor, snapshot_id=part.snapshot_id)
        raise RequestFailed.of(ErrorCode.INTERNAL, f"the snapshot has more than {self._max_parts} parts")
