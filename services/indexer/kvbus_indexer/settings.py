"""Settings of the indexer: flags, ``KVBUS_*`` variables, file."""

from typing import Annotated

from kvbus_indexer.core.limits import Limits
from kvbus_runtime.settings import CommonSettings, Flag


class IndexerSettings(CommonSettings, frozen=True, kw_only=True):
    """See ``kvbus indexer --help``."""

    max_entries: Annotated[int, Flag("blocks in the index, counted once per instance and tier that holds them")] = (
        2_000_000
    )
    refill_ratio: Annotated[float, Flag("an instance that did not fit is completed below this part of the limit")] = 0.9
    refill_interval_s: Annotated[float, Flag("how often to see whether there is room for it")] = 30.0
    max_buffered_keys: Annotated[int, Flag("keys of events kept per instance while its snapshot is fetched")] = 200_000
    max_feeds_per_instance: Annotated[int, Flag("numbered event sequences (model and tier) per instance")] = 64
    lag_s: Annotated[float, Flag("how long events that a worker says it has sent may be on their way")] = 1.0
    max_repairs: Annotated[int, Flag("snapshots fetched at the same time")] = 4
    repair_backoff_s: Annotated[float, Flag("least time between two snapshots of an instance")] = 0.25
    repair_backoff_max_s: Annotated[float, Flag("most time between two tries of a failing snapshot")] = 10.0
    repair_give_up: Annotated[int, Flag("failed tries after which the old content of the instance is dropped")] = 8
    snapshot_timeout_s: Annotated[float, Flag("how long an instance may take to answer with a part of a snapshot")] = (
        5.0
    )
    snapshot_max_parts: Annotated[int, Flag("parts of one snapshot")] = 10_000
    max_query_keys: Annotated[int, Flag("blocks in one query")] = 131_072
    max_pending_queries: Annotated[int, Flag("queries answered at the same time")] = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in type(self).__struct_fields__:
            if name not in CommonSettings.__struct_fields__ and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if self.refill_ratio > 1:
            raise ValueError("refill_ratio must be at most 1")
        if self.repair_backoff_max_s < self.repair_backoff_s:
            raise ValueError("repair_backoff_max_s must be at least repair_backoff_s")

    @property
    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})
