"""What a kvbm writes down about the blocks it answers for in the store of the cluster, so that it knows them after a restart.

The log is a sequence of objects. One is written before the blocks that it names: whatever lies in the store is in somebody's log,
and nothing takes room that nobody counts.
"""

import msgspec
import xxhash

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.spec import PoolSpec

_MAGIC = b"KVBUSG4L"


class BadLog(Exception):
    """It cannot be read."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """``created``: by us, so that it is ours to delete. Directives in unix time."""

    key: bytes
    parent: bytes
    depth: int
    checksum: int
    created: bool
    directive: Directive = Directive()


class SpecRecords(msgspec.Struct, frozen=True, array_like=True):
    """Of one model and layout; parents before children. ``gone`` counts before ``kept``."""

    spec: PoolSpec
    kept: list[Kept]
    gone: list[bytes] = []


class LogPart(msgspec.Struct, frozen=True, array_like=True):
    """``whole``: it says everything, and what was written before it counts no more."""

    whole: bool
    records: list[SpecRecords]


_decoder = msgspec.msgpack.Decoder(LogPart)
_encoder = msgspec.msgpack.Encoder()


def encode_log(part: LogPart) -> bytes:
    body = _encoder.encode(part)
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def decode_log(data: bytes | memoryview) -> LogPart:
    """Raise BadLog."""
    body = data[16:]
    if bytes(data[:8]) != _MAGIC or bytes(data[8:16]) != xxhash.xxh3_64_digest(body):
        raise BadLog("its checksum does not hold")
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadLog(str(error)) from error


def owner_prefix(owner: str) -> str:
    """Under which the parts of an owner's log lie. The name is the person's choice, so any text may stand in it."""
    return f"v1/owners/{owner.encode().hex()}"


def log_name(owner: str, life: int, number: int) -> str:
    """In the order of writing. ``life``: grows with each start of the owner."""
    return f"{owner_prefix(owner)}/{life:016x}-{number:010x}"
