"""Settings of the indexer: flags, ``KVBUS_*`` variables, file."""

from typing import Annotated

from kvbus_indexer.core.limits import Limits
from kvbus_runtime.settings import CommonSettings, Flag

_NOT_POSITIVE = ("approximate", "checkpoint_interval_s", "index")


class IndexerSettings(CommonSettings, frozen=True, kw_only=True):
    """See ``kvbus indexer --help``."""

    index: Annotated[
        str,
        Flag(
            "implementation of the index; auto: the compiled one if it can be had", choices=("auto", "flash", "plain")
        ),
    ] = "auto"
    max_entries: Annotated[int, Flag("blocks in the index, counted once per instance and tier that holds them")] = (
        2_000_000
    )
    refill_ratio: Annotated[float, Flag("an instance that did not fit is completed below this part of the limit")] = 0.9
    refill_interval_s: Annotated[float, Flag("how often to see whether there is room for it")] = 30.0
    max_buffered_keys: Annotated[int, Flag("keys of events kept per instance while its snapshot is fetched")] = 200_000
    max_feeds_per_instance: Annotated[int, Flag("numbered event sequences (model and tier) per instance")] = 64
    lag_s: Annotated[float, Flag("how long events that a worker says it has sent may be on their way")] = 1.0
    max_repairs: Annotated[int, Flag("repairs at the same time, from the stream or by a snapshot")] = 4
    repair_backoff_s: Annotated[float, Flag("least time between two snapshots of an instance")] = 0.25
    repair_backoff_max_s: Annotated[float, Flag("most time between two tries of a failing snapshot")] = 10.0
    repair_give_up: Annotated[int, Flag("failed tries after which the old content of the instance is dropped")] = 8
    snapshot_timeout_s: Annotated[float, Flag("how long an instance may take to answer with a part of a snapshot")] = (
        5.0
    )
    snapshot_max_parts: Annotated[int, Flag("parts of one snapshot")] = 10_000
    max_query_keys: Annotated[int, Flag("blocks in one query")] = 131_072
    replay_max_messages: Annotated[
        int, Flag("messages of the event stream read again to fill a gap; beyond: a snapshot of the instance")
    ] = 256
    checkpoint_interval_s: Annotated[
        float, Flag("how often one of the indexers saves the content to the object store (0: never)")
    ] = 60.0
    checkpoint_keep: Annotated[int, Flag("checkpoints that are kept")] = 2
    checkpoint_max_bytes: Annotated[
        int, Flag("largest checkpoint, about 9 bytes per entry; the store reserves as many, times those kept and one")
    ] = 64 << 20
    checkpoint_max_age_s: Annotated[float, Flag("when a checkpoint is too old to be of use, and goes")] = 3600.0
    approximate: Annotated[
        bool, Flag("guess from routing decisions what workers without KV events hold (--no-approximate: do not)")
    ] = True
    approximate_ttl_s: Annotated[float, Flag("how long such a worker is believed to hold a prompt")] = 120.0
    max_predicted_keys: Annotated[
        int, Flag("blocks of all prompts that are predicted to be on their worker, oldest out first")
    ] = 200_000
    predicted_ttl_s: Annotated[float, Flag("how long a prompt may wait for its first token and still be predicted")] = (
        60.0
    )
    confirm_s: Annotated[
        float, Flag("after the first token: how long until the events must have told of the blocks")
    ] = 2.0
    events_grace_s: Annotated[
        float, Flag("how long a worker may work without that its KV events arrive, before it is reported")
    ] = 30.0
    max_used_prefixes: Annotated[int, Flag("prefixes whose uses are counted for kvbus index top")] = 1024
    use_halving_s: Annotated[float, Flag("after which time a use of a prefix counts half")] = 600.0
    max_pending_questions: Annotated[int, Flag("questions of tools answered at the same time")] = 16
    max_pending_queries: Annotated[int, Flag("queries answered at the same time")] = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in type(self).__struct_fields__:
            if name in CommonSettings.__struct_fields__ or name in _NOT_POSITIVE:
                continue
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if self.checkpoint_interval_s < 0:
            raise ValueError("checkpoint_interval_s must not be negative")
        if self.refill_ratio > 1:
            raise ValueError("refill_ratio must be at most 1")
        if self.repair_backoff_max_s < self.repair_backoff_s:
            raise ValueError("repair_backoff_max_s must be at least repair_backoff_s")

    @property
    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})
