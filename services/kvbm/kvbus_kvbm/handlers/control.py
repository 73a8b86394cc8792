"""The control subject: snapshots for indexers, blocks that nobody needs any more, and the order to drain."""

from collections.abc import Callable

from kvbus_kvbm.adapters.events import TIER, EventFeeds
from kvbus_kvbm.adapters.tiers import Tiers
from kvbus_kvbm.core.pools import Pools
from kvbus_kvbm.core.snapshots import Feed, Snapshots
from kvbus_kvbm.handlers import kv
from kvbus_kvbm.handlers.refusals import refusals
from kvbus_kvbm.handlers.retention import Retention
from kvbus_runtime.bus import RequestContext
from kvbus_wire.kvbm import DropBlocks
from kvbus_wire.message import Message
from kvbus_wire.worker import BlockSnapshot, BlockSnapshotChunk, Done, Drain, SnapshotChain

REQUESTS: tuple[type[Message], ...] = (BlockSnapshot, DropBlocks, Drain, *kv.REQUESTS)


class ControlRequests:
    """A snapshot covers all models and tiers, one after the other; each chunk names its model and tier, and the number of the last
    event of these."""

    def __init__(
        self,
        instance_id: str,
        incarnation: int,
        pools: Pools,
        feeds: EventFeeds,
        snapshots: Snapshots,
        tiers: Tiers,
        retention: Retention,
        tools: kv.KvRequests,
        *,
        stop: Callable[[str], None],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._pools = pools
        self._feeds = feeds
        self._snapshots = snapshots
        self._tiers = tiers
        self._retention = retention
        self._tools = tools
        self._stop = stop
        self._changed = changed
        self._clock = clock

    async def handle(
        self, request: BlockSnapshot | DropBlocks | Drain | kv.KvRequest, context: RequestContext
    ) -> Message:
        if isinstance(request, Drain):
            self._stop("told to drain")
            return Done()
        with refusals():
            if isinstance(request, DropBlocks):
                return await self._retention.drop(request)
            if isinstance(request, BlockSnapshot):
                return self._snapshot(request)
            return await self._tools.handle(request)

    def _snapshot(self, request: BlockSnapshot) -> BlockSnapshotChunk:
        now_s = self._clock()
        if request.snapshot_id:
            chunk = self._snapshots.chunk(request.snapshot_id, request.cursor, now_s)
        else:
            chunk = self._snapshots.take(self._all_feeds(), now_s)
        self._changed()
        return BlockSnapshotChunk(
            snapshot_id=chunk.snapshot_id,
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            model=chunk.feed.model,
            tier=chunk.feed.tier,
            kv_seq=chunk.feed.kv_seq,
            chains=chunk.feed.chains,
            next_cursor=chunk.next_cursor,
        )

    def _all_feeds(self) -> list[Feed]:
        """Content and number of the same moment: every change of a tier is handed to its publisher before anything else runs."""
        feeds = [
            Feed(
                model,
                TIER,
                self._feeds.last_seq(model),
                tuple(chain for pool in self._pools.of_model(model) for chain in pool.pool.chains()),
            )
            for model in self._pools.models()
        ]
        for edge in self._tiers.edges:
            name = edge.tier.name
            chains: dict[str, list[SnapshotChain]] = {}
            for spec, index in self._tiers.specs(name):
                chains.setdefault(spec.model, []).extend(index.chains())
            feeds += [
                Feed(model, name, self._feeds.last_seq(model, name), tuple(held)) for model, held in chains.items()
            ]
        return feeds
