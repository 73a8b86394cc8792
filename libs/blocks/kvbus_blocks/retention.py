"""How long KV blocks are worth keeping, and which of them goes next when room is needed.

A `Directive` says what is known of a block's future; `merge` brings together what its users say; `PinCaps` grants pins, up to
each tenant's share; `EvictionOrder` picks the next victim:

1. by class: ephemeral, then normal, then pinned. A pin that has expired is normal; so is an expired priority.
2. by score = inflation at the last use + value. The value counts priority, reuse, and the cost of computing the block anew, which
   grows with its depth. The inflation is the score of the last victim: what was used longer ago has the lower base, and nothing
   stays for its value alone (GreedyDual-Size-Frequency: Cherkasova, HPL-98-69R1).
3. by the last use.

Only blocks that nobody uses and that have none below them are offered, so leaves go before their parents.
"""

import heapq
import math
from collections.abc import Callable, Hashable
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

Kind = Literal["pinned", "normal", "ephemeral"]
KINDS: tuple[Kind, ...] = ("ephemeral", "normal", "pinned")
"""In the order in which they go."""

MAX_TTL_S = 30 * 86400.0
MAX_PRIORITY = 100
REFUSED_PIN_PRIORITY = 50
"""What a pin above the tenant's share is worth, while it would have lasted."""

# A block's value doubles with so much priority: 100 is worth 16 of 0.
_DOUBLING_PRIORITY = 25
# Attention costs as much as all the rest of a layer from about so many tokens before it (16 to a block) in models of 7 to 70 B
# parameters. From there on, a block costs twice as much as the first one.
_DOUBLING_DEPTH = 1024
# A block of an agent's session has been used in each of its turns, and never again once it has ended: that it was used often
# tells little. Undamped, ended sessions push out living ones (replay, a tier of about the working set: 12 % of resumed turns
# computed anew, and 5 % by recency alone).
_REUSE_DAMPING = 8


class Directive(msgspec.Struct, frozen=True):
    """What is known of a block's future. ``kind``: pinned (it stays until ``expires_s``), normal, or ephemeral (the first to
    go, and never below G2). ``priority``: higher stays longer. ``expires_s``: a time of the caller's clock, None: for good.
    ``tenant``: whose share of pinned blocks it counts against."""

    kind: Kind = "normal"
    priority: int = 0
    expires_s: float | None = None
    tenant: str = ""

    @property
    def is_plain(self) -> bool:
        """It says nothing: a mere use."""
        return self.kind == "normal" and self.priority == 0


PLAIN = Directive()


