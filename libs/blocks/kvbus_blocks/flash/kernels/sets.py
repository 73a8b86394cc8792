"""Owner sets: bit sets that exist once each, counted by the nodes that refer to them."""

from kvbus_blocks.flash.kernels.compiling import Words, fence, inner, words32, words64
from kvbus_blocks.flash.kernels.epoch import announce
from kvbus_blocks.flash.layout import (
    INTERNED,
    INTERNED_MASK,
    MEMO_NEW,
    MEMO_OLD,
    NO_OWNERS,
    NONE,
    SET_CAPACITY,
    SET_FIRST,
    SET_FREE,
    SET_HASH,
    SET_LIVE,
    SET_META,
    SET_META_WORDS,
    SET_REFS,
    SET_TOP,
    SET_WIDTH,
    SETS,
)

_UNUSED = -1
# The finalizer of splitmix64 (Steele, Lea, Flood 2014): each owner's share of a set's hash, which is their exclusive or.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@inner
def _shifted(word: int, bits: int) -> int:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


@inner
def _hash_of_owner(owner: int) -> int:
    mixed = (owner + 1) * _STEP
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    return mixed ^ _shifted(mixed, 31)


@inner
def has(sets: Words, width: int, which: int, owner: int) -> bool:
    return (sets[which * width + (owner >> 6)] >> (owner & 63)) & 1 != 0


@inner
def forget_memo(h: Words) -> None:
    """At the start of each call: the memo holds for one owner and one direction."""
    h[MEMO_OLD] = _UNUSED


@inner
def changed(h: Words, old: int, owner: int) -> int:
    """Move one reference from ``old`` to the set that differs from it by this owner, and return that set.

    Within a call every change adds the same owner, or every one takes it away: so a set made here is never `old` later.
    """
    if old == h[MEMO_OLD]:
        new = h[MEMO_NEW]
    else:
        new = _interned(h, old, owner)
        h[MEMO_OLD] = old
        h[MEMO_NEW] = new
    refer(h, new, old)
    return new


@inner
def refer(h: Words, new: int, old: int) -> None:
    """One reference moves from one set to another."""
    meta = words64(h[SET_META])
    if new != NO_OWNERS:
        meta[SET_META_WORDS * new + SET_REFS] += 1
    if old != NO_OWNERS:
        meta[SET_META_WORDS * old + SET_REFS] -= 1
        if meta[SET_META_WORDS * old + SET_REFS] == 0:
            _release(h, old)


@inner
def _interned(h: Words, old: int, owner: int) -> int:
    width = h[SET_WIDTH]
    sets = words64(h[SETS])
    meta = words64(h[SET_META])
    interned = words32(h[INTERNED])
    mask = h[INTERNED_MASK]
    word = owner >> 6
    bit = 1 << (owner & 63)
    wanted = meta[SET_META_WORDS * old + SET_HASH] ^ _hash_of_owner(owner)
    if wanted == 0 and _differs_by(sets, width, old, NO_OWNERS, word, bit):
        return NO_OWNERS
    at = wanted & mask
    while interned[at] != NO_OWNERS:
        which = interned[at]
        if meta[SET_META_WORDS * which + SET_HASH] == wanted and _differs_by(sets, width, old, which, word, bit):
            return which
        at = (at + 1) & mask
    new = h[SET_FREE]
    if new != NO_OWNERS:
        h[SET_FREE] = meta[SET_META_WORDS * new + SET_REFS]
        # A match may still take it for the set it was.
        announce(h)
    else:
        new = h[SET_TOP]
        h[SET_TOP] = new + 1
    for i in range(width):
        sets[new * width + i] = sets[old * width + i]
    sets[new * width + word] ^= bit
    meta[SET_META_WORDS * new + SET_HASH] = wanted
    meta[SET_META_WORDS * new + SET_REFS] = 0
    meta[SET_META_WORDS * new + SET_FIRST] = NONE
    interned[at] = new
    h[SET_LIVE] += 1
    fence()
    return new


@inner
def _differs_by(sets: Words, width: int, one: int, other: int, word: int, bit: int) -> bool:
    """Whether the two differ in exactly this bit."""
    for i in range(width):
        expected = sets[one * width + i]
        if i == word:
            expected ^= bit
        if sets[other * width + i] != expected:
            return False
    return True


@inner
def _release(h: Words, which: int) -> None:
    """Nobody refers to the set: take it out of the table, closing the gap (Knuth, TAOCP 3, 6.4, algorithm R)."""
    meta = words64(h[SET_META])
    interned = words32(h[INTERNED])
    mask = h[INTERNED_MASK]
    gap = meta[SET_META_WORDS * which + SET_HASH] & mask
    while interned[gap] != which:
        gap = (gap + 1) & mask
    at = (gap + 1) & mask
    while interned[at] != NO_OWNERS:
        home = meta[SET_META_WORDS * interned[at] + SET_HASH] & mask
        if ((at - home) & mask) >= ((at - gap) & mask):
            interned[gap] = interned[at]
            gap = at
        at = (at + 1) & mask
    interned[gap] = NO_OWNERS
    meta[SET_META_WORDS * which + SET_REFS] = h[SET_FREE]
    h[SET_FREE] = which
    h[SET_LIVE] -= 1


def resize(header: int, sets_at: int, width: int, meta_at: int, capacity: int, interned_at: int, slots: int) -> None:
    """Take over all sets into larger memory, which is zero; sets may become wider."""
    h = words64(header)
    old_width = h[SET_WIDTH]
    old_sets = words64(h[SETS])
    old_meta = words64(h[SET_META])
    old_interned = words32(h[INTERNED])
    sets = words64(sets_at)
    meta = words64(meta_at)
    interned = words32(interned_at)
    for which in range(h[SET_TOP]):
        for i in range(old_width):
            sets[which * width + i] = old_sets[which * old_width + i]
        for i in range(SET_META_WORDS):
            meta[SET_META_WORDS * which + i] = old_meta[SET_META_WORDS * which + i]
    for i in range(h[INTERNED_MASK] + 1):
        which = old_interned[i]
        if which != NO_OWNERS:
            at = meta[SET_META_WORDS * which + SET_HASH] & (slots - 1)
            while interned[at] != NO_OWNERS:
                at = (at + 1) & (slots - 1)
            interned[at] = which
    h[SETS] = sets_at
    h[SET_WIDTH] = width
    h[SET_META] = meta_at
    h[SET_CAPACITY] = capacity
    h[INTERNED] = interned_at
    h[INTERNED_MASK] = slots - 1
