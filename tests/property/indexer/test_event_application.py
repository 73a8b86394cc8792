"""Whatever the bus drops, doubles, delays, reorders or purges, and whoever restarts, the indexer included: after the repairs the
index equals the truth, and that of a replica that has seen something else. And at no moment does it name an instance that is gone
or an incarnation that has ended.
"""

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core import checkpoint
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.checkpoint import Pause
from kvbus_indexer.core.digest import combined, feed_digests
from kvbus_indexer.core.instance import Order, Replay
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, chunk, load_report
from kvbus_testkit.instances import block_key
from kvbus_wire.checkpoint import read_checkpoint
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_keys, short_keys
from kvbus_wire.records import InstanceRecord
from kvbus_wire.worker import BlockSnapshotChunk, SnapshotChain

# Block k (from 1) has the parent k // 2 (0: the root).
BLOCKS = 63
# Who numbers its events how. A kvbm sends no load reports.
TIERS = {"w0": ("g1",), "w1": ("g1",), "k0": ("g2", "g3")}
REPLAY_LIMIT = 8
LIMITS = Limits(max_buffered_keys=30, max_repairs=2, repair_backoff_s=0.1)
names = st.sampled_from(list(TIERS))
feeds = st.sampled_from([(name, tier) for name, tiers in TIERS.items() for tier in tiers])


def key(number: int) -> bytes:
    return block_key(number) if number else b""


def chain_to(number: int) -> list[int]:
    chain = []
    while number:
        chain.append(number)
        number //= 2
    return chain[::-1]


