"""What the facts mean. Pure: `gather` collects them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from kvbus_cli.asking import Reply
from kvbus_cli.services import SERVICES
from kvbus_wire.indexer import IndexDescription
from kvbus_wire.records import InstanceRecord, ModelCard
from kvbus_wire.router import RouterLimits

_NEEDED = ("frontend", "router", "worker")
_MISSING = {
    "frontend": "nobody serves the HTTP API",
    "router": "no request can be placed",
    "worker": "no request can be run",
    "indexer": "routers place by load alone, and do not see what is cached where",
    "kvbm": "blocks that leave a device are gone: there is no memory tier",
}
_SILENT = {
    "declared": "its engine has no KV events; what it holds is guessed from routing decisions",
    "silent": "it holds blocks and emits no KV events, so routers do not see what it has cached",
    "unheard": "it says that it emits KV events, and none arrive: may it write to the event stream?",
}


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One line. ``about``: what was looked at."""

    level: Level
    about: str
    text: str


class EventStream(msgspec.Struct, frozen=True):
    """The JetStream stream of KV events."""

    created: str
    first_seq: int
    last_seq: int


class Facts(msgspec.Struct, frozen=True):
    """``server``: address of the bus, without secrets, and namespace. ``stream``: None when there is none. ``transfer``:
    backends of block transfers, each with why it cannot be used on this machine (empty: it can)."""

    server: str
    instances: list[InstanceRecord]
    stream: EventStream | None
    indexers: list[Reply]
    routers: list[Reply] = []
    transfer: dict[str, str] = {}


def findings(facts: Facts) -> list[Finding]:
    """In the order in which to read them."""
    return [
        Finding(Level.OK, "bus", facts.server),
        *_services(facts.instances),
        *_versions(facts.instances),
        *_models(facts.instances),
        *_limits(facts.routers),
        *_cordons(facts.routers, facts.instances),
        *_roles(facts.instances),
        *_stream(facts.stream),
        *(finding for reply in facts.indexers for finding in _indexer(reply, facts.stream)),
        *_sources(facts.indexers),
        *_transfer(facts.transfer),
    ]


def _services(instances: Sequence[InstanceRecord]) -> Iterator[Finding]:
    for service in SERVICES:
        found = [record for record in instances if record.service == service]
        if not found:
            level = Level.PROBLEM if service in _NEEDED else Level.WARNING if service == "indexer" else Level.NOTE
            yield Finding(level, service, f"none: {_MISSING[service]}")
            continue
        draining = [record.instance_id for record in found if record.draining]
        names = ", ".join(record.instance_id for record in found)
        yield Finding(Level.OK, service, f"{len(found)}: {names}")
        if draining:
            level = Level.WARNING if len(draining) == len(found) else Level.NOTE
            yield Finding(level, service, f"draining: {', '.join(draining)}")
        loading = [
            f"{record.instance_id} ({record.loading})" for record in found if not record.worker and record.loading
        ]
        if loading:
            level = Level.WARNING if len(loading) == len(found) else Level.NOTE
            yield Finding(level, service, f"still loading, so no request goes there: {', '.join(loading)}")


def _versions(instances: Sequence[InstanceRecord]) -> Iterator[Finding]:
    versions: dict[str, list[str]] = {}
    for record in instances:
        versions.setdefault(record.version, []).append(record.instance_id)
    if len(versions) == 1:
        yield Finding(Level.OK, "versions", f"all {next(iter(versions))}")
    elif versions:
        text = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(versions.items()))
        yield Finding(Level.WARNING, "versions", f"not the same everywhere: {text}")


def _models(instances: Sequence[InstanceRecord]) -> Iterator[Finding]:
    """Workers of one model have equal blocks, or a prompt has other keys for each."""
    cards: dict[str, dict[tuple[object, ...], list[str]]] = {}
    for record in instances:
        if record.worker is not None:
            card = record.worker.model
            cards.setdefault(card.name, {}).setdefault(_identity(card), []).append(record.instance_id)
    for model, variants in sorted(cards.items()):
        if len(variants) == 1:
            workers = next(iter(variants.values()))
            yield Finding(Level.OK, "model", f"{model}: {len(workers)} workers")
        else:
            text = " / ".join(", ".join(workers) for workers in variants.values())
            about = "weights, block size or KV layout differ, so their blocks are not the same"
            yield Finding(Level.WARNING, "model", f"{model}: {about}: {text}")


def _identity(card: ModelCard) -> tuple[object, ...]:
    return card.fingerprint, card.block_size, card.kv_layout


def _limits(routers: Sequence[Reply]) -> Iterator[Finding]:
    """Routers follow one entry, so they differ for a moment only, or because their settings do, or one is cut off."""
    told = [reply.message for reply in routers if isinstance(reply.message, RouterLimits)]
    for reply in routers:
        if not isinstance(reply.message, RouterLimits):
            yield Finding(Level.PROBLEM, reply.instance_id, f"does not answer: {reply.problem}")
    if len({(limits.in_force, limits.revision) for limits in told}) > 1:
        revisions = ", ".join(f"{limits.router_id} has revision {limits.revision}" for limits in told)
        yield Finding(Level.WARNING, "limits", f"not the same at all routers ({revisions}): see `kvbus router limits`")
    elif told:
        changed = [name for name in told[0].stored.__struct_fields__ if getattr(told[0].stored, name) is not None]
        text = f"changed at run time: {', '.join(changed)}" if changed else "as in the settings of the routers"
        yield Finding(Level.NOTE if changed else Level.OK, "limits", text)


