"""Whatever the bus drops, doubles, delays or reorders, and whoever restarts: after the repairs the index equals the truth.

And at no moment does it name an instance that is gone or an incarnation that has ended.
"""

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.instance import Order
from kvbus_indexer.core.limits import Limits
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_keys, short_keys
from kvbus_wire.records import InstanceRecord, KvbmRecord
from kvbus_wire.worker import BlockSnapshotChunk, SnapshotChain

MODEL, TIER = "m", "g1"
# Block k (from 1) has the parent k // 2 (0: the root).
BLOCKS = 63
WORKERS = ("w0", "w1", "w2")
workers = st.sampled_from(WORKERS)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little") if number else b""


def chain_to(number: int) -> list[int]:
    chain = []
    while number:
        chain.append(number)
        number //= 2
    return chain[::-1]


class Worker:
    """The truth: what one worker holds, and the numbered events that say so."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.held: set[int] = set()
        self.seq = 0

    def emit(self, *events: KvEvent) -> KvEvents:
        batch = KvEvents(
            instance_id=self.name,
            incarnation=self.incarnation,
            model=MODEL,
            tier=TIER,
            first_seq=self.seq + 1,
            events=events,
        )
        self.seq += len(events)
        return batch

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            service="worker",
            instance_id=self.name,
            incarnation=self.incarnation,
            host_id="h",
            version="1",
            started_ms=0,
            kvbm=KvbmRecord(g2_bytes=1),
        )

    def report(self) -> LoadReport:
        return LoadReport(
            instance_id=self.name,
            incarnation=self.incarnation,
            model=MODEL,
            running=0,
            waiting=0,
            waiting_tokens=0,
            used_blocks=0,
            total_blocks=BLOCKS,
            kv_seq=self.seq,
            prefill_tokens_per_s=1.0,
            decode_step_s=1.0,
        )

    def snapshot(self) -> Iterator[BlockSnapshotChunk]:
        chains = tuple(SnapshotChain(parent=key(n // 2), keys=key(n)) for n in sorted(self.held, reverse=True))
        parts = [chains[i : i + 5] for i in range(0, len(chains), 5)] or [()]
        for number, part in enumerate(parts):
            yield BlockSnapshotChunk(
                snapshot_id="s",
                instance_id=self.name,
                incarnation=self.incarnation,
                model=MODEL,
                tier=TIER,
                kv_seq=self.seq,
                chains=part,
                next_cursor=number + 1 if number + 1 < len(parts) else None,
            )


class ApplicationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        limits = Limits(max_buffered_keys=30, max_repairs=2, repair_backoff_s=0.1)
        self.catalog = Catalog(limits, PlainIndex)
        self.workers: dict[str, Worker] = {}
        self.incarnations = 0
        self.wire: list[KvEvents] = []
        self.fetches: list[tuple[Order, Iterator[BlockSnapshotChunk]]] = []
        for name in WORKERS:
            self.start(name)
        self.catalog.stream_caught_up(0.0)

    def send(self, worker: Worker, *events: KvEvent) -> None:
        self.wire.append(worker.emit(*events))

    def start(self, name: str) -> None:
        self.incarnations += 1
        self.workers[name] = Worker(name, self.incarnations)
        self.catalog.joined(self.workers[name].record(), self.now)

    @rule(name=workers, what=st.sampled_from(["restart", "silent restart", "stop"]), sure=st.integers(0, 3))
    def change_membership(self, name: str, what: str, sure: int) -> None:
        """A restart is silent when the directory has not heard of the new incarnation yet."""
        if sure:
            return
        match what:
            case "restart":
                self.start(name)
            case "silent restart":
                self.incarnations += 1
                self.workers[name] = Worker(name, self.incarnations)
            case "stop":
                self.workers.pop(name, None)
                self.catalog.left(name)

    @rule(name=workers, leaf=st.integers(1, BLOCKS), skip=st.integers(0, 4))
    def store(self, name: str, leaf: int, skip: int) -> None:
        if name in self.workers:
            chain = chain_to(leaf)
            numbers = chain[min(skip, len(chain) - 1) :]
            self.workers[name].held.update(numbers)
            self.send(self.workers[name], Stored(key(numbers[0] // 2), pack_keys(map(key, numbers))))

    @rule(name=workers, numbers=st.lists(st.integers(1, BLOCKS), min_size=1, max_size=10))
    def remove(self, name: str, numbers: list[int]) -> None:
        if name in self.workers:
            self.workers[name].held.difference_update(numbers)
            first, rest = numbers[:1], numbers[1:]
            self.send(self.workers[name], Removed(pack_keys(map(key, first))), Removed(pack_keys(map(key, rest))))

    @rule(name=workers)
    def clear(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].held.clear()
            self.send(self.workers[name], Cleared())

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for batch in self.wire[:count]:
            self.catalog.apply(batch, self.now)
        del self.wire[:count]

    @rule(data=st.data(), what=st.sampled_from(["drop", "double", "reorder"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        if self.wire:
            at = data.draw(st.integers(0, len(self.wire) - 1))
            match what:
                case "drop":
                    del self.wire[at]
                case "double":
                    self.wire.append(self.wire[at])
                case "reorder":
                    self.wire.insert(0, self.wire.pop(at))

    @rule(seconds=st.floats(0.0, 2.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for order in self.catalog.due(self.now):
            worker = self.workers.get(order.instance_id)
            if worker is None:
                self.catalog.fail(order, self.now)
            else:
                self.fetches.append((order, iter(list(worker.snapshot()))))

    @rule(data=st.data(), fails=st.booleans())
    def fetch_on(self, data: st.DataObject, fails: bool) -> None:
        if not self.fetches:
            return
        at = data.draw(st.integers(0, len(self.fetches) - 1))
        order, chunks = self.fetches[at]
        chunk = next(chunks, None)
        if chunk is None:
            self.catalog.finish(order, self.now)
        elif fails:
            self.catalog.fail(order, self.now)
        elif self.catalog.chunk(order, chunk, self.now):
            return
        del self.fetches[at]

    @rule(name=workers)
    def report(self, name: str) -> None:
        if name in self.workers:
            self.catalog.load_report(self.workers[name].report(), self.now)

    @rule()
    def settle(self) -> None:
        """The directory, load reports and repairs work again for a while: everything must be right."""
        for worker in self.workers.values():
            self.catalog.joined(worker.record(), self.now)
        for batch in self.wire:
            self.catalog.apply(batch, self.now)
        self.wire.clear()
        for order, _ in self.fetches:
            self.catalog.fail(order, self.now)
        self.fetches.clear()
        for _ in range(12):
            for worker in self.workers.values():
                self.catalog.load_report(worker.report(), self.now)
            self.now += 10.0
            for order in self.catalog.due(self.now):
                for chunk in self.workers[order.instance_id].snapshot():
                    assert self.catalog.chunk(order, chunk, self.now)
                assert self.catalog.finish(order, self.now)
        assert self.catalog.next_due() is None
        for leaf in range(BLOCKS // 2 + 1, BLOCKS + 1):
            assert self.found(leaf) == self.truth(leaf)

    def teardown(self) -> None:
        self.settle()

    def found(self, leaf: int) -> dict[str, int]:
        matches = self.catalog.match(MODEL, short_keys(pack_keys(map(key, chain_to(leaf)))))
        return {match.instance_id: match.depth for match in matches}

    def truth(self, leaf: int) -> dict[str, int]:
        depths = {}
        for name, worker in self.workers.items():
            depth = next((i for i, n in enumerate(chain_to(leaf)) if n not in worker.held), len(chain_to(leaf)))
            if depth:
                depths[name] = depth
        return depths

    @invariant()
    def nobody_who_is_gone_is_named(self) -> None:
        self.catalog.check_integrity()
        for leaf in (BLOCKS, BLOCKS // 2 + 1, BLOCKS - 7):
            assert set(self.found(leaf)) <= set(self.workers)


TestEventApplication = ApplicationMachine.TestCase
TestEventApplication.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