class Holder:
    """The truth: what one instance holds in each tier, and the numbered events that say so."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.held: dict[str, set[int]] = {tier: set() for tier in TIERS[name]}
        self.seq = dict.fromkeys(TIERS[name], 0)

    @property
    def record(self) -> InstanceRecord:
        return a_worker(self.name, self.incarnation) if "g1" in self.held else a_kvbm(self.name, self.incarnation)

    @property
    def report(self) -> LoadReport | None:
        return load_report(self.seq["g1"], self.name, self.incarnation) if "g1" in self.held else None

    def emit(self, tier: str, *events: KvEvent) -> KvEvents:
        first, self.seq[tier] = self.seq[tier] + 1, self.seq[tier] + len(events)
        return batch(*events, seq=first, worker=self.name, incarnation=self.incarnation, tier=tier)

    def snapshot(self) -> list[BlockSnapshotChunk]:
        chunks = []
        for tier, held in self.held.items():
            chains = [SnapshotChain(parent=key(n // 2), keys=key(n)) for n in sorted(held, reverse=True)]
            parts = [chains[i : i + 5] for i in range(0, len(chains), 5)] or [[]]
            told = (
                chunk(self.seq[tier], *part, worker=self.name, incarnation=self.incarnation, tier=tier)
                for part in parts
            )
            chunks += list(told)
        return chunks


class Stream:
    """JetStream: messages numbered from 1, of which the first may be gone."""

    def __init__(self, created: str) -> None:
        self.created = created
        self.messages: list[KvEvents] = []
        self.first = 1

    @property
    def last(self) -> int:
        return len(self.messages)

    def read(self, after: int) -> Iterator[tuple[int, KvEvents]]:
        for seq in range(max(after + 1, self.first), self.last + 1):
            yield seq, self.messages[seq - 1]

    def replay(self, instance_id: str, replay: Replay) -> list[tuple[int, KvEvents]]:
        found = [(seq, b) for seq, b in self.read(replay.after) if b.instance_id == instance_id][:REPLAY_LIMIT]
        return sorted(found, key=lambda entry: (entry[1].incarnation, entry[1].first_seq))


Part = BlockSnapshotChunk | tuple[int, KvEvents]


class Indexer:
    """One life of an indexer: a catalog that reads the stream, and the repairs under way."""

    def __init__(self, directory: dict[str, Holder], stream: Stream, saved: bytes | None, now: float) -> None:
        self.catalog = Catalog(LIMITS, PlainIndex)
        self.stream = stream
        self.position = 0
        self.fetches: list[tuple[Order, Iterator[Part]]] = []
        for holder in directory.values():
            self.catalog.joined(holder.record, now)
        if saved is not None:
            self._restore(saved, now)
        self.deliver(stream.last, now)
        self.catalog.stream_caught_up(now)

    def _restore(self, saved: bytes, now: float) -> None:
        header, feeds = read_checkpoint(saved)
        if header.stream == self.stream.created and header.stream_seq >= self.stream.first - 1:
            self.position = header.stream_seq
            self.catalog.begin_restore(header.stream_seq)
            for feed in feeds:
                for _ in checkpoint.restore(self.catalog, feed, now):
                    pass

    def deliver(self, count: int, now: float) -> None:
        for seq, message in list(self.stream.read(self.position))[:count]:
            self.catalog.delivered(seq, now)
            self.catalog.apply(message, now, seq)
            self.position = seq

    def start_repairs(self, truth: dict[str, Holder], now: float) -> None:
        for order in self.catalog.repairs.due(now):
            holder = truth.get(order.instance_id)
            if order.replay is not None:
                self.fetches.append((order, iter(self.stream.replay(order.instance_id, order.replay))))
            elif holder is None:
                self.catalog.repairs.fail(order, now)
            else:
                self.fetches.append((order, iter(holder.snapshot())))

    def fetch_on(self, at: int, now: float) -> bool:
        """Take the next part of a repair. False: it is over."""
        order, parts = self.fetches[at]
        part = next(parts, None)
        if part is None:
            self.catalog.repairs.finish(order, now)
            return False
        if isinstance(part, BlockSnapshotChunk):
            return self.catalog.repairs.chunk(order, part, now)
        return self.catalog.repairs.replay(order, part[1], part[0], now)

    def settle(self, truth: dict[str, Holder], now: float) -> float:
        """The directory, load reports and repairs work for a while."""
        for holder in truth.values():
            self.catalog.joined(holder.record, now)
        self.deliver(self.stream.last, now)
        for order, _ in self.fetches:
            self.catalog.repairs.fail(order, now)
        self.fetches.clear()
        for _ in range(24):
            for report in filter(None, (holder.report for holder in truth.values())):
                self.catalog.load_report(report, now)
            now += 10.0
            self.start_repairs(truth, now)
            while self.fetches:
                if not self.fetch_on(0, now):
                    del self.fetches[0]
        assert self.catalog.repairs.next_due() is None
        return now

    def digest(self) -> str:
        return combined(feed_digests(self.catalog))


class ApplicationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.incarnations = 0
        self.streams = 1
        self.stream = Stream("stream 1")
        self.truth: dict[str, Holder] = {}
        # What the directory says; a silent restart shows in it later.
        self.directory: dict[str, Holder] = {}
        self.saving: list[bytes] = []
        self.parts: Iterator[bytes | Pause] | None = None
        self.saved: bytes | None = None
        # Their newest events may have gone without a trace, and no load report says that they were sent.
        self.unheard: set[tuple[str, str]] = set()
        for name in TIERS:
            self.start(name, is_seen=True)
        self.indexer = Indexer(self.directory, self.stream, None, self.now)
        self.now = self.indexer.settle(self.truth, self.now)

    def start(self, name: str, *, is_seen: bool) -> None:
        self.incarnations += 1
        self.truth[name] = Holder(name, self.incarnations)
        if is_seen:
            self.directory[name] = self.truth[name]

    def send(self, name: str, tier: str, *events: KvEvent) -> None:
        self.stream.messages.append(self.truth[name].emit(tier, *events))
        self.unheard.discard((name, tier))

    @rule(name=names, what=st.sampled_from(["restart", "silent restart", "stop"]), sure=st.integers(0, 2))
    def change_membership(self, name: str, what: str, sure: int) -> None:
        """A restart is silent when the directory has not heard of the new incarnation yet."""
        if sure:
            return
        if what == "stop":
            self.truth.pop(name, None)
            self.directory.pop(name, None)
            self.indexer.catalog.left(name)
            return
        self.start(name, is_seen=what == "restart")
        if what == "restart":
            self.indexer.catalog.joined(self.truth[name].record, self.now)

    @rule(feed=feeds, leaf=st.integers(1, BLOCKS), skip=st.integers(0, 4))
    def store(self, feed: tuple[str, str], leaf: int, skip: int) -> None:
        name, tier = feed
        if name in self.truth:
            chain = chain_to(leaf)
            numbers = chain[min(skip, len(chain) - 1) :]
            self.truth[name].held[tier].update(numbers)
            self.send(name, tier, Stored(key(numbers[0] // 2), pack_keys(map(key, numbers))))

    @rule(feed=feeds, numbers=st.lists(st.integers(1, BLOCKS), min_size=1, max_size=10))
    def remove(self, feed: tuple[str, str], numbers: list[int]) -> None:
        name, tier = feed
        if name in self.truth:
            self.truth[name].held[tier].difference_update(numbers)
            first, rest = numbers[:1], numbers[1:]
            self.send(name, tier, Removed(pack_keys(map(key, first))), Removed(pack_keys(map(key, rest))))

    @rule(feed=feeds)
    def clear(self, feed: tuple[str, str]) -> None:
        name, tier = feed
        if name in self.truth:
            self.truth[name].held[tier].clear()
            self.send(name, tier, Cleared())

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        self.indexer.deliver(count, self.now)

    @rule(data=st.data(), what=st.sampled_from(["drop", "double", "reorder"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        """What has not been delivered yet is not in the stream as it was sent."""
        messages, position = self.stream.messages, self.indexer.position
        if len(messages) <= position:
            return
        at = data.draw(st.integers(position, len(messages) - 1))
        match what:
            case "drop":
                self.lose(messages.pop(at))
            case "double":
                messages.append(messages[at])
            case "reorder":
                messages.insert(position, messages.pop(at))

    @rule(count=st.integers(1, 20), sure=st.integers(0, 7))
    def purge(self, count: int, sure: int) -> None:
        """Old messages go, whether they were read or not."""
        if not sure:
            first = min(self.stream.first + count, self.stream.last + 1)
            for _, message in list(self.stream.read(self.indexer.position)):
                self.lose(message)
            self.stream.first = first

    def lose(self, message: KvEvents) -> None:
        if message.tier != "g1":
            self.unheard.add((message.instance_id, message.tier))

    @rule(sure=st.integers(0, 7))
    def lose_the_stream(self, sure: int) -> None:
        if not sure:
            self.streams += 1
            self.stream = self.indexer.stream = Stream(f"stream {self.streams}")
            self.indexer.position = 0
            self.indexer.catalog.stream_replaced(self.now)

    @rule(seconds=st.floats(0.0, 2.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.indexer.start_repairs(self.truth, self.now)

    @rule(at=st.integers(0, 1), parts=st.integers(0, 12))
    def fetch_on(self, at: int, parts: int) -> None:
        """Of a repair under way some parts arrive, or it fails."""
        fetches = self.indexer.fetches
        if at >= len(fetches):
            return
        if parts == 0:
            self.indexer.catalog.repairs.fail(fetches[at][0], self.now)
        elif all(self.indexer.fetch_on(at, self.now) for _ in range(parts)):
            return
        del fetches[at]

    @rule(name=names)
    def report(self, name: str) -> None:
        report = self.truth[name].report if name in self.truth else None
        if report is not None:
            self.indexer.catalog.load_report(report, self.now)

    @rule(steps=st.integers(1, 6))
    def save(self, steps: int) -> None:
        """Begin a checkpoint or go on with it, a part at a time: the content changes meanwhile."""
        if self.parts is None:
            stream = self.stream.created
            self.parts = checkpoint.save(self.indexer.catalog, stream=stream, indexer_id="i", saved_ms=0)
            self.saving = []
        for _ in range(steps):
            part = next(self.parts, None)
            if part is None:
                self.parts, self.saved = None, b"".join(self.saving)
                return
            if not isinstance(part, Pause):
                self.saving.append(part)

    @rule(sure=st.integers(0, 1))
    def restart_the_indexer(self, sure: int) -> None:
        """Killed, perhaps while it saved: what was saved before is all there is."""
        if not sure:
            self.parts = None
            self.indexer = Indexer(self.directory, self.stream, self.saved, self.now)

    @rule()
    def settle(self) -> None:
        self.directory = dict(self.truth)
        for name, tier in sorted(self.unheard):
            if name in self.truth:
                self.send(name, tier, Removed(b""))
        replica = Indexer(self.directory, self.stream, self.saved, self.now)
        other = replica.settle(self.truth, self.now)
        self.now = max(other, self.indexer.settle(self.truth, self.now))
        for leaf in range(BLOCKS // 2 + 1, BLOCKS + 1):
            assert self.found(leaf) == self.true_depths(leaf)
        assert replica.digest() == self.indexer.digest()

    def teardown(self) -> None:
        self.settle()

    def found(self, leaf: int) -> dict[tuple[str, str], int]:
        chain = short_keys(pack_keys(map(key, chain_to(leaf))))
        matches = self.indexer.catalog.match(MODEL, chain, self.now)
        return {(match.instance_id, match.tier): match.depth for match in matches}

    def true_depths(self, leaf: int) -> dict[tuple[str, str], int]:
        depths = {}
        for name, holder in self.truth.items():
            for tier, held in holder.held.items():
                depth = next((i for i, n in enumerate(chain_to(leaf)) if n not in held), len(chain_to(leaf)))
                if depth:
                    depths[name, tier] = depth
        return depths

    @invariant()
    def nobody_who_is_gone_is_named(self) -> None:
        self.indexer.catalog.check_integrity()
        for leaf in (BLOCKS, BLOCKS // 2 + 1, BLOCKS - 7):
            assert {name for name, _ in self.found(leaf)} <= set(self.truth)


TestEventApplication = ApplicationMachine.TestCase
TestEventApplication.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
