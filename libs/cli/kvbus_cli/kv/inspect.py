"""`kvbus kv inspect`: where the blocks of a prompt lie, and what is known of their future."""

from collections.abc import Sequence

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_cli.asking import NotAnswered, run
from kvbus_cli.kv.asking import TIERS, Chain, ChainSettings, Kvbm, of_model
from kvbus_cli.kv.tables import BlockLine, block_lines
from kvbus_cli.prompt.client import PromptFailed
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import BAD_USAGE, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_wire.kv_tools import InspectBlocks, ListedBlocks

_PIECE_BLOCKS = 500


class Standing(msgspec.Struct, frozen=True):
    """``leading``: so many of the prompt's blocks from its beginning on; ``kinds``: of all of them that are there."""

    kvbm: str
    tier: str
    leading: int
    blocks: int
    kinds: dict[str, int]
    shortest_ttl_s: float | None


class Inspected(msgspec.Struct, frozen=True):
    """What `kvbus kv inspect --json` prints."""

    model: str
    blocks: int
    standing: list[Standing]
    found: list[BlockLine]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        ChainSettings,
        "kv inspect",
        "Show how much of a prompt lies in which tier of which kvbm, and for how long.",
        argv,
    )
    try:
        chain = settings.chain()

        async def ask(bus: Bus) -> list[list[BlockLine]]:
            async def one(kvbm: Kvbm) -> list[BlockLine]:
                lines: list[BlockLine] = []
                for piece in chain.pieces(_PIECE_BLOCKS):
                    told: ListedBlocks = await kvbm.ask(InspectBlocks(model=chain.model, keys=piece), ListedBlocks)
                    lines += block_lines(kvbm.instance_id, told.blocks)
                return lines

            return await of_model(bus, settings.kvbm, chain.model, one)

        found = [line for lines in run(settings, "kvbm", ask) for line in lines]
    except BadRequestFile as failure:
        return failed("kv inspect", failure, BAD_USAGE)
    except (NotAnswered, PromptFailed) as failure:
        return failed("kv inspect", failure)
    told = standing(chain, found)
    if settings.json:
        print_json(Inspected(chain.model, chain.blocks, told, found))
        return 0
    table = right_aligned("kvbm", "tier", "from the beginning", "blocks", "kinds", "shortest lease", first=2)
    for line in told:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(line.kinds.items()))
        lasts = "" if line.shortest_ttl_s is None else f"{line.shortest_ttl_s:.0f} s"
        table.add_row(line.kvbm, line.tier, str(line.leading), str(line.blocks), kinds, lasts)
    facts = f"{chain.model} · {chain.blocks} blocks"
    print_table(table, facts, *([] if told else ["no tier of any kvbm has any of them"]))
    return 0


def standing(chain: Chain, found: Sequence[BlockLine]) -> list[Standing]:
    """Per kvbm and tier that has any of the blocks."""
    keys = [chain.keys[at : at + KEY_BYTES].hex() for at in range(0, len(chain.keys), KEY_BYTES)]
    lines: list[Standing] = []
    for kvbm in sorted({line.kvbm for line in found}):
        for tier in TIERS:
            held = {line.key: line for line in found if (line.kvbm, line.tier) == (kvbm, tier)}
            if not held:
                continue
            leading = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            kinds: dict[str, int] = {}
            for line in held.values():
                kinds[line.kind] = kinds.get(line.kind, 0) + 1
            ttls = [line.ttl_s for line in held.values() if line.ttl_s is not None]
            lines.append(Standing(kvbm, tier, leading, len(held), kinds, min(ttls, default=None)))
    return lines
