"""The pool against a naive model that looks at everything anew in each step."""

import contextlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbus_blocks.retention import KINDS, PLAIN, Directive, PinCaps, apply, effective, value
from kvbus_kvbm.core.block import Block
from kvbus_kvbm.core.errors import LeaseGone, TooManyLeases
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.pool import Pool, PoolLimits
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.kvbm import BlockDirective
from kvbus_wire.packing import pack_keys, unpack_keys

LEASE_S, QUARANTINE_S, MAX_LEASES = 10.0, 25.0, 3
LIMITS = PoolLimits(
    lease_s=LEASE_S, quarantine_s=QUARANTINE_S, max_leases_per_instance=MAX_LEASES, max_keys_per_request=16
)
INSTANCES = ["worker-a", "worker-b"]
# What is said of all blocks of a request.
directives = st.sampled_from(
    [
        None,
        None,
        BlockDirective(start=0, end=16, kind="pinned", ttl_s=12.0, tenant="t"),
        BlockDirective(start=0, end=16, kind="pinned", ttl_s=30.0, tenant="u"),
        BlockDirective(start=0, end=16, kind="ephemeral"),
        BlockDirective(start=0, end=16, priority=40, ttl_s=12.0),
        BlockDirective(start=0, end=16, priority=-40),
    ]
)

# A chain is a path in a binary tree: "0110" is the block below "011". Few of them, so that they meet.
paths = st.sampled_from(["0", "00", "001", "0010", "00100", "01", "1", "10", "101"])


def key(path: str) -> bytes:
    return path.encode().ljust(16, b".") if path else b""


def path_of(key: bytes) -> str:
    return key.decode().rstrip(".")


def chain(path: str, first: int = 1) -> list[str]:
    return [path[:end] for end in range(first, len(path) + 1)]


@dataclass
class NaiveBlock:
    path: str
    state: str = "reserved"
    checksum: int = 0
    used: int = 0
    uses: int = 0
    base: float = 0.0
    directive: Directive = PLAIN
    pins: int = 0
    held: int = 0
    dropped: bool = False
    writing: bool = True


@dataclass
class NaiveLease:
    instance: str
    ends_s: float
    write: bool
    blocks: list[NaiveBlock | None]


@dataclass
class NaivePool:
    slots: int
    now_s: float = 0.0
    uses: int = 0
    blocks: dict[str, NaiveBlock] = field(default_factory=dict)
    leases: dict[str, NaiveLease] = field(default_factory=dict)
    lingering: list[NaiveBlock] = field(default_factory=list)
    resting: list[float] = field(default_factory=list)
    inflation: float = 0.0

    def __post_init__(self) -> None:
        self.caps = PinCaps(self.slots, LIMITS.pin_share)

    def use(self, block: NaiveBlock, *, counted: bool = True) -> None:
        block.used, block.uses, block.base = self.uses, block.uses + counted, self.inflation

    def say(self, block: NaiveBlock, said: Directive, *, is_new: bool = False) -> bool:
        held = None if is_new else block.directive
        block.directive, refused = apply(self.caps, block.path, held, said, self.now_s)
        return refused

    def meaning(self, said: BlockDirective) -> Directive:
        expires_s = None if said.ttl_s is None else self.now_s + said.ttl_s
        return Directive(said.kind, said.priority, expires_s, said.tenant)  # type: ignore[arg-type]

    @property
    def free(self) -> int:
        return self.slots - len(self.blocks) - len(self.lingering) - len(self.resting)

    def is_present(self, path: str) -> bool:
        return not path or (path in self.blocks and self.blocks[path].state == "present")

    def drop(self, path: str) -> None:
        for other in [p for p in self.blocks if p.startswith(path)]:
            block = self.blocks.pop(other)
            block.dropped = True
            self.caps.forget(other)
            if block.pins or block.writing:
                self.lingering.append(block)

    def settle(self) -> None:
        self.lingering = [b for b in self.lingering if b.pins or b.writing]
        changed = True
        while changed:
            changed = False
            for block in self.blocks.values():
                if block.state == "written" and self.is_present(block.path[:-1]):
                    block.state, changed = "present", True

    def end(self, lease_id: str, *, abandoned: bool) -> None:
        lease = self.leases.pop(lease_id)
        for block in lease.blocks:
            if block is None:
                continue
            if lease.write:
                block.writing = False
                if not block.dropped:
                    self.drop(block.path)
                if abandoned:
                    self.resting.append(self.now_s + QUARANTINE_S)
            else:
                block.pins -= 1
        self.settle()

    def advance(self, now_s: float) -> None:
        self.now_s = now_s
        for lease_id in [i for i, lease in self.leases.items() if lease.ends_s <= now_s]:
            self.end(lease_id, abandoned=True)
        self.resting = [end for end in self.resting if end > now_s]

    def victim(self, protected: str, *, spare_pinned: bool = False) -> NaiveBlock | None:
        leaves = [
            b
            for b in self.blocks.values()
            if b.state == "present"
            and not b.pins
            and b.path != protected
            and not any(p != b.path and p.startswith(b.path) for p in self.blocks)
            and not (spare_pinned and self.kind(b) == "pinned")
        ]
        return min(leaves, key=self.rank, default=None)

    def kind(self, block: NaiveBlock) -> str:
        return effective(block.directive, self.now_s).kind

    def rank(self, block: NaiveBlock) -> tuple[int, float, int, bytes]:
        said = effective(block.directive, self.now_s)
        return KINDS.index(said.kind), self.score(block), block.used, key(block.path)

    def score(self, block: NaiveBlock) -> float:
        return block.base + value(effective(block.directive, self.now_s), len(block.path) - 1, block.uses)

    def make_room(self, above: str, *, spare_pinned: bool = False) -> bool:
        if self.free:
            return True
        victim = self.victim(above, spare_pinned=spare_pinned)
        if victim is None:
            return False
        self.inflation = max(self.inflation, self.score(victim))
        self.drop(victim.path)
        return True


class PoolMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 5))
    def make(self, slots: int) -> None:
        self.pool = Pool("p", slots, LIMITS)
        self.naive = NaivePool(slots)
        self.replayed: dict[str, str] = {}
        self.generations: dict[int, int] = {}
        self.checksums: dict[tuple[int, int], int] = {}
        self.ended: list[str] = []
        self.held: list[tuple[list[Block], list[NaiveBlock]]] = []
        self.filling: list[tuple[list[Block], list[NaiveBlock]]] = []

    @property
    def now_s(self) -> float:
        return self.naive.now_s

    def room(self, instance: str) -> bool:
        return sum(lease.instance == instance for lease in self.naive.leases.values()) < MAX_LEASES

    @rule(path=paths, first=st.sampled_from([1, 1, 2, 3]), instance=st.sampled_from(INSTANCES), directive=directives)
    def reserve(self, path: str, first: int, instance: str, directive: BlockDirective | None) -> None:
        wanted = chain(path, min(first, len(path)))
        parent = wanted[0][:-1]
        if not self.room(instance):
            try:
                self.pool.reserve(instance, key(parent), pack_keys(map(key, wanted)), self.now_s)
            except TooManyLeases:
                return
            raise AssertionError("a lease over the limit")
        said = () if directive is None else (directive,)
        reserved = self.pool.reserve(instance, key(parent), pack_keys(map(key, wanted)), self.now_s, said)
        meant = PLAIN if directive is None else self.naive.meaning(directive)
        expected = self.expect_reservation(parent, wanted, meant)
        assert [slot is not None for slot in reserved.slots] == [block is not None for block in expected]
        assert bool(reserved.lease_id) == any(expected)
        for slot in reserved.slots:
            if slot is not None:
                assert slot.generation == self.generations.get(slot.index, 0) + 1, "the generation rises with each use"
                self.generations[slot.index] = slot.generation
        if reserved.lease_id:
            self.naive.leases[reserved.lease_id] = NaiveLease(instance, self.now_s + LEASE_S, True, expected)

    def expect_reservation(self, parent: str, wanted: list[str], said: Directive) -> list[NaiveBlock | None]:
        naive, expected = self.naive, list[NaiveBlock | None]()
        if parent and parent not in naive.blocks:
            return [None] * len(wanted)
        naive.uses += 1
        for path in wanted:
            block = naive.blocks.get(path)
            if block is not None:
                expected.append(None)
            else:
                if not naive.make_room(path[:-1]):
                    break
                block = naive.blocks[path] = NaiveBlock(path)
                expected.append(block)
            naive.use(block)
            naive.say(block, said, is_new=expected[-1] is block)
        return expected + [None] * (len(wanted) - len(expected))

    @precondition(lambda self: any(lease.write for lease in self.naive.leases.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([i for i, lease in self.naive.leases.items() if lease.write]))
        blocks = self.naive.leases[lease_id].blocks
        written = data.draw(
            st.lists(st.sampled_from([True, True, True, False]), min_size=len(blocks), max_size=len(blocks))
        )
        checksums = [hash((lease_id, i)) % (1 << 64) if ok else None for i, ok in enumerate(written)]
        self.pool.commit(lease_id, checksums, self.now_s)
        del self.naive.leases[lease_id]
        for block, checksum in zip(blocks, checksums, strict=True):
            if block is None:
                continue
            block.writing = False
            if block.dropped:
                continue
            if checksum is None:
                self.naive.drop(block.path)
            else:
                block.checksum, block.state = checksum, "written"
        self.naive.settle()
        self.ended.append(lease_id)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def use_an_ended_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.ended))
        assert self.pool.release(lease_id, [0], self.now_s) == 0
        with contextlib.suppress(LeaseGone):  # it may have been committed: then a second time changes nothing
            self.pool.commit(lease_id, [1], self.now_s)

    @rule(path=paths, first=st.sampled_from([1, 1, 2, 3]), instance=st.sampled_from(INSTANCES))
    def pin(self, path: str, first: int, instance: str) -> None:
        if not self.room(instance):
            return
        wanted = chain(path, min(first, len(path)))
        pinned = self.pool.pin(instance, pack_keys(map(key, wanted)), self.now_s)
        run: list[NaiveBlock | None] = []
        for part in wanted:
            if not self.naive.is_present(part):
                break
            run.append(self.naive.blocks[part])
        assert [slot.checksum for slot in pinned.slots] == [block.checksum for block in run if block]
        assert len({slot.index for slot in pinned.slots}) == len(run)
        for slot in pinned.slots:
            assert slot.generation == self.generations[slot.index], "a pinned slot belongs to its last owner"
        assert bool(pinned.lease_id) == bool(run)
        if run:
            self.naive.uses += 1
            for block in run:
                assert block is not None
                self.naive.use(block)
                block.pins += 1
            self.naive.leases[pinned.lease_id] = NaiveLease(instance, self.now_s + LEASE_S, False, run)

    @precondition(lambda self: self.naive.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.naive.leases)))
        lease = self.naive.leases[lease_id]
        corrupt = data.draw(st.lists(st.integers(0, len(lease.blocks) - 1), max_size=2, unique=True))
        self.pool.release(lease_id, corrupt, self.now_s)
        for position in corrupt:
            block = lease.blocks[position]
            if not lease.write and block is not None and not block.dropped:
                self.naive.drop(block.path)
        self.naive.end(lease_id, abandoned=False)
        self.ended.append(lease_id)

    @rule(path=paths, directive=directives.filter(bool))
    def retain(self, path: str, directive: BlockDirective) -> None:
        wanted = chain(path)
        retained = self.pool.retain(pack_keys(map(key, wanted)), (directive,), self.now_s)
        naive = self.naive
        naive.uses += 1
        unpinned: list[int] = []
        for position, part in enumerate(wanted):
            block = naive.blocks.get(part)
            if block is None:
                continue
            naive.use(block, counted=False)
            if naive.say(block, naive.meaning(directive)):
                unpinned.append(position)
        assert list(retained.unpinned) == unpinned

    @rule(path=paths, first=st.sampled_from([1, 2, 3]))
    def drop_on_request(self, path: str, first: int) -> None:
        wanted = chain(path, min(first, len(path)))
        expected = 0
        for part in reversed(wanted):
            block = self.naive.blocks.get(part)
            below = any(p != part and p.startswith(part) for p in self.naive.blocks)
            if block is None or block.state != "present" or block.pins > block.held or below:
                continue
            self.naive.drop(part)
            expected += 1
        assert self.pool.drop_blocks(pack_keys(map(key, wanted)), self.now_s) == expected

    @rule(path=paths)
    def hold_for_a_lower_tier(self, path: str) -> None:
        blocks = self.pool.moves.hold([key(part) for part in chain(path)])
        naive = [self.naive.blocks[part] for part in chain(path) if part and self.naive.is_present(part)]
        assert [block.key for block in blocks] == [key(block.path) for block in naive]
        for block in naive:
            block.pins, block.held = block.pins + 1, block.held + 1
        self.held.append((blocks, naive))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        blocks, naive = self.held.pop(0)
        self.pool.moves.let_go(blocks)
        for block in naive:
            block.pins, block.held = block.pins - 1, block.held - 1
        self.naive.settle()

    @rule(path=paths, first=st.sampled_from([1, 1, 2, 3]))
    def make_room_for_what_comes_from_below(self, path: str, first: int) -> None:
        wanted = chain(path, min(first, len(path)))
        above = wanted[0][:-1]
        blocks = self.pool.moves.make_room(key(above), [key(part) for part in wanted])
        expected: list[NaiveBlock] = []
        for part in wanted if not above or above in self.naive.blocks else []:
            if part in self.naive.blocks or not self.naive.make_room(part[:-1], spare_pinned=True):
                break
            block = self.naive.blocks[part] = NaiveBlock(part)
            expected.append(block)
        assert [block.key for block in blocks] == [key(block.path) for block in expected]
        for made in blocks:
            self.generations[made.slot] = made.generation
        if blocks:
            self.filling.append((blocks, expected))

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), directive=directives)
    def fill(self, data: st.DataObject, directive: BlockDirective | None) -> None:
        blocks, naive = self.filling.pop(0)
        good = data.draw(st.integers(0, len(blocks)))
        said = PLAIN if directive is None else self.naive.meaning(directive)
        metas = [
            BlockMeta(block.key, key(one.path[:-1]), len(one.path) - 1, 7, said)
            for block, one in zip(blocks[:good], naive, strict=False)
        ]
        self.pool.moves.fill(blocks, metas)
        self.naive.uses += 1
        for position, block in enumerate(naive):
            block.writing = False
            if block.dropped:
                continue
            if position >= good:
                self.naive.drop(block.path)
                continue
            block.checksum, block.state = 7, "written"
            self.naive.use(block, counted=False)
            said_meanwhile = block.directive
            self.naive.say(block, said, is_new=True)
            if not said_meanwhile.is_plain:
                self.naive.say(block, said_meanwhile)
        self.naive.settle()

    @rule(instance=st.sampled_from(INSTANCES))
    def leave(self, instance: str) -> None:
        gone = [i for i, lease in self.naive.leases.items() if lease.instance == instance]
        assert self.pool.drop_instance(instance, self.now_s) == len(gone)
        for lease_id in gone:
            self.naive.end(lease_id, abandoned=True)

    @rule(seconds=st.sampled_from([0.5, 4.0, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.naive.advance(self.now_s + seconds)
        self.pool.expire(self.now_s)

    @rule()
    def wait_until_all_leases_have_expired(self) -> None:
        for seconds in (LEASE_S, QUARANTINE_S):
            self.naive.advance(self.now_s + seconds)
            self.pool.expire(self.now_s)
        while self.held:
            self.let_go()
        for blocks, naive in self.filling:
            self.pool.moves.fill(blocks, [])
            for block in naive:
                block.writing = False
                if not block.dropped:
                    self.naive.drop(block.path)
        self.filling.clear()
        self.naive.settle()
        usage = self.pool.usage()
        assert (usage.leases, usage.reserved, usage.pinned, usage.quarantined) == (0, 0, 0, 0)
        assert usage.free + usage.present == usage.slots, "a slot leaked"
        assert self.pool.next_due_s() is None

    @invariant()
    def the_pool_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        present = {path for path, block in self.naive.blocks.items() if block.state == "present"}
        snapshot = {path_of(k) for c in self.pool.chains() for k in unpack_keys(c.keys)}
        assert snapshot == present
        usage = self.pool.usage()
        assert (usage.free, usage.quarantined) == (self.naive.free, len(self.naive.resting))
        assert usage.leases == len(self.naive.leases)
        self.naive.caps.expire(self.now_s)
        pinned = [b for b in self.naive.blocks.values() if self.naive.kind(b) == "pinned"]
        assert len(pinned) == len(self.naive.caps)
        self.replay(self.pool.take_events())
        assert set(self.replayed) == present, "replayed events give the content"

    def replay(self, events: list[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent, keys):
                    above = path_of(parent)
                    for path in map(path_of, unpack_keys(keys)):
                        assert path[:-1] == above
                        assert not above or above in self.replayed, "stored below an absent parent"
                        assert path not in self.replayed, "stored twice"
                        self.replayed[path] = above
                        above = path
                case Removed(keys):
                    for path in map(path_of, unpack_keys(keys)):
                        del self.replayed[path]
                        assert path not in self.replayed.values(), "removed before its children"
                case _:
                    raise AssertionError(event)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestThePoolAgainstANaiveModel = PoolMachine.TestCase
