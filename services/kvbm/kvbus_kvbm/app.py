"""Wires kvbm: pools, their memory, the bus."""

import asyncio
import secrets

from kvbus_kvbm.adapters import probe
from kvbus_kvbm.adapters.arenas import Arenas
from kvbus_kvbm.adapters.events import TIER, EventFeeds, Publisher
from kvbus_kvbm.adapters.loads import Loads
from kvbus_kvbm.adapters.lower_tiers import MakeTiers, lower_tiers
from kvbus_kvbm.adapters.metrics import PoolMetrics
from kvbus_kvbm.adapters.tier_metrics import TierMetrics
from kvbus_kvbm.adapters.tiers import Tiers
from kvbus_kvbm.adapters.wakeups import Wakeups
from kvbus_kvbm.core.errors import StorageRefused
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_kvbm.core.snapshots import Snapshots
from kvbus_kvbm.handlers import blocks, control, kv
from kvbus_kvbm.handlers.attach import Attaching
from kvbus_kvbm.handlers.onboard import Onboarding
from kvbus_kvbm.handlers.retention import Retention
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.discovery import Change
from kvbus_runtime.event_log import KvEventPublisher
from kvbus_runtime.service import Service
from kvbus_runtime.settings import BadSettings
from kvbus_wire.packing import unpack_keys
from kvbus_wire.records import InstanceRecord, KvbmRecord