def _cordons(routers: Sequence[Reply], instances: Sequence[InstanceRecord]) -> Iterator[Finding]:
    """A worker counts as cordoned if any router takes it for that."""
    told = [reply.message for reply in routers if isinstance(reply.message, RouterLimits)]
    cordoned = {worker_id for limits in told for worker_id in limits.in_force.cordoned or ()}
    workers = [record for record in instances if record.worker is not None]
    if there := sorted(cordoned & {record.instance_id for record in workers}):
        yield Finding(Level.NOTE, "cordons", f"get no new requests: {', '.join(there)}")
    if strangers := sorted(cordoned - {record.instance_id for record in workers}):
        yield Finding(Level.NOTE, "cordons", f"are not there: {', '.join(strangers)}")
    takers: dict[str, bool] = {}
    for record in workers:
        if record.worker is not None:
            takes = not record.draining and record.instance_id not in cordoned
            takers[record.worker.model.name] = takers.get(record.worker.model.name, False) or takes
    for model in sorted(name for name, found in takers.items() if not found):
        yield Finding(Level.PROBLEM, "model", f"{model}: no request is placed: all its workers are cordoned or drain")


def _roles(instances: Sequence[InstanceRecord]) -> Iterator[Finding]:
    """A worker that prefills answers no request by itself, and one that decodes gets help only where there is one that prefills."""
    roles: dict[str, Counter[str]] = {}
    for record in instances:
        if record.worker is not None:
            roles.setdefault(record.worker.model.name, Counter())[record.worker.role] += 1
    for model, count in sorted(roles.items()):
        if count["prefill"] == count.total():
            text = "no request is placed: all its workers only prefill (`kvbus worker set-role WORKER decode`)"
            yield Finding(Level.PROBLEM, "roles", f"{model}: {text}")
        elif count["decode"] == count.total():
            text = "all its workers are to decode, so they compute their prompts themselves"
            yield Finding(Level.NOTE, "roles", f"{model}: {text}")
        elif count["prefill"] or count["decode"]:
            text = ", ".join(f"{count[role]} {role}" for role in ("prefill", "decode", "both") if count[role])
            yield Finding(Level.OK, "roles", f"{model}: {text}")


def _stream(stream: EventStream | None) -> Iterator[Finding]:
    if stream is None:
        yield Finding(Level.WARNING, "events", "there is no event stream (yet): workers make it, and indexers")
    else:
        yield Finding(Level.OK, "events", f"the stream holds messages {stream.first_seq} to {stream.last_seq}")


def _indexer(reply: Reply, stream: EventStream | None) -> Iterator[Finding]:
    told = reply.message
    if not isinstance(told, IndexDescription):
        yield Finding(Level.PROBLEM, reply.instance_id, f"does not answer: {reply.problem}")
        return
    if not told.caught_up:
        yield Finding(Level.WARNING, told.indexer_id, "is still reading the event stream")
        return
    text = f"{told.entries} entries, {told.blocks} blocks of {told.instances} instances"
    yield Finding(Level.OK, told.indexer_id, text)
    if stream is not None and told.stream != stream.created:
        yield Finding(Level.PROBLEM, told.indexer_id, "reads an event stream that is not there any more")
    elif stream is not None and told.position < stream.last_seq:
        behind = stream.last_seq - told.position
        yield Finding(Level.WARNING, told.indexer_id, f"is {behind} messages behind the event stream")
    if told.in_repair:
        yield Finding(Level.NOTE, told.indexer_id, f"{told.in_repair} instances are being repaired")
    if told.partial:
        yield Finding(Level.WARNING, told.indexer_id, f"is full: {told.partial} instances are known in part only")


def _sources(indexers: Sequence[Reply]) -> Iterator[Finding]:
    """Every indexer follows every worker, so one that hears it is enough."""
    told = [reply.message for reply in indexers if isinstance(reply.message, IndexDescription)]
    silent = [{worker.instance_id: worker.why for worker in description.silent} for description in told]
    everywhere = set.intersection(*map(set, silent)) if silent else set()
    for worker in sorted(everywhere):
        why = silent[0][worker]
        level = Level.NOTE if why == "declared" else Level.WARNING
        yield Finding(level, worker, _SILENT.get(why, why))
    if told and not everywhere:
        yield Finding(Level.OK, "event sources", "every worker that works is heard")


def _transfer(backends: Mapping[str, str]) -> Iterator[Finding]:
    """Of the machine where the question is asked: workers elsewhere may have others."""
    if here := [name for name, missing in backends.items() if not missing]:
        yield Finding(Level.OK, "transfer", f"KV blocks can be moved here by {', '.join(here)}")
    for name, missing in backends.items():
        if missing:
            yield Finding(Level.NOTE, "transfer", f"not by {name} here: {missing}")
