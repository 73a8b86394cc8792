"""Blocks that kvbm has are copied into G1: those in G2 at once, those of lower tiers as they come up.

    ask, wait for the first run -> copy it in                  -> copy the next one in   ...
                                   ask, wait for the next run     ask, wait ...

What waits is worth less than what recomputing takes: waiting ends then. Whatever fails here costs a recompute and a metric, never a
request. A block is used only if its checksum holds after it was copied and the lease covered the whole copy.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_runtime.errors import RequestFailed
from kvbus_transfer import Arena, ArenaError, copy_verified
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import PinBlocks, PinnedBlocks, ReleaseLease, Slot
from kvbus_wire.packing import TOKEN_BYTES, pack_keys
from kvbus_wire.worker import Done
from kvbus_worker.adapters.kvbm_link import KvbmLink, Pool
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.adapters.scratch import Scratch
from kvbus_worker.core.patience import LowerTiers, Patience
from kvbus_worker.engines.base import Engine, EngineError
from kvbus_worker.engines.said import Said

G2 = "g2"
FAILURES = (RequestFailed, ArenaError, EngineError, IndexError)
_ASK_AGAIN_S = 0.01
"""A kvbm that does not wait at all is not asked more often."""
Spawn = Callable[..., asyncio.Task[Any]]


class OnboardLimits(msgspec.Struct, frozen=True, kw_only=True):
    batch_blocks: int
    max_blocks: int


class _Run(msgspec.Struct):
    """Pinned blocks: ``keys[first : first + len(slots)]``. ``copied`` of them lie in G1; ``corrupt``: positions within the run.
    ``waited``: for lower tiers, otherwise they were in G2."""

    first: int
    pinned: PinnedBlocks
    waited: bool
    lease_end: float
    copied: int = 0
    corrupt: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.first + len(self.pinned.slots)

    @property
    def source(self) -> str:
        """Whose pace it shows; empty: that of several tiers, or of a load for another reader."""
        if not self.waited:
            return G2
        (tier, count), *others = self.pinned.brought.items() or [("", 0)]
        return tier if count == len(self.pinned.slots) and not others else ""


class _Ahead:
    """A run that is asked for while the one before it is copied. What nobody takes is released."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.abandoned = False
        self.run: _Run | None = None
        self.error: Exception | None = None

    async def take(self) -> _Run | None:
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.run


