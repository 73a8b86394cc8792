"""`kvbus index query`: who holds how much of a prompt."""

from collections.abc import Sequence

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_cli.asking import NotAnswered, ask_any, run
from kvbus_cli.prompt.client import PromptFailed
from kvbus_cli.prompt.keys import KeyedPrompt, PromptSettings, keyed_prompt
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import BAD_USAGE, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_wire.indexer import IndexQuery, IndexReply, Match


class Holding(msgspec.Struct, frozen=True):
    """One line of the answer. ``tokens``: of the prompt, from its beginning on."""

    instance_id: str
    tier: str
    blocks: int
    tokens: int
    predicted: bool


class Holdings(msgspec.Struct, frozen=True):
    """What `kvbus index query --json` prints."""

    model: str
    tokens: int
    blocks: int
    block_size: int
    holdings: list[Holding]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        PromptSettings, "index query", "Show which instances hold how much of a prompt, in which tier.", argv
    )
    try:
        prompt = keyed_prompt(settings.url, settings.request, settings.headers)

        async def ask(bus: Bus) -> IndexReply:
            query = IndexQuery(model=prompt.model, keys=prompt.keys, counts=False)
            reply: IndexReply = await ask_any(bus, "indexer", bus.subjects.indexer_query, query, IndexReply)
            return reply

        told = holdings(prompt, run(settings, "indexer", ask).matches)
    except BadRequestFile as failure:
        return failed("index query", failure, BAD_USAGE)
    except (NotAnswered, PromptFailed) as failure:
        return failed("index query", failure)
    if settings.json:
        print_json(told)
        return 0
    table = right_aligned("instance", "tier", "blocks", "tokens", "of the prompt", "", first=2)
    for holding in told.holdings:
        share = f"{holding.tokens / told.tokens:.1%}" if told.tokens else ""
        predicted = "predicted" if holding.predicted else ""
        table.add_row(holding.instance_id, holding.tier, str(holding.blocks), str(holding.tokens), share, predicted)
    facts = f"{told.model} · {told.tokens} tokens · {told.blocks} blocks of {told.block_size}"
    print_table(table, facts, *([] if told.holdings else ["nobody holds the beginning of this prompt"]))
    return 0


def holdings(prompt: KeyedPrompt, matches: Sequence[Match]) -> Holdings:
    """Deepest first."""
    lines = [
        Holding(match.instance_id, match.tier, match.depth, match.depth * prompt.block_size, match.predicted)
        for match in matches
    ]
    lines.sort(key=lambda line: (-line.blocks, line.tier, line.instance_id, line.predicted))
    return Holdings(prompt.model, prompt.tokens, len(prompt.keys) // KEY_BYTES, prompt.block_size, lines)
