"""The state of the pools as metrics."""

import msgspec
from prometheus_client import Counter

from kvbus_blocks.retention import KINDS
from kvbus_kvbm.core.pool import PoolCounters
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_runtime.metrics import Metrics

_LABELS = ("model", "pool")
_COUNTERS = {
    "hits": ("block_hits", "blocks asked for that were present"),
    "misses": ("block_misses", "blocks asked for that were not present"),
    "stored": ("blocks_stored", "blocks that became present"),
    "refused": ("blocks_refused", "blocks offered that found no room, or whose parent is unknown"),
    "unpinned": ("blocks_unpinned", "blocks that were to be pinned beyond their tenant's share"),
    "freed": ("blocks_freed", "blocks that were dropped since nobody needs them any more"),
    "corrupt": ("blocks_corrupt", "blocks whose checksum did not hold when a worker read them"),
    "leases_granted": ("leases_granted", "leases given to workers"),
    "leases_expired": ("leases_expired", "leases that no worker ended in time"),
}


class PoolMetrics:
    """Call `update` after every change of a pool, `forget` when it is gone."""

    def __init__(self, metrics: Metrics, pools: Pools) -> None:
        self._pools = pools
        self._slots = metrics.gauge("slots", "slots of a pool by what they are used for", (*_LABELS, "state"))
        self._leases = metrics.gauge("leases", "living leases", _LABELS)
        self._bytes = metrics.gauge("bytes", "bytes of host memory, assigned to pools and in all", ("state",))
        self._bytes.labels("budget").set(pools.budget.g2_bytes)
        self._bytes.labels("assigned").set(0)
        self._pool_count = metrics.gauge("pools", "open pools")
        self._retained = metrics.gauge("blocks_retained", "blocks that directives pin", _LABELS)
        self._evictions = metrics.counter(
            "block_evictions", "present blocks that gave way to new ones, by class", (*_LABELS, "class")
        )
        self._counters: dict[str, Counter] = {
            field: metrics.counter(name, text, _LABELS) for field, (name, text) in _COUNTERS.items()
        }
        self._seen: dict[str, PoolCounters] = {}

    def opened(self, pool: OpenPool) -> None:
        self._seen[pool.pool_id] = PoolCounters()
        self._count_pools()
        self.update(pool)

    def update(self, pool: OpenPool) -> None:
        labels = (pool.spec.model, pool.pool_id)
        usage = pool.pool.usage()
        for state, slots in (
            ("free", usage.free),
            ("used", usage.present),
            ("pinned", usage.pinned),
            ("reserved", usage.reserved),
            ("quarantined", usage.quarantined),
        ):
            self._slots.labels(*labels, state).set(slots)
        self._leases.labels(*labels).set(usage.leases)
        seen, now = self._seen[pool.pool_id], pool.pool.counters
        self._retained.labels(*labels).set(usage.retained)
        for kind in KINDS:
            grown = getattr(now, f"evicted_{kind}") - getattr(seen, f"evicted_{kind}")
            if grown:
                self._evictions.labels(*labels, kind).inc(grown)
        for field, counter in self._counters.items():
            grown = getattr(now, field) - getattr(seen, field)
            if grown:
                counter.labels(*labels).inc(grown)
        self._seen[pool.pool_id] = msgspec.structs.replace(now)

    def forget(self, pool: OpenPool) -> None:
        """The pool is gone; its counters stay, as counters do."""
        labels = (pool.spec.model, pool.pool_id)
        del self._seen[pool.pool_id]
        for state in ("free", "used", "pinned", "reserved", "quarantined"):
            self._slots.remove(*labels, state)
        self._leases.remove(*labels)
        self._retained.remove(*labels)
        self._count_pools()

    def _count_pools(self) -> None:
        self._pool_count.set(len(self._pools))
        self._bytes.labels("assigned").set(self._pools.assigned_bytes)
