"""Reads the event stream again where something is missing."""

from typing import Any

from kvbus_indexer.core.instance import Replay
from kvbus_runtime.bus import Bus
from kvbus_runtime.event_log import EventLog
from kvbus_wire.kv_events import KvEvents, decode_events
from kvbus_wire.message import DecodeFailed


class ReplayClient:
    """``max_messages``: of one replay; whoever has lost more is asked for a snapshot."""

    def __init__(self, bus: Bus, max_messages: int, log: Any) -> None:
        self._log = EventLog(bus)
        self._subjects = bus.subjects
        self._max_messages = max_messages
        self._logger = log

    async def batches(self, instance_id: str, replay: Replay) -> list[tuple[int, KvEvents]]:
        """What the stream holds of the feed, with the place in it, in the order of the events' numbers: a late one may lie behind
        those that followed it. Raise RequestFailed."""
        subject = self._subjects.kv_events(replay.feed.model, instance_id)
        found = []
        for message in await self._log.range(subject, replay.after + 1, limit=self._max_messages):
            try:
                batch = decode_events(message.data, message.headers.get("Content-Type", ""))
            except DecodeFailed as problem:
                self._logger.warning("bad_event_batch", subject=subject, stream_seq=message.seq, error=str(problem))
                continue
            found.append((message.seq, batch))
        return sorted(found, key=lambda entry: (entry[1].incarnation, entry[1].first_seq))
