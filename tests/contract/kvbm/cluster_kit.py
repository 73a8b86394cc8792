"""A host with G4 alone, for tests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

import structlog

from kvbus_blocks.retention import PLAIN, Directive
from kvbus_kvbm.adapters.cluster.store import ClusterStore
from kvbus_kvbm.adapters.cluster.tier import ClusterTier
from kvbus_kvbm.core.cluster_limits import ClusterLimits
from kvbus_kvbm.core.cluster_objects import layout_tag, object_bytes, object_name
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_testkit.kvbm import key
from kvbus_testkit.timing import scaled
from kvbus_transfer import checksum
from kvbus_wire.kv_events import Cleared, KvEvent, Removed, Stored
from kvbus_wire.packing import unpack_keys

SPEC = PoolSpec("tiny", "layout", 10_000, 16)
ONE = object_bytes(SPEC)


class Host:
    """A kvbm's tier, and what it has told of."""

    def __init__(self, store: ClusterStore, owner: str, blocks: int, **limits: Any) -> None:
        self.told: set[bytes] = set()
        self.store = store
        fields = {
            "read_deadline_s": scaled(10),
            "write_deadline_s": scaled(10),
            "flush_s": 0.05,
            "rest_s": 0.05,
            **limits,
        }
        self.tier = ClusterTier(
            store,
            ClusterLimits(capacity_bytes=blocks * ONE, **fields),
            owner=owner,
            changed=self._changed,
            log=structlog.get_logger(),
        )

    def _changed(self, spec: PoolSpec, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent, keys):
                    assert parent == b"" or parent in self.told
                    self.told |= set(unpack_keys(keys))
                case Removed(keys):
                    assert set(unpack_keys(keys)) <= self.told
                    self.told -= set(unpack_keys(keys))
                case Cleared():
                    self.told.clear()
        assert self.told == {meta.key for spec in self.tier.specs for meta in self.blocks(spec)}

    def blocks(self, spec: PoolSpec = SPEC) -> list[BlockMeta]:
        """Of which the tier has told."""
        keys = self.tier._state.index.shelf(spec).blocks
        return [meta for key in keys if (meta := self.tier.find(spec, key)) is not None]

    async def write(self, names: Sequence[str], directive: Directive = PLAIN, spec: PoolSpec = SPEC) -> list[bool]:
        metas, data = chain(names, directive)
        return await self.tier.write(spec, metas, data)

    async def read(self, names: Sequence[str]) -> list[str]:
        """The names of those that came, with the right bytes."""
        into = [memoryview(bytearray(SPEC.block_bytes)) for _ in names]
        metas = await self.tier.read(SPEC, [key(name) for name in names], into)
        for meta, name, view in zip(metas, names, into, strict=False):
            assert meta.key == key(name)
            assert view == content(name)
        return list(names[: len(metas)])


@asynccontextmanager
async def host(store: ClusterStore, owner: str = "a", blocks: int = 100, **limits: Any) -> AsyncIterator[Host]:
    it = Host(store, owner, blocks, **limits)
    await it.tier.start()
    try:
        yield it
    finally:
        await it.tier.close()


def content(name: str) -> bytes:
    digest = blake2b(name.encode()).digest()
    return (digest * (SPEC.block_bytes // len(digest) + 1))[: SPEC.block_bytes]


def chain(names: Sequence[str], directive: Directive = PLAIN) -> tuple[list[BlockMeta], list[memoryview]]:
    """Each is the parent of the next; the first is a first block of a prompt."""
    metas, parent = [], b""
    for depth, name in enumerate(names):
        metas.append(BlockMeta(key(name), parent, depth, checksum(content(name)), directive))
        parent = key(name)
    return metas, [memoryview(content(name)) for name in names]


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


async def lies_there(store: ClusterStore, name: str) -> bool:
    return await store.size(object_name(layout_tag(SPEC), key(name))) == ONE
