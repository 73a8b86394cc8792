"""`kvbus kv evict`: free blocks in one tier."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvbus_cli.asking import NotAnswered, run
from kvbus_cli.kv.asking import TIERS, WORK_S, Chain, ChainSettings, Kvbm, of_model
from kvbus_cli.prompt.client import PromptFailed
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import BAD_USAGE, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.kv_tools import BlockState, EvictBlocks, ListBlocks, ListedBlocks
from kvbus_wire.kvbm import DroppedBlocks

_PIECE_BLOCKS = 1000


class EvictSettings(ChainSettings, frozen=True, kw_only=True):
    """Blocks of a prompt, by their keys, or all of a model."""

    tier: Annotated[str, Flag("where they go; the other tiers keep them", choices=TIERS)] = "g2"
    all: Annotated[bool, Flag("all blocks of --model in the tier")] = False

    def chain(self) -> Chain:
        """Without keys: all blocks. Raise BadRequestFile, PromptFailed."""
        if not self.all:
            return super().chain()
        if any((self.keys, self.messages, self.text, self.tokens)):
            raise BadRequestFile("give a prompt, --keys or --all")
        if not self.model:
            raise BadRequestFile("give --model with --all")
        return Chain(self.model, b"")


class Freed(msgspec.Struct, frozen=True):
    kvbm: str
    tier: str
    blocks: int


class Evicted(msgspec.Struct, frozen=True):
    """What `kvbus kv evict --json` prints."""

    model: str
    freed: list[Freed]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        EvictSettings,
        "kv evict",
        "Free blocks in one tier of each kvbm, whatever their leases say. What is in use, or has other blocks below it, stays.",
        argv,
    )
    try:
        chain = settings.chain()

        async def ask(bus: Bus) -> list[Freed]:
            async def one(kvbm: Kvbm) -> Freed:
                pieces = chain.pieces(_PIECE_BLOCKS)[::-1]
                if settings.all:
                    pieces = await _all_of(kvbm, settings.model, settings.tier)
                freed = 0
                for piece in pieces:
                    question = EvictBlocks(model=chain.model, tier=settings.tier, keys=piece)
                    told: DroppedBlocks = await kvbm.ask(question, DroppedBlocks, WORK_S)
                    freed += told.blocks.get(settings.tier, 0)
                return Freed(kvbm.instance_id, settings.tier, freed)

            return await of_model(bus, settings.kvbm, chain.model, one)

        freed = run(settings, "kvbm", ask)
    except BadRequestFile as failure:
        return failed("kv evict", failure, BAD_USAGE)
    except (NotAnswered, PromptFailed) as failure:
        return failed("kv evict", failure)
    if settings.json:
        print_json(Evicted(chain.model, freed))
        return 0
    table = right_aligned("kvbm", "tier", "freed blocks", first=2)
    for line in freed:
        table.add_row(line.kvbm, line.tier, str(line.blocks))
    print_table(table, chain.model)
    return 0


async def _all_of(kvbm: Kvbm, model: str, tier: str) -> list[bytes]:
    """Packed keys in pieces, the deepest first: children go before their parents."""
    blocks: list[BlockState] = []
    after = b""
    while True:
        page: ListedBlocks = await kvbm.ask(
            ListBlocks(model=model, tier=tier, after=after, limit=_PIECE_BLOCKS), ListedBlocks
        )
        blocks += page.blocks
        after = page.after
        if not after:
            break
    blocks.sort(key=lambda block: -block.depth)
    starts = range(0, len(blocks), _PIECE_BLOCKS)
    return [b"".join(block.key for block in blocks[start : start + _PIECE_BLOCKS]) for start in starts]
