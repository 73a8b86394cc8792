"""Settings of the router: flags, ``KVBUS_*`` variables, file."""

from typing import Annotated

from kvbus_router.core.affinity import Mode
from kvbus_router.core.limits import Limits, Weights
from kvbus_runtime.settings import CommonSettings, Flag

MODES = tuple(Mode)

_MAY_BE_ZERO = (
    "max_requests_per_worker",
    "busy_used_blocks_share",
    "busy_waiting_tokens",
    "aging_per_s",
    "worker_wait_s",
    "load_wait_s",
    "follow_wait_s",
    "inflight_grace_s",
    "max_explained_workers",
    "max_explained_requests",
    "affinity_bonus_s",
    "temperature_s",
    "work_weight",
    "decode_weight",
    "handover_s",
    "disturb_weight",
)


class RouterSettings(CommonSettings, frozen=True, kw_only=True):
    """See ``kvbus router --help``."""

    policy: Annotated[
        str, Flag("kv, round-robin, random, least-loaded, power-of-two, or an entry point of kvbus.routing_policies")
    ] = "kv"
    temperature_s: Annotated[
        float, Flag("kv: a worker that costs so many seconds more is chosen e times less often (0: only the best)")
    ] = 0.0
    affinity: Annotated[
        str, Flag("a session's requests go to the worker of the last one: if it costs little, or always", choices=MODES)
    ] = "soft"
    affinity_bonus_s: Annotated[float, Flag("soft: what that worker may cost more than another, in seconds")] = 0.1
    affinity_ttl_s: Annotated[float, Flag("a session without a request for so long is forgotten")] = 1800.0
    max_sessions: Annotated[int, Flag("sessions that are remembered; beyond it: the most silent one is forgotten")] = (
        65_536
    )

    max_requests_per_worker: Annotated[
        int, Flag("requests placed on a worker at the same time (0: see the factor)")
    ] = 0
    worker_limit_factor: Annotated[float, Flag("the same as a multiple of the worker's max_num_seqs")] = 1.25
    busy_used_blocks_share: Annotated[
        float, Flag("a worker whose requests use this part of its device blocks gets nothing new (0: off)")
    ] = 0.0
    busy_waiting_tokens: Annotated[
        int, Flag("a worker with so many prompt tokens still to compute gets nothing new (0: off)")
    ] = 0
    max_queued: Annotated[int, Flag("requests that wait for a worker; beyond it: overloaded")] = 1024
    aging_per_s: Annotated[float, Flag("priority that a second of waiting is worth")] = 0.1
    overdue_s: Annotated[float, Flag("after this wait a request gets some turns whatever its strict priority")] = 30.0
    fair_quantum_tokens: Annotated[
        int, Flag("uncached tokens that a tenant of weight 1 may have computed before it is another's turn")
    ] = 4096
    max_tenants: Annotated[int, Flag("tenants that turns are shared between; those beyond it share as one")] = 1024
    policy_classes: Annotated[
        str, Flag("TOML file with the weights, limits and priorities of policy classes", metavar="FILE")
    ] = ""
    policy_classes_poll_s: Annotated[float, Flag("how often that file is looked at for changes")] = 5.0
    follow_wait_s: Annotated[
        float, Flag("how long a request may wait for the full worker that computes its prefix (0: never)")
    ] = 10.0
    worker_wait_s: Annotated[float, Flag("how long a request waits when no worker can take it at all")] = 2.0
    max_reservations: Annotated[int, Flag("placed requests that are kept account of")] = 100_000
    reservation_grace_s: Annotated[
        float, Flag("a request that its worker does not report by then has not arrived there")
    ] = 5.0
    load_wait_s: Annotated[
        float, Flag("how long a router that starts waits for the load of the workers there are, before it serves")
    ] = 1.0
    max_ended_requests: Annotated[
        int, Flag("ended requests that are remembered, so that late decisions of replicas place them no more")
    ] = 16_384
    max_early_news: Annotated[
        int, Flag("reports of, and decisions on, workers that the directory does not name yet; the last ones are kept")
    ] = 1024
    max_inflight_key_bytes: Annotated[int, Flag("keys of prefixes that are being computed", metavar="BYTES")] = 64 << 20
    inflight_grace_s: Annotated[float, Flag("time for the events of a computed prefix to reach the index")] = 2.0
    exact_workers: Annotated[
        int, Flag("kv: a lone router compares all workers of a cluster up to this size for each request")
    ] = 64
    candidates: Annotated[
        int, Flag("kv: of others so many that hold the most of the prompt, and at most so many at random")
    ] = 16
    max_explained_workers: Annotated[int, Flag("workers named in the explanation of a placement")] = 16
    max_explained_requests: Annotated[int, Flag("placements that can be explained afterwards; the last ones")] = 1024

    work_weight: Annotated[float, Flag("cost of a second of prefill that a request adds, in seconds")] = 0.25
    decode_weight: Annotated[
        float, Flag("cost of each request that runs on a worker, in decode steps; more spreads requests out")
    ] = 8.0
    g2_speedup: Annotated[float, Flag("fetching from host memory against computing, until it was measured")] = 10.0
    g3_speedup: Annotated[float, Flag("the same from the host's NVMe")] = 4.0
    g4_speedup: Annotated[float, Flag("the same from the cluster's store")] = 2.0
    remote_speedup: Annotated[float, Flag("the same from another worker")] = 4.0
    remote_prefill: Annotated[
        bool, Flag("have prompts computed by workers with the role prefill, where that is predicted to be better")
    ] = True
    handover_s: Annotated[
        float, Flag("time that handing a prompt over takes besides computing, until it was measured")
    ] = 0.02
    disturb_weight: Annotated[
        float, Flag("cost of a second of prefill for each request that runs where it is computed, in seconds")
    ] = 0.25
    expected_output_tokens: Annotated[int, Flag("output of a request that says nothing about it")] = 256

    index_timeout_s: Annotated[float, Flag("how long an indexer may take; beyond it: no cache knowledge")] = 0.25
    index_failures: Annotated[int, Flag("unanswered questions in a row after which an indexer is left alone")] = 3
    index_pause_s: Annotated[float, Flag("how long it is left alone then")] = 1.0
    max_pending_requests: Annotated[int, Flag("route requests handled at the same time, waiting ones included")] = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in type(self).__struct_fields__:
            value = getattr(self, name)
            if name in CommonSettings.__struct_fields__ or isinstance(value, str | bool):
                continue
            if value < 0:
                raise ValueError(f"{name} must not be negative")
            if value == 0 and name not in _MAY_BE_ZERO:
                raise ValueError(f"{name} must be positive")
        if self.busy_used_blocks_share > 1:
            raise ValueError("busy_used_blocks_share must be at most 1")
        if self.max_pending_requests <= self.max_queued:
            raise ValueError("max_pending_requests must be above max_queued")

    @property
    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})

    @property
    def weights(self) -> Weights:
        return Weights(**{name: getattr(self, name) for name in Weights.__struct_fields__})
