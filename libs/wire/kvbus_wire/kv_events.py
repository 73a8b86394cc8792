"""The KV event stream: which instance holds which block, in order.

Events of one instance count 1, 2, 3.. per incarnation; event i of a batch has the number ``first_seq + i``. Binary by default;
``to_json`` is the readable form (keys in hexadecimal) that ``KVBUS_KV_EVENT_ENCODING=json`` puts on the bus.
"""

from typing import Any

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_wire.message import CONTENT_TYPE_JSON, DecodeFailed, Decoder, Message, encode
from kvbus_wire.packing import unpack_keys


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """``keys`` (packed) were stored one after the other below ``parent`` (empty: the root)."""

    parent: bytes
    keys: bytes


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """``keys`` (packed) are gone from this tier."""

    keys: bytes


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """All blocks of the instance are gone from this tier."""


KvEvent = Stored | Removed | Cleared


class KvEvents(Message, frozen=True):
    """A batch of one instance's events for one tier (``g1`` device, ``g2`` host memory, ``g3`` NVMe, ``g4`` cluster store)."""

    instance_id: str
    incarnation: int
    model: str
    first_seq: int
    events: tuple[KvEvent, ...]
    tier: str = "g1"
    block_size: int = 16
    at_ms: int = 0

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1


_decoder = Decoder.of(KvEvents)


def to_json(batch: KvEvents) -> dict[str, Any]:
    """The readable form as plain JSON types."""
    events: list[dict[str, Any]] = []
    for event in batch.events:
        match event:
            case Stored(parent, keys):
                events.append({"kind": "stored", "parent": parent.hex(), "keys": [k.hex() for k in unpack_keys(keys)]})
            case Removed(keys):
                events.append({"kind": "removed", "keys": [k.hex() for k in unpack_keys(keys)]})
            case Cleared():
                events.append({"kind": "cleared"})
    return {
        "instance_id": batch.instance_id,
        "incarnation": batch.incarnation,
        "model": batch.model,
        "tier": batch.tier,
        "block_size": batch.block_size,
        "first_seq": batch.first_seq,
        "at_ms": batch.at_ms,
        "events": events,
    }


class _JsonEvent(msgspec.Struct):
    kind: str
    parent: str = ""
    keys: list[str] = []


class _JsonBatch(msgspec.Struct):
    instance_id: str
    incarnation: int
    model: str
    first_seq: int
    events: list[_JsonEvent]
    tier: str = "g1"
    block_size: int = 16
    at_ms: int = 0


_json_decoder = msgspec.json.Decoder(_JsonBatch)


def _event_from_json(event: _JsonEvent) -> KvEvent:
    keys = b"".join(bytes.fromhex(key) for key in event.keys)
    if len(keys) != KEY_BYTES * len(event.keys):
        raise DecodeFailed("a key is not 16 bytes")
    match event.kind:
        case "stored":
            return Stored(bytes.fromhex(event.parent), keys)
        case "removed":
            return Removed(keys)
        case "cleared":
            return Cleared()
    raise DecodeFailed(f"unknown event kind {event.kind!r}")


def encode_events(batch: KvEvents, *, as_json: bool = False) -> bytes:
    return msgspec.json.encode(to_json(batch)) if as_json else encode(batch)


def decode_events(data: bytes, content_type: str = "") -> KvEvents:
    """Either form, told apart by the content type. Raise DecodeFailed."""
    if content_type != CONTENT_TYPE_JSON:
        batch: KvEvents = _decoder.decode(data)
        return batch
    try:
        raw = _json_decoder.decode(data)
        events = tuple(_event_from_json(event) for event in raw.events)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DecodeFailed(str(error)) from error
    return KvEvents(
        instance_id=raw.instance_id,
        incarnation=raw.incarnation,
        model=raw.model,
        first_seq=raw.first_seq,
        events=events,
        tier=raw.tier,
        block_size=raw.block_size,
        at_ms=raw.at_ms,
    )
