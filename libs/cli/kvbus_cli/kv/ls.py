"""`kvbus kv ls`: what lies in which tier."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvbus_cli.asking import NotAnswered, run
from kvbus_cli.kv.asking import TIERS, Kvbm, KvSettings, of_each, of_model
from kvbus_cli.kv.tables import BlockLine, block_lines, blocks_table, tiers_tables
from kvbus_cli.tables import print_table
from kvbus_cli.tool import failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.kv_tools import DescribedTiers, DescribeTiers, ListBlocks, ListedBlocks


class LsSettings(KvSettings, frozen=True, kw_only=True):
    """Without a model: all tiers. With one: its blocks, one by one."""

    model: Annotated[str, Flag("the blocks of this model", metavar="NAME")] = ""
    tier: Annotated[str, Flag("in this tier", choices=TIERS)] = "g2"
    limit: Annotated[int, Flag("how many blocks of each instance")] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.limit <= MOST_BLOCKS:
            raise ValueError(f"limit must be from 1 to {MOST_BLOCKS:,}")


MOST_BLOCKS = 1_000_000


class Tiers(msgspec.Struct, frozen=True):
    """What `kvbus kv ls --json` prints."""

    kvbms: list[DescribedTiers]


class Blocks(msgspec.Struct, frozen=True):
    """What `kvbus kv ls --model NAME --json` prints; `kvbus kv inspect --json` likewise."""

    model: str
    blocks: list[BlockLine]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        LsSettings,
        "kv ls",
        "Show what each kvbm has in which tier and how the tiers have done, or list the blocks of a model in one of them.",
        argv,
    )

    async def describe(bus: Bus) -> list[DescribedTiers]:
        async def one(kvbm: Kvbm) -> DescribedTiers:
            told: DescribedTiers = await kvbm.ask(DescribeTiers(), DescribedTiers)
            return told

        return await of_each(bus, settings.kvbm, one)

    async def enumerate_blocks(bus: Bus) -> list[list[BlockLine]]:
        async def one(kvbm: Kvbm) -> list[BlockLine]:
            lines: list[BlockLine] = []
            after = b""
            while len(lines) < settings.limit:
                question = ListBlocks(
                    model=settings.model, tier=settings.tier, after=after, limit=settings.limit - len(lines)
                )
                page: ListedBlocks = await kvbm.ask(question, ListedBlocks)
                lines += block_lines(kvbm.instance_id, page.blocks)
                after = page.after
                if not after:
                    break
            return lines

        return await of_model(bus, settings.kvbm, settings.model, one)

    try:
        if settings.model:
            found = [line for lines in run(settings, "kvbm", enumerate_blocks) for line in lines]
            if settings.json:
                print_json(Blocks(settings.model, found))
            else:
                print_table(blocks_table(found), f"{len(found)} blocks of {settings.model} in {settings.tier}")
            return 0
        tiers = run(settings, "kvbm", describe)
    except NotAnswered as failure:
        return failed("kv ls", failure)
    if settings.json:
        print_json(Tiers(tiers))
    else:
        for table, lines in tiers_tables(tiers):
            print_table(table, *lines)
    return 0
