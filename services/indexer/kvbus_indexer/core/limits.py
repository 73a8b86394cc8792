"""Every limit of the indexer's core. The settings are the place where they are explained."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_entries: int = 2_000_000
    refill_ratio: float = 0.9
    refill_interval_s: float = 30.0
    max_buffered_keys: int = 200_000
    max_feeds_per_instance: int = 64
    lag_s: float = 1.0
    max_repairs: int = 4
    repair_backoff_s: float = 0.25
    repair_backoff_max_s: float = 10.0
    repair_give_up: int = 8
    approximate: bool = True
    max_predicted_keys: int = 200_000
    predicted_ttl_s: float = 60.0
    confirm_s: float = 2.0
    approximate_ttl_s: float = 120.0
    events_grace_s: float = 30.0
