"""Records of G3's journal: what lies in which slot, and what is gone.

All records have one size, so a damaged one costs itself and nothing behind it, and each begins with a checksum over its rest. The
last record about a key counts; the last one about a slot says whose it is.

    0   XXH3-64 of bytes 8..255         40  checksum of the block's data
    8   magic and version               48  key
    12  what (1 kept, 2 gone)           64  parent (zeros: none)
    13  class of retention              80  tenant, at most 128 bytes
    14  has a parent                    208 zeros
    15  bytes of the tenant's name
    16  segment, slot, depth (u32)
    28  priority (i32)
    32  expiry, unix time (NaN: none)

Numbers are little-endian.
"""

import math
import struct
from collections.abc import Iterator
from hashlib import blake2b

import msgspec
import xxhash

from kvbus_blocks.keys import KEY_BYTES, ROOT
from kvbus_blocks.retention import Directive, Kind

RECORD_BYTES = 256
_MAGIC = b"kvj1"
_LAYOUT = struct.Struct("<4sBBBBIIIidQ16s16s128s48x")
_SUM = struct.Struct("<Q")
_KEPT, _GONE = 1, 2
_CLASSES: tuple[Kind, ...] = ("normal", "pinned", "ephemeral")
_MAX_TENANT_BYTES = 128
_MAX_PRIORITY = (1 << 31) - 1


class Kept(msgspec.Struct, frozen=True):
    """A block lies in a slot. The directive's time is unix time."""

    key: bytes
    parent: bytes
    depth: int
    checksum: int
    segment: int
    slot: int
    directive: Directive = Directive()


class Gone(msgspec.Struct, frozen=True):
    key: bytes


Record = Kept | Gone


def encode(record: Record) -> bytes:
    """A tenant's name that is too long becomes a hash of it."""
    if isinstance(record, Gone):
        rest = _LAYOUT.pack(_MAGIC, _GONE, 0, 0, 0, 0, 0, 0, 0, math.nan, 0, record.key, b"", b"")
    else:
        directive = record.directive
        tenant = directive.tenant.encode("utf-8", "surrogatepass")
        if len(tenant) > _MAX_TENANT_BYTES:
            tenant = b"hash:" + blake2b(tenant, digest_size=16).hexdigest().encode()
        rest = _LAYOUT.pack(
            _MAGIC,
            _KEPT,
            _CLASSES.index(directive.kind),
            record.parent != ROOT,
            len(tenant),
            record.segment,
            record.slot,
            record.depth,
            max(-_MAX_PRIORITY, min(_MAX_PRIORITY, directive.priority)),
            math.nan if directive.expires_s is None else directive.expires_s,
            record.checksum,
            record.key,
            record.parent,
            tenant,
        )
    return _SUM.pack(xxhash.xxh3_64_intdigest(rest)) + rest


def decode(data: bytes | bytearray | memoryview) -> Record | None:
    """None for what is no whole record."""
    if len(data) != RECORD_BYTES or _SUM.unpack_from(data)[0] != xxhash.xxh3_64_intdigest(data[8:]):
        return None
    fields = _LAYOUT.unpack_from(data, 8)
    magic, what, kind, has_parent, tenant_bytes, segment, slot, depth, priority, expires, checksum = fields[:11]
    key, parent, tenant = fields[11:]
    if magic != _MAGIC or what not in (_KEPT, _GONE) or kind >= len(_CLASSES):
        return None
    if what == _GONE:
        return Gone(key)
    try:
        name = tenant[:tenant_bytes].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    directive = Directive(_CLASSES[kind], priority, None if math.isnan(expires) else expires, name)
    return Kept(key, parent if has_parent else ROOT, depth, checksum, segment, slot, directive)


def decode_all(data: bytes | bytearray | memoryview) -> Iterator[Record | None]:
    """Every record of a journal in order, None for each damaged one; a cut last one counts as damaged."""
    view = memoryview(data)
    for at in range(0, len(view), RECORD_BYTES):
        yield decode(view[at : at + RECORD_BYTES])


assert _LAYOUT.size + _SUM.size == RECORD_BYTES  # noqa: S101
assert KEY_BYTES == 16  # noqa: S101
