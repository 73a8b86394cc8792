"""The KV events of all pools: one numbered stream per model."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbus_kvbm.core.pools import OpenPool
from kvbus_wire.kv_events import KvEvent

TIER = "g2"


class Publisher(Protocol):
    """What `kvbus_runtime.event_log.KvEventPublisher` does."""

    @property
    def last_seq(self) -> int: ...

    def emit(self, events: Sequence[KvEvent]) -> None: ...

    async def close(self) -> None: ...


class EventFeeds:
    """Publishers by model. They are kept when a model's pools are gone: numbers must not begin again within an incarnation."""

    def __init__(self, make_publisher: Callable[[str, int], Publisher]) -> None:
        self._make_publisher = make_publisher
        self._publishers: dict[str, Publisher] = {}

    def publish(self, pool: OpenPool) -> None:
        """Send what has happened to the pool."""
        events = pool.pool.take_events()
        if events:
            self._of(pool).emit(events)

    def last_seq(self, model: str) -> int:
        publisher = self._publishers.get(model)
        return 0 if publisher is None else publisher.last_seq

    async def close(self) -> None:
        for publisher in self._publishers.values():
            await publisher.close()

    def _of(self, pool: OpenPool) -> Publisher:
        model = pool.spec.model
        if model not in self._publishers:
            self._publishers[model] = self._make_publisher(model, pool.spec.block_size)
        return self._publishers[model]
