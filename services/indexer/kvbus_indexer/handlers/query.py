"""Questions to the index."""

from collections.abc import Callable

from kvbus_blocks.keys import KEY_BYTES
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.usage import Usage
from kvbus_runtime.bus import RequestContext
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import IndexQuery, IndexReply
from kvbus_wire.packing import short_keys

BLOCKS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)


class QueryHandler:
    """An unknown model is no error: nobody holds anything of it."""

    def __init__(
        self, catalog: Catalog, usage: Usage, max_keys: int, *, clock: Callable[[], float], metrics: Metrics
    ) -> None:
        self._catalog = catalog
        self._usage = usage
        self._max_keys = max_keys
        self._clock = clock
        self._asked = metrics.counter("query_blocks", "blocks asked for")
        self._found = metrics.histogram("query_depth_blocks", "deepest match of a query", buckets=BLOCKS)
        self._matches = metrics.counter("query_matches", "instances named in answers", ("basis",))

    async def __call__(self, query: IndexQuery, context: RequestContext) -> IndexReply:
        count, rest = divmod(len(query.keys), KEY_BYTES)
        if rest:
            raise RequestFailed.of(ErrorCode.INVALID_REQUEST, "keys are 16 bytes each", param="keys")
        if count > self._max_keys:
            message = f"{count} blocks are more than the {self._max_keys} of one query"
            raise RequestFailed.of(ErrorCode.PAYLOAD_TOO_LARGE, message, param="keys", limit=self._max_keys)
        now = self._clock()
        keys = short_keys(query.keys)
        matches = self._catalog.match(query.model, keys, now)
        if query.counts:
            self._usage.read(query.model, keys, matches, now)
        self._asked.inc(count)
        self._found.observe(max((match.depth for match in matches), default=0))
        predicted = sum(match.predicted for match in matches)
        self._matches.labels("predicted").inc(predicted)
        self._matches.labels("events").inc(len(matches) - predicted)
        return IndexReply(matches=matches)
