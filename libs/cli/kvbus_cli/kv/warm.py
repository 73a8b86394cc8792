"""`kvbus kv warm`: bring the blocks of a prompt up into host memory."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvbus_cli.asking import NotAnswered, run
from kvbus_cli.kv.asking import LOOK_S, ChainSettings, Kvbm, of_model
from kvbus_cli.prompt.client import PromptFailed
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import BAD_USAGE, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.kv_tools import WarmBlocks, WarmedBlocks


class WarmSettings(ChainSettings, frozen=True, kw_only=True):
    """A prompt, or its blocks by their keys, from the first on."""

    wait_s: Annotated[float, Flag("how long to wait until they are there")] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wait_s < 0:
            raise ValueError("wait_s must not be negative")


class Warmth(msgspec.Struct, frozen=True):
    """Leading blocks that are in G2, and that are on their way there."""

    kvbm: str
    present: int
    coming: int


class Warmed(msgspec.Struct, frozen=True):
    """What `kvbus kv warm --json` prints."""

    model: str
    blocks: int
    kvbms: list[Warmth]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        WarmSettings,
        "kv warm",
        "Bring the blocks of a prompt from the tiers below up into G2, on each host that has workers of the model, or on one.",
        argv,
    )
    try:
        chain = settings.chain()

        async def ask(bus: Bus) -> list[Warmth]:
            async def one(kvbm: Kvbm) -> Warmth:
                question = WarmBlocks(model=chain.model, keys=chain.keys, wait_s=settings.wait_s)
                told: WarmedBlocks = await kvbm.ask(question, WarmedBlocks, settings.wait_s + LOOK_S)
                return Warmth(kvbm.instance_id, told.present, told.coming)

            return await of_model(bus, settings.kvbm, chain.model, one)

        told = run(settings, "kvbm", ask)
    except BadRequestFile as failure:
        return failed("kv warm", failure, BAD_USAGE)
    except (NotAnswered, PromptFailed) as failure:
        return failed("kv warm", failure)
    if settings.json:
        print_json(Warmed(chain.model, chain.blocks, told))
        return 0
    table = right_aligned("kvbm", "in G2", "coming")
    for line in told:
        table.add_row(line.kvbm, str(line.present), str(line.coming))
    print_table(table, f"{chain.model} · {chain.blocks} blocks")
    return 0
