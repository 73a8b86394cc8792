"""`kvbus index top`: which prefixes are read most."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from kvbus_cli.asking import NotAnswered, ask_each, run
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import FAILED, ToolSettings, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.indexer import IndexUse, ModelUse, RankPrefixes, UsedPrefix


class TopSettings(ToolSettings, frozen=True, kw_only=True):
    """Of all models, or of one."""

    model: Annotated[str, Flag("only this model", metavar="NAME")] = ""
    limit: Annotated[int, Flag("how many prefixes to show")] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit < 1:
            raise ValueError("limit must be at least 1")


class Prefix(msgspec.Struct, frozen=True):
    """``key``: the first half of its last block's key, in hexadecimal, as in `kvbus events`; the others as in `UsedPrefix`."""

    model: str
    key: str
    depth: int
    reads: float
    owners: int

    @classmethod
    def of(cls, used: UsedPrefix) -> "Prefix":
        return cls(used.model, used.key.to_bytes(8, "little").hex(), used.depth, used.reads, used.owners)


class Use(msgspec.Struct, frozen=True):
    """What `kvbus index top --json` prints: the counts of all indexers together."""

    indexers: list[str]
    models: list[ModelUse]
    prefixes: list[Prefix]


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        TopSettings,
        "index top",
        "Show which prefixes are read most, how many instances hold them, and how often a block is read per write.",
        argv,
    )

    async def ask(bus: Bus) -> list[IndexUse]:
        question = RankPrefixes(model=settings.model, limit=settings.limit)
        replies = await ask_each(bus, "indexer", bus.subjects.indexer_control, question, IndexUse)
        told = [reply.message for reply in replies if isinstance(reply.message, IndexUse)]
        if not told:
            raise NotAnswered("; ".join(f"{reply.instance_id}: {reply.problem}" for reply in replies))
        if settings.model and not any(use.models for use in told):
            raise NotAnswered(f"no indexer has heard of the model {settings.model!r}")
        return told

    try:
        use = together(run(settings, "indexer", ask), settings.limit)
    except NotAnswered as failure:
        return failed("index top", failure)
    if settings.json:
        print_json(use)
    else:
        _show(use)
    return 0 if use.indexers else FAILED


def together(told: Iterable[IndexUse], limit: int) -> Use:
    """Replicas answer a share of the queries each, so their reads add up; they all see all writes, so those do not."""
    indexers, models, prefixes = [], dict[str, ModelUse](), dict[tuple[str, int], UsedPrefix]()
    for use in told:
        indexers.append(use.indexer_id)
        for model in use.models:
            known = models.get(model.model)
            models[model.model] = model if known is None else _both(known, model)
        for prefix in use.prefixes:
            name = (prefix.model, prefix.key)
            before = prefixes.get(name)
            if before is not None:
                owners = max(before.owners, prefix.owners)
                prefix = msgspec.structs.replace(prefix, reads=before.reads + prefix.reads, owners=owners)
            prefixes[name] = prefix
    best = sorted(prefixes.values(), key=lambda p: (p.reads * p.depth, p.depth), reverse=True)[:limit]
    return Use(indexers, sorted(models.values(), key=lambda m: m.model), list(map(Prefix.of, best)))


def _both(one: ModelUse, other: ModelUse) -> ModelUse:
    larger = one if one.stored >= other.stored else other
    return msgspec.structs.replace(larger, asked=one.asked + other.asked, found=one.found + other.found)


def _show(use: Use) -> None:
    models = right_aligned("model", "asked", "found", "stored", "removed", "reads/write", "blocks", "copies")
    for m in use.models:
        models.add_row(
            m.model,
            str(m.asked),
            f"{m.found} ({m.found / m.asked:.1%})" if m.asked else "0",
            str(m.stored),
            str(m.removed),
            f"{m.found / m.stored:.2f}" if m.stored else "",
            str(m.blocks),
            f"{m.entries / m.blocks:.2f}" if m.blocks else "",
        )
    prefixes = right_aligned("prefix", "model", "blocks", "reads", "held by", "reads x blocks", first=2)
    for p in use.prefixes:
        reads, product = f"{p.reads:.1f}", f"{p.reads * p.depth:.0f}"
        prefixes.add_row(p.key, p.model, str(p.depth), reads, str(p.owners), product)
    print_table(models, f"{len(use.indexers)} indexers: {', '.join(use.indexers)}", "in blocks:")
    print_table(prefixes, "", "prefixes (an older use counts less):" if use.prefixes else "nothing was asked for yet")
