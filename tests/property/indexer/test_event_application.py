"""Whatever the bus drops, doubles, delays, reorders or purges, and whoever restarts, the indexer included: after the repairs the
index equals the truth, and that of a replica that has seen something else. And at no moment does it name an instance that is gone
or an incarnation that has ended, or say of an instance what was not so right after the last of its events that was applied.
"""

from collections.abc import Iterator

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_blocks.index import Owner
from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core import checkpoint
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.checkpoint import Pause
from kvbus_indexer.core.digest import combined, feed_digests
from kvbus_indexer.core.instance import FeedKey, Order, Phase
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, decision
from kvbus_testkit.index_truth import BLOCKS, Holder, Stream, depth_of
from kvbus_testkit.instances import block_keys, chain_to
from kvbus_wire.checkpoint import read_checkpoint
from kvbus_wire.indexer import Match
from kvbus_wire.kv_events import KvEvents
from kvbus_wire.packing import short_keys
from kvbus_wire.worker import BlockSnapshotChunk

# Who numbers its events how. A kvbm sends no load reports.
TIERS = {"w0": ("g1",), "w1": ("g1",), "k0": ("g2", "g3")}
NO_REPORTS = (("k0", "g2"), ("k0", "g3"))
LEAVES = (BLOCKS, BLOCKS // 2 + 1, BLOCKS - 7)
LIMITS = Limits(max_buffered_keys=30, max_repairs=2, repair_backoff_s=0.1)
names = st.sampled_from(list(TIERS))
leaves = st.integers(1, BLOCKS)
feeds = st.sampled_from([(name, tier) for name, tiers in TIERS.items() for tier in tiers])

Lives = dict[tuple[str, int], Holder]
"""All that there ever were, by name and incarnation."""


Part = BlockSnapshotChunk | tuple[int, KvEvents]


class Indexer:
    """One life of an indexer: a catalog that reads the stream, and the repairs under way."""

    def __init__(
        self, lives: Lives, directory: dict[str, Holder], stream: Stream, saved: bytes | None, now: float
    ) -> None:
        self.catalog = Catalog(LIMITS, PlainIndex)
        self.lives = lives
        self.stream = stream
        self.position = 0
        self.fetches: list[tuple[Order, Iterator[Part]]] = []
        # Blocks of the requests that were sent to an instance.
        self.sent: dict[tuple[str, int], set[int]] = {}
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
            name, feed = message.instance_id, FeedKey(message.model, message.tier)
            self.catalog.delivered(seq, now)
            applied = self.applied(name, feed)
            self.catalog.apply(message, now, seq)
            assert self.applied(name, feed) >= applied
            self.position = seq
            self.check(name)

    def decide(self, holder: Holder, leaf: int, now: float) -> None:
        """A request is sent there."""
        chain = chain_to(leaf)
        told = decision(f"{holder.name} {leaf}", *chain, worker=holder.name, incarnation=holder.incarnation)
        if self.catalog.decided(told, now):
            self.sent.setdefault((holder.name, holder.incarnation), set()).update(chain)

    def start_repairs(self, truth: dict[str, Holder], now: float) -> None:
        for order in self.catalog.repairs.due(now):
            holder = truth.get(order.instance_id)
            if order.replay is not None:
                self.fetches.append((order, iter(self.stream.replay(order.instance_id, order.replay.after))))
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

    def repair(self, truth: dict[str, Holder], now: float) -> None:
        """What is due, to its end."""
        self.start_repairs(truth, now)
        while self.fetches:
            if not self.fetch_on(0, now):
                del self.fetches[0]

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
            self.repair(truth, now)
        assert self.catalog.repairs.next_due() is None
        return now

    def applied(self, name: str, feed: FeedKey) -> int:
        instance = self.catalog.instance(name)
        return instance.applied.get(feed, 0) if instance else 0

    def held(self, name: str, tier: str) -> frozenset[int]:
        keys, parents = self.catalog.content.held(MODEL, Owner(name, tier))
        assert all(parent == number // 2 or parent == number == 1 for number, parent in zip(keys, parents, strict=True))
        return frozenset(keys)

    def found(self, leaf: int, now: float) -> tuple[Match, ...]:
        return self.catalog.match(MODEL, short_keys(block_keys(*chain_to(leaf))), now)

    def check(self, name: str) -> None:
        """What is known of an instance was so after the last of its events that was applied. While a snapshot replaces it, it is a
        mixture, but of this incarnation."""
        instance = self.catalog.instance(name)
        life = self.lives[name, instance.incarnation] if instance else None
        for tier in TIERS[name]:
            held = self.held(name, tier)
            if instance is None or life is None:
                assert not held
            elif instance.phase is Phase.LIVE or instance.missing is not None:
                assert held == life.history[tier][self.applied(name, FeedKey(MODEL, tier))]
            else:
                assert held <= life.ever_held(tier)

    def check_predictions(self, now: float) -> None:
        for leaf in LEAVES:
            for match in self.found(leaf, now):
                if match.predicted:
                    instance = self.catalog.instance(match.instance_id)
                    assert instance is not None
                    sent = self.sent.get((match.instance_id, instance.incarnation), set())
                    assert sent.issuperset(chain_to(leaf)[: match.depth])


class ApplicationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lives: Lives = {}
        self.streams = 1
        self.stream = Stream("stream 1")
        self.truth: dict[str, Holder] = {}
        # What the directory says; a silent restart shows in it later.
        self.directory: dict[str, Holder] = {}
        self.saving: list[bytes] = []
        self.parts: Iterator[bytes | Pause] | None = None
        self.saved: bytes | None = None
        # Their newest events may have gone without a trace.
        self.unheard: set[tuple[str, str]] = set()
        for name in TIERS:
            self.start(name, 1, is_seen=True)
        self.indexer = Indexer(self.lives, self.directory, self.stream, None, self.now)
        self.now = self.indexer.settle(self.truth, self.now)

    def start(self, name: str, leaf: int, *, is_seen: bool) -> None:
        """It begins with a chain to ``leaf`` in one tier, of which it has not told yet."""
        incarnation = len(self.lives) + 1
        self.truth[name] = self.lives[name, incarnation] = Holder(name, incarnation, TIERS[name])
        self.truth[name].store(TIERS[name][leaf % len(TIERS[name])], chain_to(leaf))
        if is_seen:
            self.directory[name] = self.truth[name]

    def send(self, name: str, tier: str, again: int = 0) -> None:
        self.stream.messages.append(self.truth[name].emit(tier, again))
        self.unheard.discard((name, tier))

    @rule(name=names, leaf=leaves, is_seen=st.booleans())
    def restart(self, name: str, leaf: int, is_seen: bool) -> None:
        """Or start. It is silent when the directory has not heard of the new incarnation yet."""
        self.start(name, leaf, is_seen=is_seen)
        if is_seen:
            self.indexer.catalog.joined(self.truth[name].record, self.now)

    @rule(name=names)
    def stop(self, name: str) -> None:
        self.truth.pop(name, None)
        self.directory.pop(name, None)
        self.indexer.catalog.left(name)

    @rule(name=names)
    def flap(self, name: str) -> None:
        """Its lease was late."""
        self.indexer.catalog.left(name)
        if name in self.directory:
            self.indexer.catalog.joined(self.directory[name].record, self.now)

    @rule(feed=feeds, leaf=leaves, skip=st.integers(0, 4), is_sent=st.booleans())
    def store(self, feed: tuple[str, str], leaf: int, skip: int, is_sent: bool) -> None:
        name, tier = feed
        if name in self.truth:
            chain = chain_to(leaf)
            self.truth[name].store(tier, chain[min(skip, len(chain) - 1) :])
            if is_sent:
                self.send(name, tier)

    @rule(feed=feeds, numbers=st.lists(leaves, max_size=10), is_sent=st.booleans())
    def remove(self, feed: tuple[str, str], numbers: list[int], is_sent: bool) -> None:
        name, tier = feed
        if name in self.truth:
            self.truth[name].remove(tier, [*numbers, *sorted(self.truth[name].held(tier))[-2:]])
            if is_sent:
                self.send(name, tier)

    @rule(feed=feeds)
    def clear(self, feed: tuple[str, str]) -> None:
        name, tier = feed
        if name in self.truth:
            self.truth[name].clear(tier)
            self.send(name, tier)

    @rule(feed=feeds, again=st.integers(0, 4))
    def publish(self, feed: tuple[str, str], again: int) -> None:
        """What was not sent yet, perhaps with some that was."""
        name, tier = feed
        if name in self.truth:
            self.send(name, tier, again)

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        self.indexer.deliver(count, self.now)

    @rule(data=st.data(), what=st.sampled_from(["drop", "reorder"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        """What has not been delivered yet is not in the stream as it was sent."""
        messages, position = self.stream.messages, self.indexer.position
        if len(messages) <= position:
            return
        at = data.draw(st.integers(position, len(messages) - 1))
        match what:
            case "drop":
                lost = messages.pop(at)
                self.unheard.add((lost.instance_id, lost.tier))
            case "reorder":
                messages.insert(position, messages.pop(at))

    @rule(ago=st.integers(1, 8))
    def double(self, ago: int) -> None:
        """A message is published again, whether it was read or not."""
        self.stream.messages += self.stream.messages[-ago:][:1]

    @rule(left=st.integers(0, 4))
    def purge(self, left: int) -> None:
        """All but the last messages go, whether they were read or not."""
        self.stream.first = max(self.stream.first, self.stream.last + 1 - left)

    @rule(sure=st.integers(0, 3))
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

    @rule()
    def repair(self) -> None:
        self.indexer.repair(self.truth, self.now)

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

    @rule(name=names, leaf=st.sampled_from(LEAVES))
    def decide(self, name: str, leaf: int) -> None:
        if name in self.truth:
            self.indexer.decide(self.truth[name], leaf, self.now)

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

    @rule(sure=st.integers(0, 3))
    def restart_the_indexer(self, sure: int) -> None:
        """Killed, perhaps while it saved: what was saved before is all there is."""
        if not sure:
            self.parts = None
            self.indexer = Indexer(self.lives, self.directory, self.stream, self.saved, self.now)

    @rule()
    def settle(self) -> None:
        self.directory = dict(self.truth)
        self.tell_the_rest()
        replica = Indexer(self.lives, self.directory, self.stream, self.saved, self.now)
        other = replica.settle(self.truth, self.now)
        self.now = max(other, self.indexer.settle(self.truth, self.now))
        truth = {(name, tier): life.held(tier) for name, life in self.truth.items() for tier in TIERS[name]}
        for indexer in (self.indexer, replica):
            assert {feed: indexer.held(*feed) for feed in truth} == truth
        for leaf in range(BLOCKS // 2 + 1, BLOCKS + 1):
            found = {(match.instance_id, match.tier): match.depth for match in self.indexer.found(leaf, self.now)}
            depths = {feed: depth_of(chain_to(leaf), held) for feed, held in truth.items()}
            assert found == {feed: depth for feed, depth in depths.items() if depth}
        self.check_digests(replica, truth)

    def tell_the_rest(self) -> None:
        """What would show in no report is followed by an event that shows it."""
        for name, tier in NO_REPORTS:
            if name in self.truth and ((name, tier) in self.unheard or not self.truth[name].is_all_sent(tier)):
                self.send(name, tier)
        if self.indexer.position < self.stream.last < self.stream.first and self.truth:
            # A hole shows in the next message, whoever sent it; here a worker if there is one.
            name = max(self.truth)
            self.send(name, TIERS[name][0])

    def check_digests(self, replica: Indexer, truth: dict[tuple[str, str], frozenset[int]]) -> None:
        rows = list(feed_digests(self.indexer.catalog))
        told = {(row.instance_id, row.incarnation, row.tier): (row.entries, row.key_sum) for row in rows}
        assert told == {
            (name, self.truth[name].incarnation, tier): (len(held), sum(held))
            for (name, tier), held in truth.items()
            if held
        }
        assert combined(rows) == combined(feed_digests(replica.catalog))
        other_owner = [msgspec.structs.replace(row, instance_id=f"not {row.instance_id}") for row in rows]
        assert not rows or combined(other_owner) != combined(rows)

    def teardown(self) -> None:
        self.settle()

    @invariant()
    def what_is_said_was_once_so(self) -> None:
        self.indexer.catalog.check_integrity()
        for name in TIERS:
            self.indexer.check(name)
        self.indexer.check_predictions(self.now)

    @invariant()
    def nobody_who_is_gone_is_named(self) -> None:
        for leaf in LEAVES:
            assert {match.instance_id for match in self.indexer.found(leaf, self.now)} <= set(self.truth)


TestEventApplication = ApplicationMachine.TestCase
TestEventApplication.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
