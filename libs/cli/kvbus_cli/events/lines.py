"""KV events as lines of text or JSON, and counted. Pure."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored
from kvbus_wire.packing import unpack_keys

KINDS = ("stored", "removed", "cleared")
TIERS = ("g1", "g2", "g3", "g4")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Empty fields select everything."""

    worker: str = ""
    model: str = ""
    kind: str = ""
    tier: str = ""

    def takes_batch(self, batch: KvEvents) -> bool:
        return (
            self.worker in ("", batch.instance_id) and self.model in ("", batch.model) and self.tier in ("", batch.tier)
        )

    def takes_kind(self, kind: str) -> bool:
        return self.kind in ("", kind)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event on its own, as `--json` prints it. Keys in hexadecimal; ``seq`` counts per incarnation."""

    at_ms: int
    instance_id: str
    incarnation: int
    seq: int
    model: str
    tier: str
    kind: str
    block_size: int
    parent: str = ""
    keys: tuple[str, ...] = ()


def kind_of(event: KvEvent) -> str:
    match event:
        case Stored():
            return "stored"
        case Removed():
            return "removed"
        case Cleared():
            return "cleared"


def selected(batch: KvEvents, selection: Selection) -> Iterator[Event]:
    """The events of a batch that the selection takes, in order."""
    if not selection.takes_batch(batch):
        return
    for offset, event in enumerate(batch.events):
        kind = kind_of(event)
        if not selection.takes_kind(kind):
            continue
        keys = () if isinstance(event, Cleared) else tuple(key.hex() for key in unpack_keys(event.keys))
        yield Event(
            at_ms=batch.at_ms,
            instance_id=batch.instance_id,
            incarnation=batch.incarnation,
            seq=batch.first_seq + offset,
            model=batch.model,
            tier=batch.tier,
            kind=kind,
            block_size=batch.block_size,
            parent=event.parent.hex() if isinstance(event, Stored) else "",
            keys=keys,
        )


def as_json(event: Event) -> str:
    return msgspec.json.encode(event).decode()


def as_text(event: Event) -> str:
    """One line; of the keys the beginnings of the first and the last."""
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
    head = f"{at} {event.instance_id:<14} {event.tier} {event.kind:<8} #{event.seq:<7}"
    if not event.keys:
        return f"{head} {event.model}"
    keys = event.keys[0][:12] if len(event.keys) == 1 else f"{event.keys[0][:12]}..{event.keys[-1][:12]}"
    parent = f" after {event.parent[:12]}" if event.parent else ""
    return f"{head} {len(event.keys):>4} blocks {keys}{parent} {event.model}"


class Rates:
    """Blocks and events per instance, tier and kind since they were last taken."""

    def __init__(self) -> None:
        self._events: Counter[tuple[str, str, str]] = Counter()
        self._blocks: Counter[tuple[str, str, str]] = Counter()

    def add(self, event: Event) -> None:
        group = (event.instance_id, event.tier, event.kind)
        self._events[group] += 1
        self._blocks[group] += len(event.keys)

    def take(self, seconds: float) -> list[dict[str, Any]]:
        """One row per group that had events, sorted; rates per second."""
        return [
            {**group, "events_per_s": round(events / seconds, 2), "blocks_per_s": round(blocks / seconds, 2)}
            for group, events, blocks in self._take()
        ]

    def take_counts(self) -> list[dict[str, Any]]:
        """The same as plain numbers: of what is read from the past nobody knows how fast it came."""
        return [{**group, "events": events, "blocks": blocks} for group, events, blocks in self._take()]

    def _take(self) -> list[tuple[dict[str, str], int, int]]:
        rows = [
            (dict(zip(("instance_id", "tier", "kind"), group, strict=True)), count, self._blocks[group])
            for group, count in sorted(self._events.items())
        ]
        self._events.clear()
        self._blocks.clear()
        return rows


def rates_text(rows: list[dict[str, Any]]) -> str:
    """Of rates, or of counts."""
    return "\n".join(f"{row['instance_id']:<14} {row['tier']} {row['kind']:<8} {_numbers(row)}" for row in rows)


def _numbers(row: dict[str, Any]) -> str:
    if "events" in row:
        return f"{row['events']:>9} events   {row['blocks']:>9} blocks"
    return f"{row['events_per_s']:>9.1f} events/s {row['blocks_per_s']:>9.1f} blocks/s"
