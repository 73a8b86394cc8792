"""Which tiers there are below G2, as the settings say."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvbus_kvbm.adapters.cluster.opening import open_store
from kvbus_kvbm.adapters.cluster.tier import ClusterTier
from kvbus_kvbm.adapters.disk.tier import DiskTier
from kvbus_kvbm.core.lower import Changed, LowerTier
from kvbus_kvbm.core.write_through import EdgePolicy
from kvbus_kvbm.settings import KvbmSettings


class TierPlan(msgspec.Struct, frozen=True):
    tier: LowerTier
    policy: EdgePolicy
    write_bytes_per_s: float = 0.0


class MakeTiers(Protocol):
    def __call__(
        self, settings: KvbmSettings, listener: Callable[[str], Changed], *, log: Any, clock: Callable[[], float]
    ) -> list[TierPlan]:
        """See `lower_tiers`."""


def lower_tiers(
    settings: KvbmSettings, listener: Callable[[str], Changed], *, log: Any, clock: Callable[[], float]
) -> list[TierPlan]:
    """From above to below; ``listener`` gives what a tier of that name has to call with its changes."""
    plans: list[TierPlan] = []
    if settings.g3_dir:
        disk = DiskTier(Path(settings.g3_dir), settings.disk_limits, changed=listener("g3"), log=log, clock=clock)
        plans.append(TierPlan(disk, EdgePolicy.parse(settings.g3_policy), settings.g3_write_bytes_per_s))
    if settings.g4_url:
        cluster = ClusterTier(
            open_store(settings.g4_url, settings.cluster_limits),
            settings.cluster_limits,
            owner=settings.g4_owner or settings.host_id or socket.gethostname(),
            changed=listener("g4"),
            log=log,
            clock=clock,
        )
        plans.append(TierPlan(cluster, EdgePolicy.parse(settings.g4_policy), settings.g4_write_bytes_per_s))
    return plans
