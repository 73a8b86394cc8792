"""Control messages: cancel, replay of step frames, block snapshots, blocks that nobody needs, drain."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.serving import RequestContext
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import DropBlocks, DroppedBlocks
from kvbus_wire.message import Message
from kvbus_wire.packing import unpack_keys
from kvbus_wire.worker import (
    BlockSnapshot,
    BlockSnapshotChunk,
    Cancel,
    Done,
    Drain,
    ReplayedSteps,
    ReplaySteps,
)
from kvbus_worker.adapters.metrics import WorkerMetrics
from kvbus_worker.core.snapshots import Snapshots
from kvbus_worker.core.token_store import TokenStore
from kvbus_worker.engines.base import Engine, EngineError
from kvbus_worker.handlers.runner import RequestRunner

CONTROL_MESSAGES = (Cancel, ReplaySteps, BlockSnapshot, Drain, DropBlocks)


class Replayer(Protocol):
    def replay(self, message: ReplaySteps) -> ReplayedSteps:
        """Raise RequestFailed (gone)."""


class ControlHandler:
    """``kv_seq``: the number of the last KV event that was emitted. ``stop``: begin the orderly end."""

    def __init__(
        self,
        runner: RequestRunner,
        store: TokenStore,
        snapshots: Snapshots,
        replayer: Replayer,
        engine: Engine,
        *,
        kv_seq: Callable[[], int],
        stop: Callable[[str], None],
        clock: Callable[[], float],
        instance_id: str,
        incarnation: int,
        model: str,
        metrics: WorkerMetrics,
    ) -> None:
        self._runner = runner
        self._store = store
        self._snapshots = snapshots
        self._replayer = replayer
        self._engine = engine
        self._kv_seq = kv_seq
        self._stop = stop
        self._clock = clock
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._model = model
        self._metrics = metrics
        self._forget: asyncio.TimerHandle | None = None

    async def __call__(self, message: Message, context: RequestContext) -> Message:
        match message:
            case Cancel():
                self._runner.end(message.request_id, None)
                return Done()
            case ReplaySteps():
                return self._replayer.replay(message)
            case BlockSnapshot():
                return self._snapshot(message)
            case DropBlocks():
                return await self._drop(message)
            case Drain():
                self._stop("drain was asked for")
                return Done()
        raise AssertionError(f"{type(message).__name__} is no control message")

    async def _drop(self, message: DropBlocks) -> DroppedBlocks:
        if message.model != self._model:
            return DroppedBlocks(blocks={})
        try:
            freed = await self._engine.drop_blocks(unpack_keys(message.keys))
        except ValueError as error:
            raise RequestFailed.of(ErrorCode.INVALID_REQUEST, f"keys: {error}") from error
        except EngineError as error:
            raise RequestFailed(error.reply) from error
        self._metrics.dropped.inc(freed)
        return DroppedBlocks(blocks={"g1": freed})

    def close(self) -> None:
        if self._forget is not None:
            self._forget.cancel()

    def _forget_later(self) -> None:
        """What nobody comes back for goes, also when no other snapshot is asked for."""
        if self._forget is None and len(self._snapshots):
            loop = asyncio.get_running_loop()
            self._forget = loop.call_later(self._snapshots.ttl_s, self._forget_now)

    def _forget_now(self) -> None:
        self._forget = None
        self._snapshots.expire(self._clock())
        self._metrics.snapshots.set(len(self._snapshots))
        self._forget_later()

    def _snapshot(self, message: BlockSnapshot) -> BlockSnapshotChunk:
        # Store and event number belong together: both change in the same call of the step handler.
        try:
            part = self._snapshots.answer(message, lambda: (self._store.links(), self._kv_seq()), self._clock())
        except EngineError as error:
            raise RequestFailed(error.reply) from error
        finally:
            self._metrics.snapshots.set(len(self._snapshots))
            self._forget_later()
        return BlockSnapshotChunk(
            snapshot_id=part.snapshot_id,
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            model=self._model,
            tier="g1",
            kv_seq=part.kv_seq,
            chains=part.chains,
            next_cursor=part.next_cursor,
        )
