"""The worker's side of kvbm: new blocks are written through in the background, known ones are onboarded before a request starts,
and what requests say of their blocks is passed on."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import RetainBlocks, Retained
from kvbus_wire.packing import pack_keys
from kvbus_worker.adapters.kvbm_link import KvbmLink, Pool
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.onboarding import FAILURES, Onboarding, OnboardLimits, Spawn
from kvbus_worker.adapters.scratch import Scratch
from kvbus_worker.adapters.write_through import WriteThrough, WriteThroughLimits
from kvbus_worker.core.offload import OffloadQueue
from kvbus_worker.core.onboard_rates import OnboardRates
from kvbus_worker.core.patience import LowerTiers, Patience
from kvbus_worker.core.pulls import Coming
from kvbus_worker.core.retention import on_the_wire
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import BlockEvent, DirectiveRun, Engine
from kvbus_worker.engines.said import NOTHING_SAID, Said


class KvbmLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``onboard_probe_s``: a lower tier that was slower than computing is tried again after so long. ``max_keys``: in one
    message."""

    onboard_timeout_s: float
    onboard_batch_blocks: int
    onboard_batch_bytes: int
    onboard_min_blocks: int
    onboard_max_blocks: int
    onboard_parallel: int
    onboard_probe_s: float
    offload_gather_s: float
    offload_repair_s: float
    max_keys: int


