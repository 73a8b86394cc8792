"""Every limit and weight of the router's core. The settings are the place where they are explained."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_requests_per_worker: int = 0
    worker_limit_factor: float = 1.25
    max_queued: int = 1024
    aging_per_s: float = 0.1
    overdue_s: float = 30.0
    worker_wait_s: float = 2.0
    max_reservations: int = 100_000
    reservation_grace_s: float = 5.0
    max_inflight_key_bytes: int = 64 << 20
    inflight_grace_s: float = 2.0
    max_candidates: int = 16


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    work_weight: float = 0.25
    decode_weight: float = 1.0
    onboard_speedup: float = 10.0
    expected_output_tokens: int = 256
