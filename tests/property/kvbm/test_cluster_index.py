"""The index of G4 against what a plain model says is told of, over any order of writes, losses and evictions."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus_blocks.retention import Directive
from kvbus_kvbm.core.cluster_index import ClusterBlock, ClusterIndex
from kvbus_kvbm.core.cluster_objects import object_bytes
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_wire.kv_events import Removed, Stored
from kvbus_wire.packing import unpack_keys

SPECS = (PoolSpec("one", "layout", 100, 16), PoolSpec("two", "layout", 300, 16))
BLOCKS = 14

specs = st.sampled_from(SPECS)
places = st.integers(1, BLOCKS)
directives = st.builds(
    Directive,
    kind=st.sampled_from(["normal", "pinned"]),
    priority=st.integers(-10, 10),
    expires_s=st.none() | st.integers(0, 60).map(float),
    tenant=st.sampled_from(["", "t"]),
)


def key_of(place: int) -> bytes:
    """A tree: the parent of block i is block i // 2."""
    return b"" if place == 0 else place.to_bytes(16, "big")


def meta_of(place: int, directive: Directive) -> BlockMeta:
    return BlockMeta(key_of(place), key_of(place // 2), place.bit_length() - 1, place, directive)


class ClusterIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ClusterIndex(8 * object_bytes(SPECS[0]), 0.4)
        self.told: dict[PoolSpec, set[bytes]] = {spec: set() for spec in SPECS}
        self.under_way: list[ClusterBlock] = []
        self.now_s = 0.0

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(spec=specs, place=places, directive=directives, created=st.booleans())
    def begin(self, spec: PoolSpec, place: int, directive: Directive, created: bool) -> None:
        meta = meta_of(place, directive)
        if self.index.find(spec, meta.key) is not None:
            return
        block = self.index.insert(spec, meta, self.now_s, created=created)
        evicted, fits = self.index.make_room(self.now_s, spare_pinned=directive.kind != "pinned")
        assert all(not gone.children and not gone.writing for gone in evicted)
        if fits:
            self.under_way.append(block)
        else:
            self.index.remove(block)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), written=st.booleans())
    def end(self, data: st.DataObject, written: bool) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.under_way), unique=True))
        self.under_way = [block for block in self.under_way if block not in blocks]
        if written:
            self.index.landed(sorted(blocks, key=lambda block: block.depth))
        else:
            for block in blocks:
                self.index.remove(block)

    @rule(spec=specs, place=places, directive=directives)
    def use(self, spec: PoolSpec, place: int, directive: Directive) -> None:
        block = self.index.find(spec, key_of(place))
        if block is not None and not block.writing:
            self.index.direct(block, directive, self.now_s)
            self.index.use([block])

    @rule(spec=specs, place=places)
    def lose(self, spec: PoolSpec, place: int) -> None:
        block = self.index.find(spec, key_of(place))
        if block is not None and not block.writing:
            self.index.remove(block)

    @invariant()
    def others_know_exactly_what_lies_there_with_its_whole_prefix(self) -> None:
        self.index.check_integrity()
        for spec, events in self.index.take_events():
            told = self.told[spec]
            for event in events:
                if isinstance(event, Stored):
                    assert event.parent == b"" or event.parent in told
                    told |= set(unpack_keys(event.keys))
                elif isinstance(event, Removed):
                    for key in unpack_keys(event.keys):
                        told.remove(key)
                        assert not any(key_of(int.from_bytes(other, "big") // 2) == key for other in told)
        for spec in SPECS:
            landed = {
                place
                for place in range(1, BLOCKS + 1)
                if (block := self.index.find(spec, key_of(place))) is not None and not block.writing
            }
            whole = {place for place in landed if all(place >> i in landed for i in range(place.bit_length()))}
            assert self.told[spec] == {key_of(place) for place in whole}
            here = {block.key: block for block in self.index.shelf(spec).blocks.values() if block.told}
            assert here.keys() == self.told[spec]
            assert all(block.parent_key in here or not block.parent_key for block in here.values())
        assert self.index.used_bytes <= self.index.capacity_bytes


TestClusterIndex = ClusterIndexMachine.TestCase
TestClusterIndex.settings = settings(max_examples=60, stateful_step_count=40)