class Kvbm:
    """All methods run on the loop. ``spawn`` starts a task that the service owns."""

    def __init__(
        self, link: KvbmLink, engine: Engine, store: TokenStore, queue: OffloadQueue, limits: KvbmLimits, *,
        spawn: Spawn, metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        self._link = link
        self._engine = engine
        self._limits = limits
        self._spawn = spawn
        self._metrics = metrics
        self._block_size = engine.info.block_size
        block_bytes = engine.info.block_bytes
        fitting = max(limits.onboard_batch_bytes // block_bytes, 1)
        self._batch_blocks = min(limits.onboard_batch_blocks, fitting)
        self._scratch = Scratch(self._batch_blocks * block_bytes, keep=2)
        self._importing: set[bytes] = set()
        self._coming = Coming(asyncio.Event)
        self._onboarding = 0
        self._write_through = WriteThrough(
            engine,
            link,
            store,
            queue,
            WriteThroughLimits(
                gather_s=limits.offload_gather_s, batch_blocks=queue.batch_blocks, repair_s=limits.offload_repair_s
            ),
            self._importing,
            metrics=metrics,
        )
        self.rates = OnboardRates()
        self._lower = LowerTiers(self.rates, probe_s=limits.onboard_probe_s)

    def start(self) -> None:
        self._spawn(self._link.run(), name="kvbm link")
        self._spawn(self._write_through.run(), name="kvbm write-through")
        self._spawn(self._write_through.offer_all(), name="kvbm attached")

    def close(self) -> None:
        self._write_through.close()
        self._link.close()

    def on_block_event(self, event: BlockEvent) -> None:
        self._write_through.on_block_event(event)

    def can_onboard(self, keys: Sequence[bytes]) -> bool:
        """Worth a try: kvbm is there and G1 does not have all of the chain."""
        if self._link.pool is None or len(keys) < self._limits.onboard_min_blocks:
            return False
        have = self._engine.cached_blocks(keys)
        if len(keys) - have < self._limits.onboard_min_blocks:
            return False
        come_for_others = self._coming.shared(keys, have, self._coming.number()) > have
        if self._onboarding >= self._limits.onboard_parallel and not come_for_others:
            self._metrics.kvbm_skipped.inc()
            return False
        return True

    async def onboard(self, keys: Sequence[bytes], packed: bytes, said: Said = NOTHING_SAID) -> int:
        """Bring the blocks that kvbm has beyond G1's into G1, as long as that is sooner than computing them; how many tokens they
        hold. ``packed``: the tokens of the chain, of whose blocks this is ``said``. What comes for another request is waited for,
        and is that one's."""
        deadline = asyncio.get_running_loop().time() + self._limits.onboard_timeout_s
        prefill = max(self._engine.load().prefill_tokens_per_s, 1.0)
        return await self._bring(keys, packed, said, Patience(deadline, prefill), deadline, prefill)

    async def prefetch(self, keys: Sequence[bytes], packed: bytes, within_s: float, said: Said = NOTHING_SAID) -> int:
        """As `onboard`, but nobody would compute them instead."""
        deadline = asyncio.get_running_loop().time() + within_s
        return await self._bring(keys, packed, said, Patience(deadline), deadline, 0.0)

    async def _bring(
        self, keys: Sequence[bytes], packed: bytes, said: Said, patience: Patience, deadline: float, prefill: float
    ) -> int:
        number = self._coming.number()
        have = await self._after_others(keys, number, patience)
        pool = self._link.pool
        if have is None or have == len(keys) or pool is None:
            return 0
        if prefill and self._onboarding >= self._limits.onboard_parallel:  # they have begun since `can_onboard`
            self._metrics.kvbm_skipped.inc()
            return 0
        promised = keys[have : have + self._limits.max_keys]
        self._coming.begin(number, promised)
        self._onboarding += prefill > 0
        try:
            return await self._fetch(pool, keys, packed, said, number, patience, deadline, prefill)
        finally:
            self._onboarding -= prefill > 0
            self._coming.end(number, promised)

    async def _after_others(self, keys: Sequence[bytes], number: int, patience: Patience) -> int | None:
        """Wait for blocks that come for others already; how many are there then, None: they took too long."""
        loop = asyncio.get_running_loop()
        while True:
            have = self._engine.cached_blocks(keys)
            shared = self._coming.shared(keys, have, number)
            if shared == have:
                return have
            wait_s = patience.wait_s((len(keys) - have) * self._block_size, loop.time())
            try:
                async with asyncio.timeout(wait_s):
                    await self._coming.signal(keys[shared - 1]).wait()
            except TimeoutError:
                return None

    async def _fetch(
        self, pool: Pool, keys: Sequence[bytes], packed: bytes, said: Said, number: int, patience: Patience,
        deadline: float, prefill: float,
    ) -> int:  # fmt: skip
        loop = asyncio.get_running_loop()
        missing = (len(keys) - self._engine.cached_blocks(keys)) * self._block_size
        onboarding = Onboarding(
            self._engine,
            self._link,
            pool,
            OnboardLimits(batch_blocks=self._batch_blocks, max_blocks=self._limits.max_keys),
            self._lower,
            self._importing,
            self._scratch,
            keys,
            packed,
            said,
            came=partial(self._coming.end, number),
            spawn=self._spawn,
            metrics=self._metrics,
        )
        try:
            async with asyncio.timeout_at(deadline):
                await onboarding.bring(
                    patience, self._lower.worth_asking(pool.lower_tiers, missing, prefill, loop.time())
                )
        except TimeoutError:
            if prefill and not onboarding.waits:
                self._link.failed("onboard", RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, "onboarding took too long"))
            else:  # a slow tier says nothing of G2; and whoever asked for a prefetch chose how long it may take
                operation = "onboard" if prefill else "prefetch"
                self._metrics.kvbm_failures.labels(operation, str(ErrorCode.DEADLINE_EXCEEDED)).inc()
        except FAILURES as error:
            self._link.failed("onboard", error)
        if prefill and onboarding.awaited:
            self._lower.came_too_late(onboarding.awaited, missing / prefill, loop.time())
        return onboarding.blocks * self._block_size

    async def retain(self, keys: Sequence[bytes], runs: Sequence[DirectiveRun]) -> frozenset[bytes] | None:
        """Tell kvbm what is said of the blocks of a chain; the keys that it does not pin though they are to be, or None when it did
        not say."""
        pool = self._link.pool
        said = Said(runs).of(0, min(len(keys), self._limits.max_keys))
        self._write_through.wishes.note(keys, said)
        while said and said[-1] is None:
            said.pop()
        if pool is None or not said:
            return None
        request = RetainBlocks(
            pool_id=pool.pool_id,
            instance_id=self._link.instance_id,
            keys=pack_keys(keys[: len(said)]),
            directives=on_the_wire(said, time.monotonic()),
        )
        try:
            retained: Retained = await self._link.ask(pool, request, Retained)
        except RequestFailed as error:
            if error.code is ErrorCode.GONE:
                self._link.failed("retain", error)
            else:
                self._metrics.kvbm_failures.labels("retain", str(error.code)).inc()
            return None
        return frozenset(keys[i] for i in retained.unpinned if 0 <= i < len(said))
