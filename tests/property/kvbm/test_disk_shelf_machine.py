"""A shelf with its journal against a naive model: what it says is there, what it tells, and what a restart brings back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive, PinCaps
from kvbus_kvbm.core.disk_blocks import DiskBlock
from kvbus_kvbm.core.disk_records import Record, decode_all, encode
from kvbus_kvbm.core.disk_shelf import Shelf
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pools import PoolSpec
from kvbus_wire.kv_events import Removed, Stored
from kvbus_wire.packing import unpack_keys

SPEC = PoolSpec("m", "l", 4096, 16)
UNIX_S = 1_000_000.0
SLOTS = 4
paths = st.sampled_from(["0", "00", "001", "0010", "00100", "01", "1", "10", "101"])
directives = st.builds(
    Directive,
    st.sampled_from(["normal", "pinned"]),
    st.integers(-3, 100),
    st.one_of(st.none(), st.floats(0.0, 100.0)),
    st.sampled_from(["t", "u"]),
)


def key(path: str) -> bytes:
    return path.encode().ljust(16, b".") if path else ROOT


def path_of(key: bytes) -> str:
    return key.decode().rstrip(".")


class ShelfMachine(RuleBasedStateMachine):
    """The model: ``kept`` paths with what may be their directives. The journal: bytes, appended to as an adapter does."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.journal = b""
        self.kept: set[str] = set()
        self.writing: dict[str, DiskBlock] = {}
        self.held: list[DiskBlock] = []
        self._open([])
        self.shelf.add_segment(SLOTS)
        self.shelf.add_segment(SLOTS)

    def _open(self, records: list[Record]) -> None:
        self.shelf = Shelf(SPEC, 4096, PinCaps(2 * SLOTS, 0.5), {}, UNIX_S)
        self.told: set[str] = set()
        if records:
            self.shelf.recover(records, {1: SLOTS, 2: SLOTS}, self.now_s)

    def _append_pending(self) -> None:
        self.journal += b"".join(encode(record) for record in self.shelf.take_pending())

    @rule(path=paths, said=directives)
    def place(self, path: str, said: Directive) -> None:
        if self.shelf.find(key(path)) or not self.shelf.is_placeable(key(path[:-1])):
            return
        parent = self.shelf.find(key(path[:-1]))
        protected = [] if parent is None else [parent]
        self.shelf.hold(protected)
        pinned = {p for p in self.kept if self._is_pinned(p)}
        if not self.shelf.free_slots and self.shelf.evict(self.now_s):
            gone = {p for p in self.kept if self.shelf.find(key(p)) is None}
            assert len(gone) == 1
            # Pins that hold all of it have to give something.
            assert not gone & pinned or not any(
                self.shelf.find(key(p)) is not None
                and p not in pinned
                and not any(q[:-1] == p for q in [*self.kept, *self.writing])
                and self._is_idle(p)
                for p in self.kept
            ), "a pinned block went before others"
            victim = gone.pop()
            assert not any(p[:-1] == victim for p in self.kept if p != victim), "a parent went before its child"
            self.kept.discard(victim)
        if self.shelf.free_slots:
            meta = BlockMeta(key(path), key(path[:-1]), len(path) - 1, 7, said)
            self.shelf.begin_use()
            self.writing[path] = self.shelf.place(meta, self.now_s)
        self.shelf.let_go(protected)

    def _is_idle(self, path: str) -> bool:
        block = self.shelf.find(key(path))
        return block is not None and not block.readers

    def _is_pinned(self, path: str) -> bool:
        block = self.shelf.find(key(path))
        assert block is not None
        ends_s = block.directive.expires_s
        return block.directive.kind == "pinned" and (ends_s is None or ends_s > self.now_s)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.booleans())
    def end_writing(self, data: st.DataObject, works: bool) -> None:
        path = data.draw(st.sampled_from(sorted(self.writing)))
        block = self.writing.pop(path)
        self._append_pending()
        record = self.shelf.record_of(block)
        if works:
            self.journal += encode(record)
            self.shelf.keep(block, record)
            if not block.detached:
                self.kept.add(path)
        else:
            self.shelf.give_up(block, perhaps_recorded=data.draw(st.booleans()))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A block is damaged, or dropped."""
        path = data.draw(st.sampled_from(sorted(self.kept)))
        block = self.shelf.find(key(path))
        assert block is not None
        self.shelf.remove(block)
        self.kept.discard(path)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), said=directives)
    def direct(self, data: st.DataObject, said: Directive) -> None:
        block = self.shelf.find(key(data.draw(st.sampled_from(sorted(self.kept)))))
        assert block is not None
        held = self._is_pinned(path_of(block.key))
        is_done = self.shelf.direct(block, said, self.now_s)
        wanted = said.kind == "pinned" and (said.expires_s is None or said.expires_s > self.now_s)
        assert is_done or said.kind == "pinned"
        assert not (wanted and is_done) or self._is_pinned(path_of(block.key))
        assert not held or said.priority < 0 or self._is_pinned(path_of(block.key)), "a pin was lost"

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        block = self.shelf.find(key(data.draw(st.sampled_from(sorted(self.kept)))))
        assert block is not None
        self.shelf.hold([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule()
    def end_reading(self) -> None:
        self.shelf.let_go([self.held.pop()])

    @rule(by_s=st.floats(0.0, 30.0))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(is_orderly=st.booleans())
    def restart(self, is_orderly: bool) -> None:
        if is_orderly:
            self._append_pending()
        records = [record for record in decode_all(self.journal) if record is not None]
        before = {path: self.shelf.find(key(path)) for path in self.kept}
        self.writing.clear()
        self.held.clear()
        self._open(records)
        if not self.shelf.segments:
            self.begin_segments()
        found = {path_of(block.key) for block in self.shelf}
        # What was removed and not yet said so in the journal is still there, with its data: nobody has written over it.
        assert self.kept <= found
        if is_orderly:
            assert found == self.kept
            for path, block in before.items():
                again = self.shelf.find(key(path))
                assert again is not None
                assert block is not None
                assert (again.segment, again.slot, again.checksum) == (block.segment, block.slot, block.checksum)
        self.kept = found

    def begin_segments(self) -> None:
        self.shelf.add_segment(SLOTS)
        self.shelf.add_segment(SLOTS)

    @invariant()
    def holds(self) -> None:
        for event in self.shelf.take_events():
            match event:
                case Stored(parent, keys):
                    above = path_of(parent)
                    for path in map(path_of, unpack_keys(keys)):
                        assert path[:-1] == above
                        assert above in self.told or not above
                        assert path not in self.told
                        self.told.add(path)
                        above = path
                case Removed(keys):
                    for path in map(path_of, unpack_keys(keys)):
                        assert not any(p[:-1] == path for p in self.told), "a parent was removed before its child"
                        self.told.remove(path)
                case _:
                    raise AssertionError(event)
        whole = {p for p in self.kept if all(p[:end] in self.kept for end in range(1, len(p)))}
        assert self.told == whole
        assert {path_of(block.key) for block in self.shelf if block.present} == whole
        kept = {path_of(block.key) for block in self.shelf if block.kept}
        assert kept == self.kept
        self.shelf.check_integrity()


ShelfMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestShelf = ShelfMachine.TestCase
