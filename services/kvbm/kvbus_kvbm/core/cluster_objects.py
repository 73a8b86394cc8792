"""How blocks lie in the store of the cluster: one object each, a header and the block's bytes.

Names begin with the version of this format, so that kvbm of two versions use one store without taking each other's objects for
damaged ones: ``v1/blocks/<layout>/<first two digits of the key>/<key>``.
"""

import math
import struct
from hashlib import blake2b

import msgspec
import xxhash

from kvbus_blocks.keys import KEY_BYTES, ROOT
from kvbus_blocks.retention import KINDS, MAX_PRIORITY, Directive
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec

VERSION = 1
HEADER_BYTES = 256
_MAGIC = b"KVBUS-G4"
_TENANT_BYTES = 64
# magic, version, kind, has parent, priority, depth, length, checksum, expiry in unix time (infinite: none), key, parent, layout,
# length of the tenant's tag, tag
_FIELDS = struct.Struct(f"<8sHBBiIQQd{KEY_BYTES}s{KEY_BYTES}s16sB{_TENANT_BYTES}s")
_SUM = struct.Struct("<Q")


class BadObject(Exception):
    """It is not what its name says."""


class StoredBlock(msgspec.Struct, frozen=True):
    """``meta``: its directive's time is in unix time."""

    meta: BlockMeta
    length: int


def layout_tag(spec: PoolSpec) -> bytes:
    """What blocks must have in common besides their keys. The keys name the model."""
    fields = (spec.kv_layout, spec.block_bytes, spec.block_size)
    return blake2b(msgspec.msgpack.encode(fields), digest_size=16, person=b"kvbus.g4.layout").digest()


def object_name(layout: bytes, key: bytes) -> str:
    name = key.hex()
    return f"v{VERSION}/blocks/{layout.hex()}/{name[:2]}/{name}"


def object_bytes(spec: PoolSpec) -> int:
    return HEADER_BYTES + spec.block_bytes


def tenant_tag(tenant: str) -> str:
    """The name itself, or what stands for a long one."""
    return tenant if len(tenant.encode()) <= _TENANT_BYTES else blake2b(tenant.encode(), digest_size=16).hexdigest()


def encode_header(meta: BlockMeta, layout: bytes, length: int) -> bytes:
    directive = meta.directive
    tenant = tenant_tag(directive.tenant).encode()
    fields = _FIELDS.pack(
        _MAGIC,
        VERSION,
        KINDS.index(directive.kind),
        meta.parent != ROOT,
        max(-MAX_PRIORITY, min(directive.priority, MAX_PRIORITY)),
        meta.depth,
        length,
        meta.checksum,
        math.inf if directive.expires_s is None else directive.expires_s,
        meta.key,
        meta.parent,
        layout,
        len(tenant),
        tenant,
    )
    padded = fields.ljust(HEADER_BYTES - _SUM.size, b"\0")
    return padded + _SUM.pack(xxhash.xxh3_64_intdigest(padded))


def decode_header(header: bytes | memoryview) -> tuple[StoredBlock, bytes]:
    """The block and its layout. Raise BadObject."""
    if len(header) != HEADER_BYTES:
        raise BadObject("shorter than a header")
    padded = header[: -_SUM.size]
    if _SUM.unpack(header[-_SUM.size :])[0] != xxhash.xxh3_64_intdigest(padded):
        raise BadObject("the header's checksum does not hold")
    (
        magic,
        version,
        kind,
        has_parent,
        priority,
        depth,
        length,
        checksum,
        expires_s,
        key,
        parent,
        layout,
        size,
        tenant,
    ) = _FIELDS.unpack_from(padded)
    if magic != _MAGIC or version != VERSION or kind >= len(KINDS) or size > _TENANT_BYTES or math.isnan(expires_s):
        raise BadObject("no header of this version")
    try:
        tag = tenant[:size].decode()
    except UnicodeDecodeError:
        raise BadObject("a tenant's tag that is no text") from None
    directive = Directive(KINDS[kind], priority, None if expires_s == math.inf else expires_s, tag)
    meta = BlockMeta(key, parent if has_parent else ROOT, depth, checksum, directive)
    return StoredBlock(meta, length), layout


def check_object(data: memoryview, key: bytes, layout: bytes, block_bytes: int) -> BlockMeta:
    """What the object holds, verified to the last byte; its directive's time is unix time. Raise BadObject."""
    stored, found = decode_header(data[:HEADER_BYTES])
    body = data[HEADER_BYTES:]
    if stored.meta.key != key or found != layout:
        raise BadObject("another block")
    if stored.length != block_bytes or len(body) != block_bytes:
        raise BadObject("another length")
    if xxhash.xxh3_64_intdigest(body) != stored.meta.checksum:
        raise BadObject("the checksum does not hold")
    return stored.meta
