"""The host tier in virtual time: kvbm's real pool, and what a worker does with it (write through, bring back).

A copy takes time in proportion to its tokens, each worker's copies in one direction one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from kvbus_blocks.index import Owner
from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.pool import Pool, PoolLimits
from kvbus_replay.simulation.clock import VirtualClock
from kvbus_wire.kv_events import KvEvent
from kvbus_wire.packing import pack_keys
from kvbus_wire.records import InstanceRecord, KvbmRecord
from kvbus_worker.core.offload import OffloadBatch, OffloadQueue
from kvbus_worker.core.retention import on_the_wire, worth_saying
from kvbus_worker.engines.base import BlocksStored
from kvbus_worker.engines.mock.block_cache import BlockCache

TIER = "g2"
_MAX_KEYS = 1 << 20


class HostShape(msgspec.Struct, frozen=True, kw_only=True):
    """``g2_tokens``: what the memory of a host holds, 0: there is no kvbm. ``copy_tokens_per_s``: of one worker, in one direction.
    The rest are settings of worker and kvbm."""

    g2_tokens: int = 0
    workers: int = 8
    copy_tokens_per_s: float = 200_000.0
    offload_queue_blocks: int = 8192
    offload_batch_blocks: int = 64
    offload_repair_s: float = 5.0
    lease_s: float = 30.0
    quarantine_s: float = 10.0
    max_leases: int = 4096


class HostTier:
    """The kvbm of one host. ``changed`` hears of what it stores and evicts."""

    def __init__(
        self,
        host_id: str,
        shape: HostShape,
        block_size: int,
        clock: VirtualClock,
        changed: Callable[[Owner, Sequence[KvEvent]], None],
        *,
        lru: bool = False,
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.record = InstanceRecord(
            service="kvbm",
            instance_id=f"kvbm-{host_id}",
            incarnation=1,
            host_id=host_id,
            version="",
            started_ms=0,
            kvbm=KvbmRecord(g2_bytes=0),
        )
        self._owner = Owner(self.record.instance_id, TIER)
        self._clock = clock
        self._changed = changed
        limits = PoolLimits(
            lease_s=shape.lease_s,
            quarantine_s=shape.quarantine_s,
            max_leases_per_instance=shape.max_leases,
            max_keys_per_request=_MAX_KEYS,
            lru=lru,
        )
        self.pool = Pool("replay", max(1, shape.g2_tokens // block_size), limits)

    def copy_s(self, blocks: int) -> float:
        return blocks * self.block_size / self.shape.copy_tokens_per_s

    def pin(self, worker_id: str, keys: Sequence[bytes]) -> tuple[str, int]:
        """A lease on the leading blocks that are there, and how many these are."""
        pinned = self.pool.pin(worker_id, pack_keys(keys), self._clock.now)
        return pinned.lease_id, len(pinned.slots)

    def release(self, lease_id: str) -> None:
        self.pool.release(lease_id, (), self._clock.now)
        self._tell()

    def retain(self, keys: Sequence[bytes], said: Sequence[Directive | None]) -> None:
        """What a call says of the blocks of its prompt."""
        if keys:
            self.pool.retain(pack_keys(keys), on_the_wire(said, self._clock.now), self._clock.now)

    def drop(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.pool.drop_blocks(pack_keys(keys), self._clock.now)
            self._tell()

    def reserve(self, worker_id: str, batch: OffloadBatch, said: Iterable[Directive]) -> tuple[str, list[bool]]:
        """A lease on slots for the blocks that are wanted."""
        now = self._clock.now
        directives = on_the_wire(worth_saying(said), now)
        reserved = self.pool.reserve(worker_id, batch.parent, pack_keys(batch.keys), now, directives)
        self._tell()
        return reserved.lease_id, [slot is not None for slot in reserved.slots]

    def commit(self, lease_id: str, written: Sequence[bool]) -> None:
        self.pool.commit(lease_id, [0 if one else None for one in written], self._clock.now)
        self._tell()

    def _tell(self) -> None:
        events = self.pool.take_events()
        if events:
            self._changed(self._owner, events)


class TierClient:
    """One worker's side: what the worker's kvbm adapter does, without a bus to fail."""

    def __init__(self, worker_id: str, tier: HostTier, cache: BlockCache, clock: VirtualClock) -> None:
        self._worker_id = worker_id
        self._tier = tier
        self._cache = cache
        self._clock = clock
        shape = tier.shape
        self._queue = OffloadQueue(limit_blocks=shape.offload_queue_blocks, batch_blocks=shape.offload_batch_blocks)
        self._is_writing = False
        self._next_repair_s = 0.0
        self._free_at_s = 0.0

    def stored(self, event: BlocksStored) -> None:
        """Blocks are new in device memory: they are written through, in the background."""
        self._queue.push(event)
        if not self._is_writing:
            self._write()

    def retain(self, keys: Sequence[bytes], said: Sequence[Directive | None]) -> None:
        self._tier.retain(keys, said)

    def fetch(self, keys: Sequence[bytes], done: Callable[[int], None]) -> bool:
        """Bring in what the host has of the chain beyond the device; ``done`` gets the number of blocks. False: it has nothing."""
        have = self._cache.leading(keys)
        if have == len(keys):
            return False
        lease_id, count = self._tier.pin(self._worker_id, keys[have:])
        if not count:
            return False
        self._free_at_s = max(self._free_at_s, self._clock.now) + self._tier.copy_s(count)
        wanted = keys[: have + count]
        self._clock.at(self._free_at_s, partial(self._fetched, lease_id, wanted, have, done))
        return True

    def _fetched(self, lease_id: str, keys: Sequence[bytes], have: int, done: Callable[[int], None]) -> None:
        fetched = keys[have:]
        there = self._cache.adopt(keys[have - 1] if have else ROOT, fetched, [b""] * len(fetched))
        self._tier.release(lease_id)
        done(there)

    def _write(self) -> None:
        """The next batch, and so on until nothing waits."""
        while (batch := self._queue.take(self._cache)) is not None:
            lease_id, wanted = self._tier.reserve(self._worker_id, batch, map(self._cache.directive, batch.keys))
            if lease_id:
                self._is_writing = True
                self._clock.after(self._tier.copy_s(sum(wanted)), partial(self._written, lease_id, batch, wanted))
                return
            self._repair(batch)
        self._is_writing = False

    def _written(self, lease_id: str, batch: OffloadBatch, wanted: Sequence[bool]) -> None:
        self._tier.commit(lease_id, [want and key in self._cache for want, key in zip(wanted, batch.keys, strict=True)])
        self._write()

    def _repair(self, batch: OffloadBatch) -> None:
        """kvbm lacks what the batch hangs on: offer the whole chain, now and then."""
        now = self._clock.now
        if batch.parent == ROOT or now < self._next_repair_s:
            return
        lease_id, count = self._tier.pin(self._worker_id, (batch.parent,))
        if count:
            self._tier.release(lease_id)
            return
        self._next_repair_s = now + self._tier.shape.offload_repair_s
        self._queue.push_chain(self._cache.chain(batch.keys[-1]))
