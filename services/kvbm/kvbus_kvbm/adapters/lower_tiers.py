"""Which tiers there are below G2, as the settings say."""

from collections.abc import Callable

import msgspec

from kvbus_kvbm.core.lower import Changed, LowerTier
from kvbus_kvbm.core.write_through import EdgePolicy
from kvbus_kvbm.settings import KvbmSettings


class TierPlan(msgspec.Struct, frozen=True):
    tier: LowerTier
    policy: EdgePolicy
    write_bytes_per_s: float = 0.0


MakeTiers = Callable[[KvbmSettings, Callable[[str], Changed]], list[TierPlan]]


def lower_tiers(settings: KvbmSettings, listener: Callable[[str], Changed]) -> list[TierPlan]:
    """From above to below; ``listener`` gives what a tier of that name has to call with its changes."""
    return []
