"""Settings of kvbm: flags, ``KVBUS_*`` variables, file."""

from typing import Annotated

from kvbus_kvbm.core.cluster_limits import ClusterLimits, check_store_url
from kvbus_kvbm.core.disk_space import DiskLimits
from kvbus_kvbm.core.pool import PoolLimits
from kvbus_kvbm.core.pools import Budget
from kvbus_kvbm.core.write_through import BadPolicy, EdgePolicy, LoadLimits, TierLimits
from kvbus_runtime.settings import CommonSettings, Flag

_LEAST_G3_BYTES = 1 << 20


class KvbmSettings(CommonSettings, frozen=True, kw_only=True):
    """See ``kvbus kvbm --help``."""

    g2_bytes: Annotated[int, Flag("host memory for KV blocks, all models together", metavar="BYTES")] = 1 << 30
    arena_dir: Annotated[
        str, Flag("where the shared memory lies; workers must see the same directory", metavar="DIR")
    ] = "/dev/shm"  # noqa: S108
    arena_group: Annotated[str, Flag("group (name or id) that may map the memory, too (none: this user only)")] = ""
    pool_share: Annotated[float, Flag("part of the memory not yet assigned that a new pool takes")] = 0.8
    min_pool_slots: Annotated[int, Flag("a pool of fewer blocks is not made")] = 8
    max_pools: Annotated[int, Flag("pools (one per model and block layout) at the same time")] = 8
    max_models: Annotated[int, Flag("models with a stream of KV events, over the whole run")] = 32
    lease_s: Annotated[float, Flag("how long a worker may write or read the slots it was given")] = 10.0
    g2_pin_share: Annotated[float, Flag("part of a pool that one tenant's directives may pin")] = 0.5
    quarantine_s: Annotated[float, Flag("rest of a slot whose writer went away without a word")] = 30.0
    max_leases_per_worker: Annotated[int, Flag("leases one worker may hold at the same time")] = 256
    max_keys_per_request: Annotated[int, Flag("blocks in one request")] = 16_384
    max_pending_requests: Annotated[int, Flag("requests handled at the same time")] = 1024
    absent_grace_s: Annotated[float, Flag("an attached worker unknown to the directory counts as gone after this")] = (
        60.0
    )
    onboard_bytes_per_s: Annotated[float, Flag("rate at which workers read blocks back (0: measured at start)")] = 0.0
    g3_policy: Annotated[
        str, Flag("what G3 takes: all, frequency:N (used N times), priority:N (of at least that priority, and pinned)")
    ] = "all"
    g4_policy: Annotated[str, Flag("what G4 takes, as g3_policy")] = "all"
    g3_write_bytes_per_s: Annotated[float, Flag("limit of writing to G3 (0: none)")] = 0.0
    g4_write_bytes_per_s: Annotated[float, Flag("limit of writing to G4 (0: none)")] = 0.0
    tier_queue_blocks: Annotated[int, Flag("blocks that wait for one tier; further ones are not written down")] = 65_536
    tier_batch_bytes: Annotated[int, Flag("written down at once", metavar="BYTES")] = 32 << 20
    tier_batch_share: Annotated[float, Flag("part of a pool that a batch may hold while it is written")] = 0.125
    tier_gather_s: Annotated[float, Flag("how long a batch for a lower tier gathers")] = 0.05
    tier_retry_s: Annotated[float, Flag("pause before a tier that cannot be written is tried again")] = 1.0
    load_chunk_bytes: Annotated[int, Flag("read from a lower tier at once", metavar="BYTES")] = 16 << 20
    load_depth: Annotated[int, Flag("such reads at the same time for one chain")] = 4
    load_parallel: Annotated[int, Flag("chains brought up at the same time")] = 4
    max_loads: Annotated[int, Flag("chains that are brought up or wait for it")] = 256
    load_deadline_s: Annotated[float, Flag("what was not brought up by then stays below")] = 30.0
    max_pin_wait_s: Annotated[float, Flag("longest time that a worker's question waits for a block from below")] = 10.0
    snapshot_chunk_keys: Annotated[int, Flag("blocks in one message of a snapshot")] = 8192
    max_snapshots: Annotated[int, Flag("snapshots kept for askers that fetch them in chunks")] = 4
    snapshot_ttl_s: Annotated[float, Flag("how long a snapshot is kept after the last question for it")] = 30.0
    g3_dir: Annotated[str, Flag("directory on a local disk for KV blocks (none: no G3)", metavar="DIR")] = ""
    g3_bytes: Annotated[int, Flag("disk space for KV blocks, all models together", metavar="BYTES")] = 16 << 30
    g3_segment_bytes: Annotated[int, Flag("size of the files in which the space is taken")] = 256 << 20
    g3_keep_free_bytes: Annotated[int, Flag("what of the file system is left to others")] = 1 << 30
    g3_start_s: Annotated[float, Flag("how long the start waits for the disk; G3 opens later then")] = 60.0
    g3_deadline_s: Annotated[float, Flag("how long the disk may take for an operation, besides its bytes")] = 2.0
    g3_min_bytes_per_s: Annotated[float, Flag("rate that the disk must reach within the deadline")] = 50e6
    g3_failures: Annotated[int, Flag("failures in a row after which the disk is left alone for a while")] = 3
    g3_rest_s: Annotated[float, Flag("how long a disk in trouble is left alone at first")] = 5.0
    g3_read_threads: Annotated[int, Flag("reads from the disk at the same time")] = 4
    g3_max_waiting: Annotated[int, Flag("reads, and writes, that may be under way or wait")] = 256
    g3_pin_share: Annotated[float, Flag("part of the disk space that pinned blocks of one tenant may take")] = 0.25
    tool_blocks: Annotated[int, Flag("blocks in one answer to kvbus kv")] = 1000
    tool_verify_bytes: Annotated[int, Flag("read at once by kvbus kv verify", metavar="BYTES")] = 64 << 20
    g4_url: Annotated[
        str,
        Flag(
            "store of the cluster for KV blocks, file:///directory or s3://bucket/prefix (none: no G4)", metavar="URL"
        ),
    ] = ""
    g4_bytes: Annotated[int, Flag("what this kvbm may take there, all models together", metavar="BYTES")] = 64 << 30
    g4_owner: Annotated[
        str, Flag("name of this kvbm in the store, the same after a restart and no other's (none: the host id)")
    ] = ""
    g4_read_deadline_s: Annotated[float, Flag("how long the store may take to give a block")] = 2.0
    g4_write_deadline_s: Annotated[float, Flag("how long the store may take to keep a block")] = 10.0
    g4_parallel: Annotated[int, Flag("blocks on their way from the store, and to it, at the same time")] = 16
    g4_failures: Annotated[int, Flag("failures in a row after which the store is left alone for a while")] = 3
    g4_rest_s: Annotated[float, Flag("how long a store in trouble is left alone at first")] = 5.0
    g4_flush_s: Annotated[float, Flag("how old a renewed lease may get before the store hears of it")] = 5.0
    g4_pin_share: Annotated[float, Flag("part of g4_bytes that pinned blocks of one tenant may take")] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_g3()
        self._check_g4()
        for name in (
            "g2_bytes",
            "min_pool_slots",
            "max_pools",
            "max_models",
            "lease_s",
            "max_leases_per_worker",
            "max_keys_per_request",
            "max_pending_requests",
            "tool_blocks",
            "tool_verify_bytes",
            "tier_queue_blocks",
            "tier_batch_bytes",
            "tier_retry_s",
            "load_chunk_bytes",
            "load_depth",
            "load_parallel",
            "max_loads",
            "load_deadline_s",
            "snapshot_chunk_keys",
            "max_snapshots",
            "snapshot_ttl_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in (
            "quarantine_s",
            "absent_grace_s",
            "onboard_bytes_per_s",
            "g3_write_bytes_per_s",
            "g4_write_bytes_per_s",
            "tier_gather_s",
            "max_pin_wait_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if not 0 <= self.g2_pin_share <= 1:
            raise ValueError("g2_pin_share must be from 0 to 1")
        if not 0 < self.pool_share <= 1:
            raise ValueError("pool_share must be above 0 and at most 1")
        if not 0 < self.tier_batch_share <= 0.5:
            raise ValueError("tier_batch_share must be above 0 and at most 0.5")
        for name in ("g3_policy", "g4_policy"):
            try:
                EdgePolicy.parse(getattr(self, name))
            except BadPolicy as problem:
                raise ValueError(f"{name}: {problem}") from problem

    def _check_g3(self) -> None:
        for name in (
            "g3_bytes",
            "g3_segment_bytes",
            "g3_start_s",
            "g3_deadline_s",
            "g3_min_bytes_per_s",
            "g3_failures",
            "g3_rest_s",
            "g3_read_threads",
            "g3_max_waiting",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if self.g3_dir and self.g3_bytes < _LEAST_G3_BYTES:
            raise ValueError(f"g3_bytes must be at least {_LEAST_G3_BYTES}: less holds no block, or hardly any")
        if self.g3_keep_free_bytes < 0:
            raise ValueError("g3_keep_free_bytes must not be negative")
        if not 0 <= self.g3_pin_share <= 1:
            raise ValueError("g3_pin_share must be between 0 and 1")

    def _check_g4(self) -> None:
        names = (
            "g4_bytes",
            "g4_read_deadline_s",
            "g4_write_deadline_s",
            "g4_parallel",
            "g4_failures",
            "g4_rest_s",
            "g4_flush_s",
        )
        for name in names:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if not 0 <= self.g4_pin_share <= 1:
            raise ValueError("g4_pin_share must be from 0 to 1")
        if self.g4_url:
            try:
                check_store_url(self.g4_url)
            except ValueError as problem:
                raise ValueError(f"g4_url: {problem}") from problem

    @property
    def cluster_limits(self) -> ClusterLimits:
        return ClusterLimits(
            capacity_bytes=self.g4_bytes,
            pin_share=self.g4_pin_share,
            read_deadline_s=self.g4_read_deadline_s,
            write_deadline_s=self.g4_write_deadline_s,
            parallel=self.g4_parallel,
            rest_s=self.g4_rest_s,
            failures=self.g4_failures,
            flush_s=self.g4_flush_s,
        )

    @property
    def disk_limits(self) -> DiskLimits:
        return DiskLimits(
            capacity_bytes=self.g3_bytes,
            segment_bytes=self.g3_segment_bytes,
            keep_free_bytes=self.g3_keep_free_bytes,
            start_s=self.g3_start_s,
            deadline_s=self.g3_deadline_s,
            min_bytes_per_s=self.g3_min_bytes_per_s,
            failures=self.g3_failures,
            rest_s=self.g3_rest_s,
            read_threads=self.g3_read_threads,
            max_waiting=self.g3_max_waiting,
            pin_share=self.g3_pin_share,
        )

    @property
    def budget(self) -> Budget:
        return Budget(
            g2_bytes=self.g2_bytes,
            pool_share=self.pool_share,
            max_pools=self.max_pools,
            max_models=self.max_models,
            min_slots=self.min_pool_slots,
        )

    @property
    def pool_limits(self) -> PoolLimits:
        return PoolLimits(
            lease_s=self.lease_s,
            quarantine_s=self.quarantine_s,
            max_leases_per_instance=self.max_leases_per_worker,
            max_keys_per_request=self.max_keys_per_request,
            pin_share=self.g2_pin_share,
        )

    @property
    def tier_limits(self) -> TierLimits:
        return TierLimits(
            batch_bytes=self.tier_batch_bytes,
            batch_share=self.tier_batch_share,
            gather_s=self.tier_gather_s,
            retry_s=self.tier_retry_s,
            queue_blocks=self.tier_queue_blocks,
        )

    @property
    def load_limits(self) -> LoadLimits:
        return LoadLimits(
            chunk_bytes=self.load_chunk_bytes,
            depth=self.load_depth,
            parallel=self.load_parallel,
            max_loads=self.max_loads,
            deadline_s=self.load_deadline_s,
        )
