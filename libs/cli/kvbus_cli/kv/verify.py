"""`kvbus kv verify`: read blocks, and drop those that do not hold."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_cli.asking import NotAnswered, run
from kvbus_cli.kv.asking import TIERS, WORK_S, Kvbm, KvSettings, of_each, of_model
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.kv_tools import DescribedTiers, DescribeTiers, VerifiedBlocks, VerifyBlocks

DAMAGED = 3
"""Exit status: some did not hold."""

_PIECE_BLOCKS = 1000


class VerifySettings(KvSettings, frozen=True, kw_only=True):
    """All blocks, or those of one model, or in one tier."""

    model: Annotated[str, Flag("only this model", metavar="NAME")] = ""
    tier: Annotated[str, Flag("only this tier", choices=(*TIERS, ""))] = ""


class Scrubbed(msgspec.Struct, frozen=True):
    """``bad``: keys in hexadecimal. Their blocks were dropped."""

    kvbm: str
    tier: str
    model: str
    checked: int
    bad: list[str]


class Verified(msgspec.Struct, frozen=True):
    """What `kvbus kv verify --json` prints."""

    scrubbed: list[Scrubbed]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        VerifySettings,
        "kv verify",
        "Read the blocks of the tiers, piece by piece, check their checksums, and drop what does not hold. The exit status is "
        f"{DAMAGED} when there was any.",
        argv,
    )

    async def ask(bus: Bus) -> list[list[Scrubbed]]:
        async def one(kvbm: Kvbm) -> list[Scrubbed]:
            told: DescribedTiers = await kvbm.ask(DescribeTiers(), DescribedTiers)
            places = sorted({(tier.tier, held.model) for tier in told.tiers for held in tier.holdings})
            wanted = [
                (tier, model) for tier, model in places if settings.tier in ("", tier) and settings.model in ("", model)
            ]
            return [await _scrub(kvbm, tier, model) for tier, model in wanted]

        if settings.model:
            return await of_model(bus, settings.kvbm, settings.model, one)
        return await of_each(bus, settings.kvbm, one)

    try:
        scrubbed = [line for lines in run(settings, "kvbm", ask) for line in lines]
    except NotAnswered as failure:
        return failed("kv verify", failure)
    if settings.json:
        print_json(Verified(scrubbed))
    else:
        table = right_aligned("kvbm", "tier", "model", "checked", "damaged and dropped", first=3)
        for line in scrubbed:
            table.add_row(line.kvbm, line.tier, line.model, str(line.checked), str(len(line.bad)))
        print_table(table, *(f"damaged: {key} in {line.tier} of {line.kvbm}" for line in scrubbed for key in line.bad))
    return DAMAGED if any(line.bad for line in scrubbed) else 0


async def _scrub(kvbm: Kvbm, tier: str, model: str) -> Scrubbed:
    checked, bad, after = 0, list[str](), b""
    while True:
        question = VerifyBlocks(model=model, tier=tier, after=after, limit=_PIECE_BLOCKS)
        told: VerifiedBlocks = await kvbm.ask(question, VerifiedBlocks, WORK_S)
        checked += told.checked
        bad += [told.bad[at : at + KEY_BYTES].hex() for at in range(0, len(told.bad), KEY_BYTES)]
        after = told.after
        if not after:
            return Scrubbed(kvbm.instance_id, tier, model, checked, bad)
