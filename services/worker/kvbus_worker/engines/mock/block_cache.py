"""G1 of the mock: which blocks are held, by whom, and who goes first.

A block is *private* (being filled by one sequence; it has no key), *referenced* (cached and used by running sequences) or *idle*
(cached, no user: evictable). Room is counted, there is no memory behind it. An idle block is evicted only when no cached block
follows it, so a chain always loses its end first and "block i is there" implies that its prefix is.

    free room = capacity - private - cached        available room = free room + idle

A sequence uses a whole prefix, so the users of a block are users of everything above it. Blocks in a row that have the same users
form one `_Run`, which is divided where a user of its beginning only comes, and joined with the run above where both have become
equal. What a sequence costs therefore depends on the runs its prompt consists of, and not on its length:

    root -- system prompt (4 users) -+- session (1 user)
                                     +- session (2 users) -- its newest blocks (1 user)
"""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from kvbus_blocks.keys import ROOT
from kvbus_blocks.retention import Directive
from kvbus_worker.engines.base import BlockEvent, BlocksRemoved, BlocksStored
from kvbus_worker.engines.merging import merged
from kvbus_worker.engines.said import Said

NOTHING_SAID = Said()


class _Run:
    """Cached blocks that follow each other. ``children`` follow its last block. All its blocks have the same users and age,
    and the same is said of them. ``depth``: blocks above its first one."""

    __slots__ = ("children", "depth", "directive", "keys", "last_used", "parent", "users")

    def __init__(self, parent: "_Run | None", keys: list[bytes], users: int, depth: int, directive: Directive) -> None:
        self.parent = parent
        self.depth = depth
        self.directive = directive
        self.keys = keys
        self.users = users
        self.children: set[_Run] = set()
        self.last_used = 0

    @property
    def is_evictable(self) -> bool:
        return not self.users and not self.children and bool(self.keys)


