"""How `kvbus kv` shows tiers and blocks."""

from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

from kvbus_cli.tables import right_aligned
from kvbus_wire.kv_tools import BlockState, DescribedTiers, TierState

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class BlockLine(msgspec.Struct, frozen=True):
    """A block in a tier of a kvbm; keys in hexadecimal."""

    kvbm: str
    tier: str
    key: str
    parent: str
    depth: int
    kind: str
    priority: int
    ttl_s: float | None
    tenant: str
    users: int


def block_lines(kvbm: str, blocks: Iterable[BlockState]) -> list[BlockLine]:
    return [
        BlockLine(kvbm, b.tier, b.key.hex(), b.parent.hex(), b.depth, b.kind, b.priority, b.ttl_s, b.tenant, b.users)
        for b in blocks
    ]


def blocks_table(lines: Sequence[BlockLine]) -> Table:
    table = right_aligned("kvbm", "tier", "key", "depth", "kind", "priority", "for", "tenant", "users", first=3)
    for line in lines:
        lasts = "" if line.ttl_s is None else f"{line.ttl_s:.0f} s"
        table.add_row(
            line.kvbm,
            line.tier,
            line.key,
            str(line.depth),
            line.kind,
            str(line.priority),
            lasts,
            line.tenant,
            str(line.users),
        )
    return table


def tiers_tables(told: Sequence[DescribedTiers]) -> list[tuple[Table, tuple[str, ...]]]:
    tiers = right_aligned(
        *(
            "kvbm",
            "tier",
            "",
            "blocks",
            "bytes",
            "of",
            "hits",
            "misses",
            "stored",
            "refused",
            "evicted",
            "corrupt",
            "failed",
        ),
        first=3,
    )
    holdings = right_aligned("kvbm", "tier", "model", "blocks", "pinned", "block", "tokens", "layout", first=3)
    for kvbm in told:
        for tier in kvbm.tiers:
            tiers.add_row(kvbm.instance_id, *_tier_row(tier))
            for held in tier.holdings:
                holdings.add_row(
                    kvbm.instance_id,
                    tier.tier,
                    held.model,
                    str(held.blocks),
                    str(held.pinned),
                    size(held.block_bytes),
                    str(held.block_size),
                    held.kv_layout,
                )
    stores = sorted({kvbm.g4_store for kvbm in told if kvbm.g4_store})
    return [(tiers, tuple(f"g4: {store}" for store in stores)), (holdings, ("", "by model:"))]


def _tier_row(tier: TierState) -> list[str]:
    evicted = ", ".join(f"{count} {kind}" for kind, count in sorted(tier.evictions.items()))
    counts = (tier.hits, tier.misses, tier.stored, tier.refused)
    return [
        tier.tier,
        "" if tier.available else "bypassed",
        str(tier.blocks),
        size(tier.used_bytes),
        size(tier.capacity_bytes),
        *map(str, counts),
        evicted or "0",
        str(tier.corrupt),
        str(tier.failures),
    ]


def size(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if not unit else f"{value:.1f} {_UNITS[unit]}"
