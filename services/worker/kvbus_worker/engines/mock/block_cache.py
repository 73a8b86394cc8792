"""G1 of the mock: which blocks are held, by whom, and who goes first.

A block is *private* (being filled by one sequence; it has no key), *referenced* (cached and used by running sequences) or *idle*
(cached, no user: evictable, the least worth keeping first: `EvictionOrder`). Room is counted, there is no memory behind it. An
idle block is evicted only when no cached block follows it, so a chain always loses its end first and "block i is there" implies
that its prefix is.

    free room = capacity - private - cached        available room = free room + idle

A sequence uses a whole prefix, so the users of a block are users of everything above it. Blocks in a row that have the same users
form one `_Run`, which is divided where a user of its beginning only comes, and joined with the run above where both have become
equal. What a sequence costs therefore depends on the runs its prompt consists of, and not on its length:

    root -- system prompt (4 users) -+- session (1 user)
                                     +- session (2 users) -- its newest blocks (1 user)
"""

from collections.abc import Collection, Sequence
from itertools import count, groupby

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import PLAIN, Directive, EvictionOrder, PinCaps, apply, merge
from kvbus_worker.engines.base import BlockEvent, BlocksRemoved, BlocksStored
from kvbus_worker.engines.said import NOTHING_SAID, Said


class _Run:
    """Cached blocks that follow each other. ``children`` follow its last block. All its blocks have the same users and uses,
    and the same is said of them. ``start``: blocks above its first one. For `EvictionOrder` it is a node: its last block."""

    __slots__ = ("children", "directive", "inflation", "key", "keys", "parent", "start", "used", "users", "uses")

    def __init__(self, parent: "_Run | None", keys: list[bytes], users: int, directive: Directive, number: int) -> None:
        self.parent = parent
        self.keys = keys
        self.users = users
        self.start = parent.end if parent is not None else 0
        self.directive = directive
        self.children: set[_Run] = set()
        self.key = number
        self.used = 0
        self.uses = 0
        self.inflation = 0.0

    @property
    def end(self) -> int:
        """Blocks from the root to its last one."""
        return self.start + len(self.keys)

    @property
    def depth(self) -> int:
        return self.end - 1

    def is_like(self, other: "_Run") -> bool:
        """Nothing but their place tells them apart."""
        return (self.users, self.uses, self.directive) == (other.users, other.uses, other.directive)

    @property
    def is_evictable(self) -> bool:
        return not self.users and not self.children and bool(self.keys)