class KvbmApp:
    """See the README."""

    def __init__(self, service: Service, settings: KvbmSettings, make_tiers: MakeTiers = lower_tiers) -> None:
        self._service = service
        self._settings = settings
        self._clock = asyncio.get_running_loop().time
        self._idle = asyncio.Event()
        self.pools = Pools(settings.budget, settings.pool_limits, _new_id)
        self.snapshots = Snapshots(
            chunk_keys=settings.snapshot_chunk_keys,
            max_snapshots=settings.max_snapshots,
            ttl_s=settings.snapshot_ttl_s,
            new_id=_new_id,
        )
        self._arenas = Arenas(settings.arena_dir, settings.namespace, service.instance_id, settings.arena_group)
        self._feeds = EventFeeds(self._make_publisher)
        self._metrics = PoolMetrics(service.metrics, self.pools)
        self._wakeups = Wakeups(self._next_due_s, self._expire)
        self.tiers = Tiers(
            self.pools,
            self._arenas,
            settings.tier_limits,
            changed=self._changed,
            publish=self._feeds.emit,
            clock=self._clock,
            spawn=service.spawn,
            log=service.log,
        )
        for plan in make_tiers(settings, self.tiers.listener, log=service.log, clock=self._clock):
            self.tiers.add(plan.tier, plan.policy, plan.write_bytes_per_s)
        self.loads = Loads(
            self.tiers,
            self._arenas,
            settings.load_limits,
            changed=self._changed,
            clock=self._clock,
            spawn=service.spawn,
            log=service.log,
        )
        self._saved_s = service.metrics.counter(
            "saved_seconds", "seconds of computing that blocks of a tier spared, at the reader's own rate", ("tier",)
        )
        self._tier_metrics = TierMetrics(service.metrics, self.tiers, self.loads)
        attaching = Attaching(
            self.pools,
            self._arenas,
            live=self._live_workers,
            opened=self._metrics.opened,
            unused=self._unused,
            closing=self._closing,
            changed=self._changed,
            absent_grace_s=settings.absent_grace_s,
            clock=self._clock,
            spawn=service.spawn,
            log=service.log,
        )
        onboarding = Onboarding(
            self.pools,
            self.loads,
            changed=self._changed,
            used=self._used,
            spared=self._spared,
            max_wait_s=settings.max_pin_wait_s,
            clock=self._clock,
        )
        retention = Retention(
            self.pools,
            self.tiers,
            self.loads,
            changed=self._changed,
            used=self._used,
            max_keys=settings.max_keys_per_request,
            clock=self._clock,
        )
        self._blocks = blocks.BlockRequests(
            self.pools, attaching, onboarding, retention, changed=self._changed, used=self._used, clock=self._clock
        )
        self._control = control.ControlRequests(
            service.instance_id,
            service.incarnation,
            self.pools,
            self._feeds,
            self.snapshots,
            self.tiers,
            retention,
            kv.KvRequests(
                service.instance_id,
                service.host_id,
                settings.g4_url.rstrip("/"),
                self.pools,
                self._arenas,
                self.tiers,
                self.loads,
                max_keys=settings.max_keys_per_request,
                max_blocks=settings.tool_blocks,
                verify_bytes=settings.tool_verify_bytes,
                max_wait_s=settings.load_deadline_s,
                changed=self._changed,
                clock=self._clock,
            ),
            stop=service.stop,
            changed=self._wakeups.changed,
            clock=self._clock,
        )

    async def start(self) -> None:
        service, settings = self._service, self._settings
        for path in await self._arenas.sweep():
            service.log.info("stale_arena_removed", path=str(path))
        rate = settings.onboard_bytes_per_s or await asyncio.to_thread(probe.onboard_bytes_per_s)
        await self.tiers.start()
        subjects, limit = service.bus.subjects, settings.max_pending_requests
        await service.bus.serve(
            subjects.kvbm(service.instance_id), blocks.REQUESTS, self._blocks.handle, max_pending=limit
        )
        await service.bus.serve(
            subjects.control(service.instance_id), control.REQUESTS, self._control.handle, max_pending=limit
        )
        service.directory.on_change(self._on_directory_change)
        service.spawn(self._wakeups.run_forever(), name="expiry")
        await service.register(kvbm=self._record(rate))
        service.health.set("serving", True, f"{settings.g2_bytes} bytes in {settings.arena_dir}")

    async def drain(self, reason: str) -> None:
        """Nothing new; wait until the workers have ended their leases. At the deadline the rest dies with us."""
        self._blocks.draining = True
        while self.pools.leases():
            self._idle.clear()
            await self._idle.wait()
        await self.tiers.drain()

    async def close(self) -> None:
        await self.loads.close()
        await self.tiers.close()
        # Memory first: the last events may wait for a bus that is away.
        await self._arenas.close()
        await self._feeds.close()

    def _record(self, onboard_bytes_per_s: float) -> KvbmRecord:
        sizes = {edge.tier.name: edge.tier.usage().capacity_bytes for edge in self.tiers.edges}
        return KvbmRecord(
            g2_bytes=self._settings.g2_bytes,
            onboard_bytes_per_s=onboard_bytes_per_s,
            g3_bytes=sizes.get("g3", 0),
            g4_store=self._settings.g4_url.rstrip("/"),
        )

    def _make_publisher(self, model: str, tier: str, block_size: int) -> Publisher:
        return KvEventPublisher(self._service, model, tier, block_size)

    def _changed(self, pool: OpenPool) -> None:
        if self.pools.lookup(pool.pool_id) is None:  # reclaimed while somebody waited; `_closing` has told all
            return
        events = pool.pool.take_events()
        self._feeds.emit(pool.spec, TIER, events)
        self.tiers.on_events(pool, events)
        self._metrics.update(pool)
        self._wakeups.changed()
        self._idle.set()

    def _used(self, pool: OpenPool, keys: bytes) -> None:
        if self.tiers.edges:
            self.tiers.offer(pool, unpack_keys(keys))

    def _spared(self, instance_id: str, tier: str, tokens: int) -> None:
        record = self._service.directory.get(instance_id)
        if record is not None and record.worker is not None and record.worker.prefill_tokens_per_s > 0:
            self._saved_s.labels(tier).inc(tokens / record.worker.prefill_tokens_per_s)

    async def _unused(self, pool_id: str) -> None:
        await self.loads.give_up(pool_id)
        await self.tiers.give_up(pool_id)

    def _closing(self, pool: OpenPool) -> None:
        self._feeds.emit(pool.spec, TIER, pool.pool.take_events())
        self._metrics.update(pool)
        self._metrics.forget(pool)

    def _expire(self) -> None:
        now_s = self._clock()
        self.snapshots.expire(now_s)
        self.pools.expire(now_s)
        for pool in self.pools:
            self._changed(pool)

    def _next_due_s(self) -> float | None:
        due = (self.pools.next_due_s(), self.snapshots.next_due_s())
        return min((time_s for time_s in due if time_s is not None), default=None)

    def _live_workers(self) -> set[str]:
        return {record.instance_id for record in self._service.directory.instances("worker")}

    def _on_directory_change(self, record: InstanceRecord, change: Change) -> None:
        if change != "left" or record.worker is None:
            return
        ended = self.pools.detach(record.instance_id, self._clock())
        for pool in self.pools:
            self._changed(pool)
        if ended:
            self._service.log.info("worker_left", worker=record.instance_id, leases_ended=ended)


async def start(service: Service, settings: KvbmSettings) -> KvbmApp:
    try:
        app = KvbmApp(service, settings)
        await app.start()
    except StorageRefused as problem:
        raise BadSettings(str(problem)) from problem
    return app


def _new_id() -> str:
    return secrets.token_hex(6)