class BlockCache:
    """Pure bookkeeping. Changes of what is cached are collected as block events until `take_events`."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a block cache needs room for at least one block")
        self.capacity = capacity
        self._runs: dict[bytes, _Run] = {}
        self._private = 0
        self._idle = 0
        self._tick = 0
        # (last_used, number, run) of idle runs without children; what was used or gained a child since is stale and skipped.
        self._evictable: list[tuple[int, int, _Run]] = []
        self._offers = 0
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
        return run.directive if run is not None else Directive()

    def acquire(self, keys: Sequence[bytes], said: Said = NOTHING_SAID) -> int:
        """Reference the leading cached blocks of a chain from the root, of which this is ``said``; how many."""
        depth = self.leading(keys)
        if depth:
            self._reference(self._ending_at(keys[depth - 1]))
            self._say(keys, depth, said)
        return depth

    def touch(self, keys: Sequence[bytes], said: Said = NOTHING_SAID) -> int:
        """Use them without keeping them; how many."""
        depth = self.acquire(keys, said)
        self.release(keys[:depth])
        return depth

    def release(self, keys: Sequence[bytes]) -> None:
        """Give up the references to a chain from the root. All of it gets the same age, so that its end is evicted before its
        beginning."""
        self._tick += 1
        run = self._runs[keys[-1]] if keys else None
        while run is not None:
            run.users -= 1
            run.last_used = self._tick
            if not run.users:
                self._idle += len(run.keys)
                self._offer(run)
            run = run.parent

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
            run.directive = merged(run.directive, said[at])
            self._join(run)
        for start, end, directive in said.pieces(first + there, first + len(keys)):
            above = keys[start - first - 1] if start > first else parent
            part = slice(start - first, end - first)
            self._insert(above, keys[part], tokens[part], merged(None, directive))

    def adopt(self, parent: bytes, keys: Sequence[bytes], tokens: Sequence[bytes]) -> int:
        """Cache blocks from elsewhere, idle; how many leading ones are cached afterwards. Takes only available room."""
        if parent != ROOT and parent not in self._runs:
            return self.leading(keys)
        # Neither the chain up to the parent nor what is adopted may be evicted to make room for the rest of the chain.
        there = self.leading(keys)
        last = keys[there - 1] if there else parent
        if last != ROOT:
            self._reference(self._ending_at(last))
        end = min(len(keys), there + self.available)
        if there < end:
            self._make_room(end - there)
            self._insert(last, keys[there:end], tokens[there:end], Directive())
            last = keys[end - 1]
        if last != ROOT:
            self.release((last,))
        return end

    def drop(self, keys: Collection[bytes]) -> int:
        """Evict these blocks, children first; those in use and those with others below them stay. How many went."""
        wanted = set(keys)
        ends = [run for run in {self._runs[key] for key in wanted if key in self._runs} if run.is_evictable]
        dropped = 0
        while ends:
            run = ends.pop()
            above, count = run.parent, 0
            while count < len(run.keys) and run.keys[-1 - count] in wanted:
                count += 1
            self._evict(run, count)
            dropped += count
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
        if any(run.depth != (run.parent.depth + len(run.parent.keys) if run.parent else 0) for run in runs):
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
        offered = {run for stamp, _, run in self._evictable if run.last_used == stamp}
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
        pieces = said.pieces(0, depth)
        for start, end, directive in pieces:
            run: _Run | None = self._ending_at(keys[end - 1])
            if start and directive is not None:
                self._ending_at(keys[start - 1])
            while run is not None and run.depth >= start:
                run.directive = merged(run.directive, directive)
                run = run.parent
        if len(pieces) > 1:
            self._join_all(self._runs[keys[depth - 1]])

    def _join_all(self, run: _Run) -> None:
        """Make those runs from the root to this one one whose directives have become equal."""
        while (above := run.parent) is not None:
            self._join(run)
            run = above

    def _insert(self, parent: bytes, keys: Sequence[bytes], tokens: Sequence[bytes], directive: Directive) -> None:
        """New blocks with one user, who uses ``parent`` as well, which therefore is the end of its run."""
        above = self._runs[parent] if parent != ROOT else None
        if above is not None and above.users == 1 and not above.children and above.directive == directive:
            above.keys += keys
            run = above
        else:
            depth = above.depth + len(above.keys) if above is not None else 0
            run = _Run(above, list(keys), 1, depth, directive)
            if above is not None:
                above.children.add(run)
        self._runs.update(dict.fromkeys(keys, run))
        self._events.stored(parent, keys, tokens)

    def _ending_at(self, key: bytes) -> _Run:
        """The run of a block, divided behind it if need be."""
        run = self._runs[key]
        return run if run.keys[-1] == key else self._divide(run, run.keys.index(key) + 1)

    def _divide(self, run: _Run, count: int) -> _Run:
        """Make the first ``count`` blocks of a run one of their own, and return that."""
        if count == len(run.keys):
            return run
        if 2 * count <= len(run.keys):
            first, rest = _Run(run.parent, run.keys[:count], run.users, run.depth, run.directive), run
            del run.keys[:count]
            run.depth += count
            moved = first
            if first.parent is not None:
                first.parent.children.remove(run)
                first.parent.children.add(first)
        else:
            first, rest = run, _Run(run, run.keys[count:], run.users, run.depth + count, run.directive)
            del run.keys[count:]
            moved = rest
            rest.children, run.children = run.children, set()
            for child in rest.children:
                child.parent = rest
        first.last_used = rest.last_used = run.last_used
        first.children = {rest}
        rest.parent = first
        self._runs.update(dict.fromkeys(moved.keys, moved))
        # The one that is offered may be the one that is a leaf no more.
        self._offer(rest)
        return first

    def _join(self, run: _Run) -> None:
        """Make a run and the one above it one when nothing tells them apart."""
        above = run.parent
        if above is None or len(above.children) != 1 or above.users != run.users or above.directive != run.directive:
            return
        above.keys += run.keys
        self._runs.update(dict.fromkeys(run.keys, above))
        above.children = run.children
        for child in above.children:
            child.parent = above
        run.keys = []

    def _make_room(self, count: int) -> None:
        while (short := count - (self.capacity - self._private - len(self._runs))) > 0:
            stamp, _, run = self._evictable[0]
            if not run.is_evictable or run.last_used != stamp:
                heappop(self._evictable)
                continue
            self._evict(run, min(short, len(run.keys)))

    def _evict(self, run: _Run, count: int) -> None:
        """Its last ``count`` blocks go."""
        if not count:
            return
        gone = run.keys[: -count - 1 : -1]
        del run.keys[-count:]
        for key in gone:
            del self._runs[key]
        self._idle -= count
        self._events.removed(gone)
        if not run.keys and run.parent is not None:
            run.parent.children.remove(run)
            self._offer(run.parent)

    def _offer(self, run: _Run) -> None:
        if run.is_evictable:
            self._offers += 1
            heappush(self._evictable, (run.last_used, self._offers, run))
            if len(self._evictable) > 4 * self.capacity + 64:
                self._evictable = [entry for entry in self._evictable if self._is_true(entry)]
                heapify(self._evictable)

    @staticmethod
    def _is_true(entry: tuple[int, int, _Run]) -> bool:
        stamp, _, run = entry
        return run.is_evictable and run.last_used == stamp


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
