"""`kvbus index digest`: whether the indexers know the same."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvbus_cli.asking import NotAnswered, Reply, ask_each, run
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import FAILED, ToolSettings, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.indexer import DigestIndex, FeedDigest, IndexDigest

DIFFERENT = 3
PAUSE_S = 0.25


class DigestSettings(ToolSettings, frozen=True, kw_only=True):
    """One look, or several until they agree."""

    wait_s: Annotated[float, Flag("look again for so long until they are equal: events may be on their way")] = 0.0
    feeds: Annotated[bool, Flag("show the feeds in which they differ")] = False


class Digests(msgspec.Struct, frozen=True):
    """What `kvbus index digest --json` prints. ``differing``: feeds that are not the same everywhere, if asked for."""

    equal: bool
    indexers: list[IndexDigest]
    problems: dict[str, str]
    differing: list[str]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        DigestSettings,
        "index digest",
        f"Show a digest of the content of each indexer; the exit status is {DIFFERENT} when they are not equal.",
        argv,
    )

    async def ask(bus: Bus) -> Digests:
        deadline = asyncio.get_running_loop().time() + settings.wait_s
        while True:
            question = DigestIndex(feeds=settings.feeds)
            told = compared(await ask_each(bus, "indexer", bus.subjects.indexer_control, question, IndexDigest))
            if told.equal or asyncio.get_running_loop().time() >= deadline:
                return told
            await asyncio.sleep(PAUSE_S)

    try:
        told = run(settings, "indexer", ask)
    except NotAnswered as failure:
        return failed("index digest", failure)
    if settings.json:
        print_json(told)
    else:
        _show(told)
    if told.problems:
        return FAILED
    return 0 if told.equal else DIFFERENT


def compared(replies: Sequence[Reply]) -> Digests:
    """Equal: all have answered, and the same."""
    told = [reply.message for reply in replies if isinstance(reply.message, IndexDigest)]
    problems = {reply.instance_id: reply.problem for reply in replies if reply.message is None}
    rows = [{_row(feed) for feed in digest.feeds} for digest in told]
    common = set.intersection(*rows) if rows else set()
    differing = {(row[0], row[1], row[2]) for feeds in rows for row in feeds - common}
    names = [f"{model} {instance_id} {tier}" for model, instance_id, tier in sorted(differing)]
    return Digests(not problems and len({digest.digest for digest in told}) == 1, told, problems, names)


def _row(feed: FeedDigest) -> tuple[str, str, str, int, int, int]:
    return feed.model, feed.instance_id, feed.tier, feed.incarnation, feed.entries, feed.key_sum


def _show(told: Digests) -> None:
    table = right_aligned("indexer", "digest", "entries", "position", first=2)
    for digest in told.indexers:
        table.add_row(digest.indexer_id, digest.digest, str(digest.entries), str(digest.position))
    for indexer_id, problem in told.problems.items():
        table.add_row(indexer_id, problem, "", "")
    lines = [f"they differ in {name}" for name in told.differing]
    print_table(table, "equal" if told.equal else "not equal", *lines)
