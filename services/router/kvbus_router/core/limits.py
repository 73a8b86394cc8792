"""Every limit and weight of the router's core. The settings are the place where they are explained."""

import msgspec

from kvbus_wire.router import SetLimits, WorkerLimits

MAX_CORDONED = 4096


class BadLimits(ValueError):
    """A change of limits that makes no sense. ``param``: the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """What can be changed at run time, see `kvbus_wire.router.WorkerLimits`."""

    max_requests_per_worker: int = 0
    worker_limit_factor: float = 1.25
    busy_used_blocks_share: float = 0.0
    busy_waiting_tokens: int = 0
    cordoned: tuple[str, ...] = ()

    def changed(self, limits: WorkerLimits) -> "Thresholds":
        """With what ``limits`` say; what they leave open stays."""
        fields = WorkerLimits.__struct_fields__
        given = {name: value for name in fields if (value := getattr(limits, name)) is not None}
        return msgspec.structs.replace(self, **given)

    def as_limits(self) -> WorkerLimits:
        return WorkerLimits(**{name: getattr(self, name) for name in WorkerLimits.__struct_fields__})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_requests_per_worker: int = 0
    worker_limit_factor: float = 1.25
    busy_used_blocks_share: float = 0.0
    busy_waiting_tokens: int = 0
    max_queued: int = 1024
    aging_per_s: float = 0.1
    overdue_s: float = 30.0
    fair_quantum_tokens: int = 4096
    max_tenants: int = 1024
    follow_wait_s: float = 10.0
    worker_wait_s: float = 2.0
    max_reservations: int = 100_000
    reservation_grace_s: float = 5.0
    max_ended_requests: int = 16_384
    max_early_news: int = 1024
    max_inflight_key_bytes: int = 64 << 20
    inflight_grace_s: float = 2.0
    exact_workers: int = 64
    candidates: int = 16
    max_explained_workers: int = 16
    max_explained_requests: int = 1024
    affinity: str = "soft"
    max_sessions: int = 65_536
    affinity_ttl_s: float = 1800.0
    affinity_bonus_s: float = 0.1

    @property
    def thresholds(self) -> Thresholds:
        fields = set(Thresholds.__struct_fields__) & set(self.__struct_fields__)
        return Thresholds(**{name: getattr(self, name) for name in fields})


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    work_weight: float = 0.25
    decode_weight: float = 8.0
    g2_speedup: float = 10.0
    g3_speedup: float = 4.0
    g4_speedup: float = 2.0
    remote_speedup: float = 4.0
    remote_prefill: bool = True
    handover_s: float = 0.02
    disturb_weight: float = 0.25
    expected_output_tokens: int = 256


def changed_limits(stored: WorkerLimits, asked: SetLimits) -> WorkerLimits:
    """What is stored after this change. Raise BadLimits."""
    names = WorkerLimits.__struct_fields__
    for name in asked.reset:
        if name not in names:
            raise BadLimits("reset", f"names no limit with {name!r}: there are {', '.join(names)}")
    fields = {name: getattr(stored, name) for name in names if name not in asked.reset}
    fields |= {name: value for name in names if (value := getattr(asked.limits, name)) is not None}
    if asked.cordon or asked.uncordon:
        cordoned = {*(fields.get("cordoned") or ()), *asked.cordon} - set(asked.uncordon)
        fields["cordoned"] = tuple(sorted(cordoned)) or None
    limits = WorkerLimits(**fields)
    check_limits(limits)
    return limits


def check_limits(limits: WorkerLimits) -> None:
    """Raise BadLimits. The ranges are those of the settings; "nan" is in none of them."""
    if limits.max_requests_per_worker is not None and limits.max_requests_per_worker < 0:
        raise BadLimits("max_requests_per_worker", "must not be negative")
    if limits.worker_limit_factor is not None and not 0 < limits.worker_limit_factor < 1e6:
        raise BadLimits("worker_limit_factor", "must be positive")
    if limits.busy_used_blocks_share is not None and not 0 <= limits.busy_used_blocks_share <= 1:
        raise BadLimits("busy_used_blocks_share", "must be 0..1")
    if limits.busy_waiting_tokens is not None and limits.busy_waiting_tokens < 0:
        raise BadLimits("busy_waiting_tokens", "must not be negative")
    if len(limits.cordoned or ()) > MAX_CORDONED:
        raise BadLimits("cordoned", f"holds more than {MAX_CORDONED} workers")