class BlockCache:
    """Pure bookkeeping. Changes of what is cached are collected as block events until `take_events`.

    ``now_s``: the time by which pins end, kept by the caller. ``pin_share``: part of the capacity that one tenant may pin. ``lru``:
    evict the least recently used, whatever is said.
    """

    def __init__(self, capacity: int, pin_share: float = 0.5, *, lru: bool = False) -> None:
        if capacity < 1:
            raise ValueError("a block cache needs room for at least one block")
        self.capacity = capacity
        self.now_s = 0.0
        self._runs: dict[bytes, _Run] = {}
        self._numbers = count()
        self._private = 0
        self._idle = 0
        self._order: EvictionOrder[_Run] = EvictionOrder(lambda: len(self._runs), lru=lru)
        self._pins = PinCaps(capacity, pin_share)
        self._events = _Events()

    @property
    def available(self) -> int:
        return self.capacity - self._private - len(self._runs) + self._idle

    @property
    def in_use(self) -> int:
        """Private and referenced blocks."""
        return self._private + len(self._runs) - self._idle

    @property
    def cached(self) -> int:
        return len(self._runs)

    def __contains__(self, key: object) -> bool:
        return key in self._runs

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading keys, of a chain from the root or from a cached block on, are cached."""
        there, missing = 0, len(keys) + 1
        while missing - there > 1:
            middle = (there + missing) // 2
            if keys[middle - 1] in self._runs:
                there = middle
            else:
                missing = middle
        return there

    def directive(self, key: bytes) -> Directive:
        """What holds for a block; the default when it is not cached."""
        run = self._runs.get(key)
        return run.directive if run is not None else PLAIN

    def acquire(self, keys: Sequence[bytes], said: Said = NOTHING_SAID) -> int:
        """Reference the leading cached blocks of a chain from the root, of which this is ``said``; how many."""
        depth = self.leading(keys)
        if depth:
            self._reference(self._ending_at(keys[depth - 1]))
            self._say(keys, depth, said)
            self._join_all(self._runs[keys[depth - 1]])
        return depth

    def touch(self, keys: Sequence[bytes], said: Said = NOTHING_SAID) -> int:
        """Use them without keeping them; how many."""
        depth = self.acquire(keys, said)
        self.release(keys[:depth])
        return depth

    def release(self, keys: Sequence[bytes]) -> None:
        """Give up the references to a chain from the root. All of it has been used, equally recently."""
        self._order.begin_use()
        run = self._runs[keys[-1]] if keys else None
        while run is not None:
            self._unreference(run)
            self._order.use(run)
            run = run.parent

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Give up the references to a chain from the root that was only looked at: nothing of it has been used."""
        self._let_go(self._runs[keys[-1]] if keys else None)

    def _let_go(self, run: _Run | None) -> None:
        while run is not None:
            self._unreference(run)
            self._order.offer(run)
            run = run.parent

    def _unreference(self, run: _Run) -> None:
        run.users -= 1
        if not run.users:
            self._idle += len(run.keys)

    def can_allocate(self, count: int) -> bool:
        return count <= self.available

    def allocate(self, count: int) -> None:
        """Take private blocks, evicting idle ones. Call only after `can_allocate`."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        self._make_room(count)
        self._private += count

    def free(self, count: int) -> None:
        """Give private blocks back."""
        self._private -= count

    def publish(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        first: int = 0,
        said: Said = NOTHING_SAID,
    ) -> None:
        """Private blocks that follow each other are full: they become cached, referenced by their owner. Equal ones that are there
        are used instead. ``first``: the position in the chain, of which this is ``said``.

        ``parent`` must be referenced by the caller (or the root).
        """
        self._private -= len(keys)
        there = self.leading(keys)
        for at, key in enumerate(keys[:there], first):
            # Its owner uses all above it already.
            run = self._divide(self._runs[key], 1)
            if not run.users:
                self._idle -= 1
            run.users += 1
            self._say_of(run, said[at] or PLAIN)
            self._join(run)
        for start, end, directive in said.pieces(first + there, first + len(keys)):
            above = keys[start - first - 1] if start > first else parent
            part = slice(start - first, end - first)
            self._insert(above, keys[part], tokens[part], directive)

    def adopt(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        said: Sequence[Directive | None] = (),
    ) -> int:
        """Cache blocks from elsewhere, idle, of each of which this is ``said``; how many leading ones are cached afterwards. Takes
        only available room."""
        if parent != ROOT and parent not in self._runs:
            return self.leading(keys)
        # Neither the chain up to the parent nor what is adopted may be evicted to make room for the rest of the chain.
        there = self.leading(keys)
        last = keys[there - 1] if there else parent
        held = self._ending_at(last) if last != ROOT else None
        self._reference(held)
        end = min(len(keys), there + self.available)
        if there < end:
            self._make_room(end - there)
            self._order.begin_use()
            start = there
            for directive, same in groupby(said[there:end] if said else [None] * (end - there)):
                stop = start + sum(1 for _ in same)
                above = keys[start - 1] if start else parent
                self._insert(above, keys[start:stop], tokens[start:stop], directive, idle=True)
                start = stop
            run: _Run | None = self._runs[keys[end - 1]]
            while run is not held and run is not None:
                self._order.use(run)
                run = run.parent
        self._let_go(held)
        return end

    def drop(self, keys: Collection[bytes]) -> int:
        """Evict these blocks, children first; those in use and those with others below them stay. How many went."""
        wanted = set(keys)
        ends = [run for run in {self._runs[key] for key in wanted if key in self._runs} if run.is_evictable]
        dropped = 0
        while ends:
            run = ends.pop()
            above, going = run.parent, 0
            while going < len(run.keys) and run.keys[-1 - going] in wanted:
                going += 1
            self._evict(run, going)
            dropped += going
            if not run.keys and above is not None and above.is_evictable and above.keys[-1] in wanted:
                ends.append(above)
        return dropped

    def chain(self, key: bytes) -> list[bytes]:
        """All cached blocks from the root to a cached one."""
        last = self._runs[key]
        pieces = [last.keys[: last.keys.index(key) + 1]]
        run = last.parent
        while run is not None:
            pieces.append(run.keys)
            run = run.parent
        return [key for piece in reversed(pieces) for key in piece]

    def take_events(self) -> tuple[BlockEvent, ...]:
        return self._events.take()

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping contradicts itself."""
        runs = set(self._runs.values())
        if any(run.start != (run.parent.end if run.parent else 0) for run in runs):
            raise AssertionError("a run does not know where it lies")
        if any(self._runs.get(key) is not run for run in runs for key in run.keys):
            raise AssertionError("a block lies in two runs")
        if sum(len(run.keys) for run in runs) != len(self._runs):
            raise AssertionError("a block lies in no run")
        for run in runs:
            if run.parent is not None and (run.parent not in runs or run not in run.parent.children):
                raise AssertionError("a cached block has lost its parent")
            if any(child.parent is not run or child not in runs for child in run.children):
                raise AssertionError("a run has a child that is not there")
            if run.users < sum(child.users for child in run.children):
                raise AssertionError("a block is used and its prefix is not")
        idle = sum(len(run.keys) for run in runs if not run.users)
        if idle != self._idle:
            raise AssertionError(f"{idle} idle blocks, {self._idle} counted")
        if self._private < 0 or self._private + len(self._runs) > self.capacity:
            raise AssertionError("the capacity is exceeded")
        offered = self._order.offered()
        if any(run.is_evictable and run not in offered for run in runs):
            raise AssertionError("an idle leaf cannot be evicted")

    def _reference(self, run: _Run | None) -> None:
        """Use all blocks from the root to the end of ``run``."""
        while run is not None:
            if not run.users:
                self._idle -= len(run.keys)
            run.users += 1
            run = run.parent

    def _say(self, keys: Sequence[bytes], depth: int, said: Said) -> None:
        """``depth`` leading blocks of a chain are used by one who says this of them."""
        for start, end, directive in said.pieces(0, depth):
            if directive is not None and start:
                self._ending_at(keys[start - 1])
            run: _Run | None = self._ending_at(keys[end - 1])
            piece: list[_Run] = []
            while run is not None and run.start >= start:
                piece.append(run)
                run = run.parent
            for run in reversed(piece):  # from the root on: a pin is worth little without those above it
                self._say_of(run, directive or PLAIN)

    def _say_of(self, run: _Run, said: Directive) -> None:
        """This is said of a run, whose end may not get what its beginning gets."""
        if run.directive is PLAIN and said is PLAIN:
            return
        if run.directive.kind != "pinned" and said.kind != "pinned":
            run.directive = merge(run.directive, said, self.now_s)
            return
        self._grant(run, run.directive, said)

    def _grant(self, run: _Run, held: Directive | None, said: Directive) -> None:
        for directive, same in groupby([apply(self._pins, key, held, said, self.now_s)[0] for key in run.keys]):
            length = sum(1 for _ in same)
            whole = length == len(run.keys)
            first = run if whole else self._divide(run, length)
            first.directive = directive
            if not whole:
                run = next(iter(first.children))

    def _join_all(self, run: _Run) -> None:
        """Make those runs from the root to this one one that nothing tells apart any more."""
        while (above := run.parent) is not None:
            self._join(run)
            run = above

    def _insert(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[bytes],
        said: Directive | None,
        *,
        idle: bool = False,
    ) -> None:
        """New blocks with one user, who uses ``parent`` as well: that is the end of its run. ``idle``: they have none."""
        above = self._runs[parent] if parent != ROOT else None
        run = _Run(above, list(keys), 0 if idle else 1, said or PLAIN, next(self._numbers))
        if above is not None:
            above.children.add(run)
        self._runs.update(dict.fromkeys(keys, run))
        self._events.stored(parent, keys, tokens)
        self._idle += len(keys) if idle else 0
        if said is not None and said.kind == "pinned":
            self._grant(run, None, said)
        elif not idle and above is not None and len(above.children) == 1 and above.is_like(run):
            self._join(run)

    def _ending_at(self, key: bytes) -> _Run:
        """The run of a block, divided behind it if need be."""
        run = self._runs[key]
        return run if run.keys[-1] == key else self._divide(run, run.keys.index(key) + 1)

    def _divide(self, run: _Run, count: int) -> _Run:
        """Make the first ``count`` blocks of a run one of their own, and return that."""
        if count == len(run.keys):
            return run
        number = next(self._numbers)
        if 2 * count <= len(run.keys):
            first, rest = _Run(run.parent, run.keys[:count], run.users, run.directive, number), run
            del run.keys[:count]
            run.start += count
            moved = first
            if first.parent is not None:
                first.parent.children.remove(run)
                first.parent.children.add(first)
        else:
            keys = run.keys[count:]
            del run.keys[count:]
            first, rest = run, _Run(run, keys, run.users, run.directive, number)
            moved = rest
            rest.children, run.children = run.children, set()
            for child in rest.children:
                child.parent = rest
        moved.used, moved.uses, moved.inflation = run.used, run.uses, run.inflation
        first.children = {rest}
        rest.parent = first
        self._runs.update(dict.fromkeys(moved.keys, moved))
        # The one that is offered may be the one that is a leaf no more.
        self._order.offer(rest)
        return first

    def _join(self, run: _Run) -> None:
        """Make a run and the one above it one when nothing tells them apart."""
        above = run.parent
        if above is None or len(above.children) != 1 or not above.is_like(run):
            return
        above.keys += run.keys
        self._runs.update(dict.fromkeys(run.keys, above))
        above.children = run.children
        for child in above.children:
            child.parent = above
        run.keys = []

    def _make_room(self, count: int) -> None:
        while (short := count - (self.capacity - self._private - len(self._runs))) > 0:
            run = self._order.pop(self.now_s)
            if run is None:
                raise AssertionError("an idle block can never be evicted")
            self._evict(run, min(short, len(run.keys)))

    def _evict(self, run: _Run, count: int) -> None:
        """Its last ``count`` blocks go."""
        if not count:
            return
        gone = run.keys[: -count - 1 : -1]
        del run.keys[-count:]
        for key in gone:
            del self._runs[key]
        if run.directive.kind == "pinned":
            for key in gone:
                self._pins.forget(key)
        self._idle -= count
        self._events.removed(gone)
        if run.keys:
            self._order.offer(run)
        elif run.parent is not None:
            run.parent.children.remove(run)
            self._order.offer(run.parent)


class _Events:
    """Block events under construction: consecutive keys of one chain stored, or any keys removed, make one."""

    def __init__(self) -> None:
        self._done: list[BlockEvent] = []
        self._parent = ROOT
        self._stored: list[bytes] = []
        self._tokens: list[bytes] = []
        self._removed: list[bytes] = []

    def stored(self, parent: bytes, keys: Sequence[bytes], tokens: Sequence[bytes]) -> None:
        if self._removed or (self._stored and self._stored[-1] != parent):
            self._flush()
        if not self._stored:
            self._parent = parent
        self._stored += keys
        self._tokens += tokens

    def removed(self, keys: Sequence[bytes]) -> None:
        if self._stored:
            self._flush()
        self._removed += keys

    def take(self) -> tuple[BlockEvent, ...]:
        self._flush()
        done, self._done = self._done, []
        return tuple(done)

    def _flush(self) -> None:
        if self._stored:
            self._done.append(BlocksStored(self._parent, tuple(self._stored), tuple(self._tokens)))
            self._stored, self._tokens = [], []
        if self._removed:
            self._done.append(BlocksRemoved(tuple(self._removed)))
            self._removed = []