class Onboarding:
    """Brings the blocks of one chain: ``keys`` from the root on, ``packed`` their tokens. Used once. ``came`` hears which are in
    G1."""

    def __init__(
        self, engine: Engine, link: KvbmLink, pool: Pool, limits: OnboardLimits, tiers: LowerTiers,
        importing: set[bytes], scratch: Scratch, keys: Sequence[bytes], packed: bytes, said: Said, *,
        came: Callable[[Sequence[bytes]], None], spawn: Spawn, metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._link = link
        self._pool = pool
        self._limits = limits
        self._tiers = tiers
        self._importing = importing
        self._scratch = scratch
        self._keys = keys
        self._packed = packed
        self._said = said
        self._came = came
        self._spawn = spawn
        self._metrics = metrics
        self._block_bytes = engine.info.block_bytes
        self._block_size = engine.info.block_size
        self._finished_at = 0.0
        self._coming = 0
        self._below = False
        self.blocks = 0
        self.waits = False
        self.awaited = ""

    async def bring(self, patience: Patience, lower: Sequence[str]) -> None:
        """``self.blocks`` says how many came, also when this ends with an error. ``lower``: tiers below G2 that are worth asking.
        ``self.waits``: for them, when it ended; ``self.awaited``: the tier that let nothing come in time."""
        first = self._engine.cached_blocks(self._keys)
        self._keys = self._keys[: first + self._limits.max_blocks]
        self._finished_at = asyncio.get_running_loop().time()
        run = await self._pin(first)
        if run is None and lower:
            run = await self._pin_below(first, patience, lower)
        while run is not None:
            more = run.pinned.coming or (not run.waited and lower)
            ahead = self._ask_ahead(run.end, patience, lower) if more and run.end < len(self._keys) else None
            try:
                await self._copy(run, patience)
                complete = run.copied == len(run.pinned.slots)
                run = await ahead.take() if ahead is not None and complete else None
            finally:
                if ahead is not None and (run is None or run is not ahead.run):
                    self._abandon(ahead)

    def _wait_s(self, first: int, patience: Patience) -> float:
        return patience.wait_s((len(self._keys) - first) * self._block_size, asyncio.get_running_loop().time())

    async def _pin_below(
        self, first: int, patience: Patience, lower: Sequence[str], ahead: "_Ahead | None" = None
    ) -> _Run | None:
        """Ask again when kvbm has waited as long as it does for one request and they are still on their way."""
        self.waits = True  # also when this is cancelled: it was what took so long
        run: _Run | None = None
        while (wait_s := self._wait_s(first, patience)) > 0 and not (ahead is not None and ahead.abandoned):
            run = await self._pin(first, wait_s, lower)
            if run is not None or not self._coming:
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        self.waits = False
        return run

    async def _pin(self, first: int, wait_s: float = 0.0, lower: Sequence[str] = ()) -> _Run | None:
        """None: nothing (more) is there, or came in time."""
        asked = self._keys[first:]
        if not asked:
            return None
        asked_at = asyncio.get_running_loop().time()
        request = PinBlocks(
            pool_id=self._pool.pool_id,
            instance_id=self._link.instance_id,
            keys=pack_keys(asked),
            wait_s=wait_s,
            parent=self._keys[first - 1] if first else ROOT,
            tiers=tuple(lower),
        )
        pinned: PinnedBlocks = await self._link.ask(self._pool, request, PinnedBlocks, wait_s=wait_s)
        self._coming = pinned.coming
        if not pinned.lease_id:
            self.awaited = pinned.awaits if wait_s and not self._below else ""
            return None
        self.awaited = ""
        self._below = self._below or wait_s > 0
        pinned = msgspec.structs.replace(pinned, slots=pinned.slots[: len(asked)])
        # Counted from before the request: kvbm's lease began later, so it ends later than this.
        return _Run(first, pinned, wait_s > 0, asked_at + pinned.lease_s)

    def _ask_ahead(self, first: int, patience: Patience, lower: Sequence[str]) -> _Ahead:
        ahead = _Ahead()
        self._spawn(self._pin_ahead(ahead, self._pin_below(first, patience, lower, ahead)), name="kvbm pin ahead")
        return ahead

    async def _pin_ahead(self, ahead: _Ahead, pinning: Coroutine[Any, Any, _Run | None]) -> None:
        try:
            ahead.run = await pinning
        except FAILURES as error:
            ahead.error = error
        finally:
            ahead.done.set()
        if ahead.abandoned and ahead.run is not None:
            await self._release(ahead.run)

    def _abandon(self, ahead: _Ahead) -> None:
        ahead.abandoned = True
        if ahead.done.is_set() and ahead.run is not None:
            self._spawn(self._release(ahead.run), name="kvbm release")

    async def _copy(self, run: _Run, patience: Patience) -> None:
        loop = asyncio.get_running_loop()
        wanted = self._keys[run.first : run.end]
        self._importing.update(wanted)
        try:
            await self._copy_in(run)
        finally:
            self._importing.difference_update(wanted)
            self.blocks += run.copied
            self._spawn(self._release(run), name="kvbm release")
            self._metrics.kvbm_blocks.labels("onboard").inc(run.copied)
            self._metrics.kvbm_bytes.labels("onboard").inc(run.copied * self._block_bytes)
            self._account(run, loop.time(), patience)

    def _account(self, run: _Run, now: float, patience: Patience) -> None:
        """Of runs that overlap each has the time since the end of the one before."""
        took_s, self._finished_at = now - self._finished_at, now
        self._metrics.kvbm_seconds.labels("onboard").inc(took_s)
        if run.source:
            self._tiers.observe(run.source, run.copied * self._block_size, took_s)
        if run.waited:
            patience.came(run.copied * self._block_size)

    async def _copy_in(self, run: _Run) -> None:
        """While one batch is imported the next one is copied, into the other of two pieces of scratch memory."""
        count, slots = self._limits.batch_blocks, run.pinned.slots
        parts = [slots[start : start + count] for start in range(0, len(slots), count)]
        scratch = [self._scratch.take() for _ in parts[:2]]
        copying = self._copying(parts[0], scratch[0])
        for number, part in enumerate(parts):
            data = await copying
            if asyncio.get_running_loop().time() >= run.lease_end:
                raise RequestFailed.of(ErrorCode.DEADLINE_EXCEEDED, "the lease ended during the copy")
            if len(data) < len(part):
                run.corrupt = (number * count + len(data),)
                self._metrics.kvbm_failures.labels("onboard", "corrupt").inc()
            elif number + 1 < len(parts):
                copying = self._copying(parts[number + 1], scratch[(number + 1) % 2])
            imported = await self._import(run.first + number * count, data) if data else 0
            run.copied += imported
            if imported < len(part):
                break
        if copying.done():  # else a thread still writes there
            for memory in scratch:
                self._scratch.give_back(memory)

    def _copying(self, part: Sequence[Slot], into: memoryview) -> asyncio.Future[list[memoryview]]:
        copying = asyncio.get_running_loop().run_in_executor(
            None, _copy_out, self._pool.arena, part, self._block_bytes, into
        )
        copying.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it any more
        return copying

    async def _import(self, first: int, data: Sequence[memoryview]) -> int:
        size, end = self._block_size * TOKEN_BYTES, first + len(data)
        parent = self._keys[first - 1] if first else ROOT
        tokens = [self._packed[i * size : (i + 1) * size] for i in range(first, end)]
        said = self._said.of(first, end)
        count = await self._engine.import_blocks(parent, self._keys[first:end], tokens, data, said)
        self._came(self._keys[first : first + count])
        return count

    async def _release(self, run: _Run) -> None:
        try:
            await self._link.ask(self._pool, ReleaseLease(lease_id=run.pinned.lease_id, corrupt=run.corrupt), Done)
        except RequestFailed as error:
            # The lease ends by itself; only the report of a corrupt block is lost, and its next reader will make it again.
            self._metrics.kvbm_failures.labels("release", str(error.code)).inc()


def _copy_out(arena: Arena, slots: Sequence[Slot], block_bytes: int, into: memoryview) -> list[memoryview]:
    """Private copies of the leading slots whose checksum holds. Raise IndexError."""
    views = [arena.view(slot.index)[:block_bytes] for slot in slots]
    copies = [into[start : start + block_bytes] for start in range(0, len(slots) * block_bytes, block_bytes)]
    checksums = [slot.checksum for slot in slots]
    return copies[: copy_verified(list(zip(views, copies, checksums, strict=True)))]
