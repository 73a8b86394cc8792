"""The KV events of all pools: one numbered stream per model and tier."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbus_kvbm.core.pools import PoolSpec
from kvbus_wire.kv_events import KvEvent

TIER = "g2"


class Publisher(Protocol):
    """What `kvbus_runtime.event_log.KvEventPublisher` does."""

    @property
    def last_seq(self) -> int: ...

    def emit(self, events: Sequence[KvEvent]) -> None: ...

    async def close(self) -> None: ...


class EventFeeds:
    """Publishers by model and tier. They outlive a model's pools: numbers must not begin again in an incarnation."""

    def __init__(self, make_publisher: Callable[[str, str, int], Publisher]) -> None:
        self._make_publisher = make_publisher
        self._publishers: dict[tuple[str, str], Publisher] = {}

    def emit(self, spec: PoolSpec, tier: str, events: Sequence[KvEvent]) -> None:
        """Send what has happened to a tier."""
        if events:
            self._of(spec, tier).emit(events)

    def last_seq(self, model: str, tier: str = TIER) -> int:
        publisher = self._publishers.get((model, tier))
        return 0 if publisher is None else publisher.last_seq

    async def close(self) -> None:
        for publisher in self._publishers.values():
            await publisher.close()

    def _of(self, spec: PoolSpec, tier: str) -> Publisher:
        key = spec.model, tier
        if key not in self._publishers:
            self._publishers[key] = self._make_publisher(spec.model, tier, spec.block_size)
        return self._publishers[key]
