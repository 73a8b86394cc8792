"""The call that reads an index. Any number at a time, beside one that changes it."""

from kvbus_blocks.flash.kernels.compiling import Words, fence, inner, prefetch, trailing_zeros, words32, words64
from kvbus_blocks.flash.kernels.table import find, home, tag_of
from kvbus_blocks.flash.kernels.tree import reachable_for
from kvbus_blocks.flash.layout import (
    EPOCH,
    GENERATION,
    NO_OWNERS,
    NONE,
    RETRY,
    SLOT_BYTES,
    VIEW_GENERATION,
    VIEW_NODES,
    VIEW_OLD,
    VIEW_OLD_MASK,
    VIEW_SET_CAPACITY,
    VIEW_SET_WIDTH,
    VIEW_SETS,
    VIEW_TABLE,
    VIEW_TABLE_MASK,
)


def match(header: int, view: int, keys_at: int, step: int, count: int, done_at: int, found_at: int) -> int:
    """Where along the chain which owners end: (slot, depth) pairs at ``found_at``, shallow ones first. Returns how many, or RETRY.

    The owner sets only shrink along a chain, so two ends with equal sets tell everything between. The search jumps to the end of
    the chain, and halves a jump while its ends differ: k places where owners end cost about k log2(n / k) look-ups.
    ``done_at``: a word per 64 owners, and the stack of the search behind them.
    """
    h = words64(header)
    v = words64(view)
    if h[GENERATION] != v[VIEW_GENERATION]:
        return RETRY
    epoch = h[EPOCH]
    fence()
    keys = words64(keys_at)
    found = words32(found_at)
    width = v[VIEW_SET_WIDTH]
    done = words64(done_at)
    ends = words64(done_at + 8 * width)
    for i in range(width):
        done[i] = 0
    low = 0
    at_low = _reachable(v, keys[0])
    ends[0] = count - 1
    ends[1] = _reachable(v, keys[(count - 1) * step])
    open_ends = 1
    total = 0
    while open_ends and at_low != NO_OWNERS:
        high = ends[2 * open_ends - 2]
        at_high = ends[2 * open_ends - 1]
        if at_low == at_high or high - low <= 1:
            if at_low != at_high and high > low:
                if at_low >= v[VIEW_SET_CAPACITY] or at_high >= v[VIEW_SET_CAPACITY]:
                    return RETRY
                total = _end(v, at_low, at_high, high, done, found, total)
            at_low = at_high
            low = high
            open_ends -= 1
        else:
            middle = (low + high) >> 1
            # Whichever half is next: fetch the slot of its middle while this one is looked up.
            _expect(v, keys[((low + middle) >> 1) * step])
            _expect(v, keys[((middle + high) >> 1) * step])
            ends[2 * open_ends] = middle
            ends[2 * open_ends + 1] = _reachable(v, keys[middle * step])
            open_ends += 1
    if at_low >= v[VIEW_SET_CAPACITY]:
        return RETRY
    total = _end(v, at_low, NO_OWNERS, count, done, found, total)
    fence()
    if h[EPOCH] != epoch or h[GENERATION] != v[VIEW_GENERATION]:
        return RETRY
    return total


@inner
def _expect(v: Words, key: int) -> None:
    prefetch(v[VIEW_TABLE] + SLOT_BYTES * home(tag_of(key), v[VIEW_TABLE_MASK]))


@inner
def _reachable(v: Words, key: int) -> int:
    nodes = words64(v[VIEW_NODES])
    node = find(words64(v[VIEW_TABLE]), v[VIEW_TABLE_MASK], nodes, key)
    if node == NONE and v[VIEW_OLD_MASK]:
        node = find(words64(v[VIEW_OLD]), v[VIEW_OLD_MASK], nodes, key)
    return NO_OWNERS if node == NONE else reachable_for(nodes, node)


@inner
def _end(v: Words, above: int, below: int, depth: int, done: Words, found: Words, total: int) -> int:
    """The owners of the set above that are not in the set below end here; each once, whatever changes meanwhile."""
    sets = words64(v[VIEW_SETS])
    width = v[VIEW_SET_WIDTH]
    for i in range(width):
        ending = sets[above * width + i] & ~sets[below * width + i] & ~done[i]
        done[i] |= ending
        while ending:
            found[2 * total] = 64 * i + trailing_zeros(ending)
            found[2 * total + 1] = depth
            total += 1
            ending &= ending - 1
    return total