def directive(kind: str, priority: int, ttl_s: float | None, tenant: str, now_s: float) -> Directive:
    """The directive for what a user asks for from ``now_s`` on. Raise ValueError on what makes no sense.

    Users send any number: a ttl is cut to `MAX_TTL_S`, a priority to +-`MAX_PRIORITY`, and a pin without a ttl lasts `MAX_TTL_S`.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of retention")
    if ttl_s is not None and (math.isnan(ttl_s) or ttl_s < 0):
        raise ValueError(f"a ttl of {ttl_s} s")
    if ttl_s is None and kind == "pinned":
        ttl_s = MAX_TTL_S
    return Directive(
        kind,
        min(max(priority, -MAX_PRIORITY), MAX_PRIORITY),
        None if ttl_s is None else now_s + min(ttl_s, MAX_TTL_S),
        tenant,
    )


def shifted(of: Directive, by_s: float) -> Directive:
    """The same in the terms of another clock, which shows ``by_s`` more."""
    return of if of.expires_s is None else msgspec.structs.replace(of, expires_s=of.expires_s + by_s)


def effective(of: Directive, now_s: float) -> Directive:
    """What a directive still says: nothing once it has expired, but an ephemeral block stays one."""
    if of.expires_s is None or of.expires_s > now_s or of.kind == "ephemeral":
        return of
    return PLAIN


def demotable(of: Directive) -> bool:
    """May the block go below G2?"""
    return of.kind != "ephemeral"


def merge(held: Directive | None, said: Directive, now_s: float) -> Directive:
    """What holds for a block with ``held`` (None: it has had no user yet) when another use says ``said``.

    | held         | mere use | ephemeral | normal, priority >= 0 | normal, priority < 0 | pinned                  |
    |--------------|----------|-----------|-----------------------|----------------------|-------------------------|
    | none         | said     | said      | said                  | said                 | said                    |
    | ephemeral    | said     | held      | said                  | said                 | said                    |
    | normal       | held     | held      | said                  | said                 | said                    |
    | pinned       | held     | held      | held, higher priority | said                 | said, until the later   |

    So a pin is never shortened but by a use that says its end is wanted (a priority below 0: history that was compacted), and a
    block is ephemeral only as long as all its users say so.
    """
    if held is None:
        return said
    held = effective(held, now_s)
    if said.kind == "ephemeral" or (said.is_plain and held.kind != "ephemeral"):
        return held
    if held.kind != "pinned":
        return said
    if said.kind == "pinned":
        return _longer_pin(held, said)
    if said.priority < 0:
        return said
    return msgspec.structs.replace(held, priority=max(held.priority, said.priority))


def _longer_pin(held: Directive, said: Directive) -> Directive:
    """Whoever pins it for longer pays for it."""
    longer = said if _ends_s(said) >= _ends_s(held) else held
    return msgspec.structs.replace(longer, priority=said.priority)


def _ends_s(of: Directive) -> float:
    return math.inf if of.expires_s is None else of.expires_s


def value(of: Directive, depth: int, uses: int) -> float:
    """How much a block is worth, in uses of a first block of a prompt. ``of``: an effective directive."""
    priority: float = 2.0 ** (of.priority / _DOUBLING_PRIORITY)
    return priority * (1.0 + math.log2(max(uses, 1)) / _REUSE_DAMPING) * (1.0 + depth / _DOUBLING_DEPTH)


class Node(Protocol):
    """A block as `EvictionOrder` sees it. ``used``, ``uses`` and ``inflation`` (0 at first) are written by the order only.

    ``key``: comparable and unique among living blocks. ``depth``: blocks before it in its chain. ``is_evictable``: nobody uses
    it, nothing is below it, and it has not gone yet."""

    used: int
    uses: int
    inflation: float

    @property
    def key(self) -> Any: ...

    @property
    def depth(self) -> int: ...

    @property
    def directive(self) -> Directive: ...

    @property
    def is_evictable(self) -> bool: ...


N = TypeVar("N", bound=Node)
_Rank = tuple[int, float, int, Any]
_PINNED = KINDS.index("pinned")
_NORMAL = KINDS.index("normal")


class EvictionOrder(Generic[N]):
    """Who goes next; see the module for the order. ``lru``: least recently used first, whatever the directives say.

    A heap with lazy deletion: whoever makes a block evictable, uses it or changes its directive offers it, and what is no longer
    true is skipped when it comes up. Amortised O(log n) per call; each of the two heaps holds at most ``2 * live blocks + 64``
    entries. ``live``: how many blocks there are now. Times must not go back (they are taken as standing still then).
    """

    def __init__(self, live: Callable[[], int], *, lru: bool = False) -> None:
        self._live = live
        self._lru = lru
        self._heap: list[tuple[_Rank, int, N]] = []
        # When the rank of an offered block changes by itself: its pin or its priority expires.
        self._expiries: list[tuple[float, int, N]] = []
        self._offers = 0
        self._uses = 0
        self._now_s = -math.inf
        self.inflation = 0.0
        """The score of the last victim: the base of what is used now."""

    def __len__(self) -> int:
        """Entries of the longer heap, also those that are no longer true."""
        return max(len(self._heap), len(self._expiries))

    def begin_use(self) -> None:
        """The uses that follow are of one request: equally recent."""
        self._uses += 1

    def use(self, node: N) -> None:
        node.uses += 1
        self.touch(node)

    def touch(self, node: N) -> None:
        """A sign of a use that is counted elsewhere: the block is as recent as if it was used."""
        node.used = self._uses
        node.inflation = self.inflation
        self.offer(node)

    def offer(self, node: N) -> None:
        """Call whenever a block may have become evictable or its directive has changed."""
        if not node.is_evictable:
            return
        self._offers += 1
        heapq.heappush(self._heap, (self.rank(node), self._offers, node))
        expires_s = self._changes_s(node)
        if expires_s is not None:
            heapq.heappush(self._expiries, (expires_s, self._offers, node))
        bound = 2 * self._live() + 64
        if len(self._heap) > bound:
            self._heap = list({id(entry[2]): entry for entry in self._heap if self._holds(entry)}.values())
            heapq.heapify(self._heap)
        if len(self._expiries) > bound:
            held = {id(entry[2]): entry for entry in self._expiries if self._changes_s(entry[2]) == entry[0]}
            self._expiries = [entry for entry in held.values() if entry[2].is_evictable]
            heapq.heapify(self._expiries)

    def pop(self, now_s: float, protected: N | None = None, *, spare_pinned: bool = False) -> N | None:
        """The next block to evict, never ``protected``; None when nothing may go.

        The caller evicts it, or offers it again. ``spare_pinned``: pinned blocks may not go.
        """
        self._advance(now_s)
        kept: tuple[_Rank, int, N] | None = None
        victim: N | None = None
        while self._heap and victim is None:
            entry = heapq.heappop(self._heap)
            if not self._holds(entry):
                continue
            if spare_pinned and entry[0][0] == _PINNED:
                heapq.heappush(self._heap, entry)
                break
            if entry[2] is protected:
                kept = entry
                continue
            victim = entry[2]
            self.inflation = max(self.inflation, entry[0][1])
        if kept is not None:
            heapq.heappush(self._heap, kept)
        return victim

    def kind(self, node: N) -> Kind:
        """The class in which a block goes, as of the last `pop`."""
        return effective(node.directive, self._now_s).kind

    def rank(self, node: N) -> _Rank:
        """Lower goes first."""
        if self._lru:
            return (_NORMAL, 0.0, node.used, node.key)
        said = effective(node.directive, self._now_s)
        score = node.inflation + value(said, node.depth, node.uses)
        return (KINDS.index(said.kind), score, node.used, node.key)

    def offered(self) -> set[N]:
        """The blocks it would evict sooner or later."""
        return {entry[2] for entry in self._heap if self._holds(entry)}

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        while self._expiries and self._expiries[0][0] <= self._now_s:
            expires_s, _, node = heapq.heappop(self._expiries)
            if node.directive.expires_s == expires_s:
                self.offer(node)

    def _changes_s(self, node: N) -> float | None:
        said = node.directive
        if self._lru or said.expires_s is None or said.expires_s <= self._now_s or said.kind == "ephemeral":
            return None
        return None if said.is_plain else said.expires_s

    def _holds(self, entry: tuple[_Rank, int, N]) -> bool:
        return entry[2].is_evictable and entry[0] == self.rank(entry[2])


class PinCaps:
    """Pins of a tier, each tenant's up to ``share`` of its ``capacity`` (in blocks). All of them together have that limit, too,
    where tenants are many: ``total_share``.

    The memory is bounded by the pins: those that have expired are forgotten with the next call.
    """

    def __init__(self, capacity: int, share: float, total_share: float = 0.9) -> None:
        self.limit = int(capacity * share)
        self.total_limit = int(capacity * total_share)
        self._pins: dict[Hashable, tuple[str, float]] = {}
        self._tenants: dict[str, int] = {}
        self._expiries: list[tuple[float, int, Hashable]] = []
        self._pushed = 0

    def __len__(self) -> int:
        """Living pins of all tenants, as of the last call with a time."""
        return len(self._pins)

    def pinned(self, tenant: str) -> int:
        return self._tenants.get(tenant, 0)

    def grant(self, key: Hashable, wanted: Directive, now_s: float) -> Directive:
        """Count what the block ``key`` now has, in place of what it had: ``wanted``, or a mere priority where it was to be pinned
        and the tenant's share is used up."""
        if self._expiries and self._expiries[0][0] <= now_s:
            self.expire(now_s)
        before = self._pins.get(key)
        if wanted.kind != "pinned" or _ends_s(wanted) <= now_s:
            if before is not None:
                self.forget(key)
            return wanted
        if before is not None:
            if before[0] == wanted.tenant and before[1] <= _ends_s(wanted):
                # What is noted for its former end finds then that it lasts longer.
                self._pins[key] = (before[0], _ends_s(wanted))
                return wanted
            self.forget(key)
        held = self._tenants.get(wanted.tenant, 0)
        if held >= self.limit or len(self._pins) >= self.total_limit:
            priority = max(wanted.priority, REFUSED_PIN_PRIORITY)
            return msgspec.structs.replace(wanted, kind="normal", priority=priority)
        self._pins[key] = (wanted.tenant, _ends_s(wanted))
        self._tenants[wanted.tenant] = held + 1
        if wanted.expires_s is not None:
            self._note_end(key, wanted.expires_s)
            if len(self._expiries) > 2 * len(self._pins) + 64:
                living = ((ends_s, key) for key, (_, ends_s) in self._pins.items() if ends_s < math.inf)
                self._expiries = [(ends_s, number, key) for number, (ends_s, key) in enumerate(living)]
                heapq.heapify(self._expiries)
        return wanted

    def forget(self, key: Hashable) -> None:
        """The block is gone, or no longer pinned."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._count_down(pin[0])

    def expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            ends_s, _, key = heapq.heappop(self._expiries)
            pin = self._pins.get(key)
            if pin is None:
                continue
            if pin[1] <= now_s:
                self.forget(key)
            elif ends_s < pin[1] < math.inf:
                self._note_end(key, pin[1])

    def _note_end(self, key: Hashable, ends_s: float) -> None:
        self._pushed += 1
        heapq.heappush(self._expiries, (ends_s, self._pushed, key))

    def _count_down(self, tenant: str) -> None:
        left = self._tenants[tenant] - 1
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]


def apply(
    caps: PinCaps, key: Hashable, held: Directive | None, said: Directive, now_s: float
) -> tuple[Directive, bool]:
    """`merge`, then what ``caps`` grant of it. Also: was the block to be pinned, and is it not for as long as was asked?

    A living pin is not lost for a longer one that is refused.
    """
    if said.is_plain and held is not None and held.kind != "ephemeral" and now_s < _ends_s(held):
        return held, False  # by far the most common case
    merged = merge(held, said, now_s)
    granted = caps.grant(key, merged, now_s)
    degraded = merged.kind == "pinned" and granted.kind != "pinned"
    if degraded and held is not None and effective(held, now_s).kind == "pinned":
        granted = caps.grant(key, msgspec.structs.replace(held, priority=max(held.priority, said.priority)), now_s)
    refused = said.kind == "pinned" and (granted.kind != "pinned" or _ends_s(granted) < _ends_s(said))
    return granted, refused
