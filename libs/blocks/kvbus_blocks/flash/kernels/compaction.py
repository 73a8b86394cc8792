"""After each change: a little work that keeps memory in proportion, and what Python has to see to."""

from kvbus_blocks.flash.kernels.compiling import Words, fence, inner, words32, words64
from kvbus_blocks.flash.kernels.epoch import announce
from kvbus_blocks.flash.kernels.table import migrate, redirect
from kvbus_blocks.flash.kernels.tree import held_by, unlink_free
from kvbus_blocks.flash.layout import (
    CHILD,
    CHUNK_KEYS,
    FIRST_NODE,
    FREE,
    LINK_WORDS,
    LINKS,
    MIN_COMPACT_NODES,
    MIN_TABLE_SLOTS,
    NEXT,
    NEXT_PEER,
    NO_OWNERS,
    NODE_LIVE,
    NODE_PEAK,
    NODE_TOP,
    NODE_WORDS,
    NODES,
    NONE,
    OLD_CURSOR,
    OLD_MASK,
    PARENT,
    PREV,
    PREV_PEER,
    SET_CAPACITY,
    SET_FIRST,
    SET_LIVE,
    SET_META,
    SET_META_WORDS,
    SWEEP,
    TABLE_LIVE,
    TABLE_MASK,
    TABLE_USED,
    TRIM_NODES,
    WANTS_OLD_TABLE_DROPPED,
    WANTS_SETS,
    WANTS_TABLE,
    WANTS_TRIM,
)

# Of one call: some ten milliseconds, at 0.3 us each.
_MOST_MOVES = 1 << 16


@inner
def upkeep(h: Words, keys: int, removed: int) -> int:
    """What has to be done before the next call, as bits of WANTS."""
    # Four slots per key: the old table is through long before the new one is full.
    migrate(h, 4 * keys + 1024)
    unused = h[NODE_TOP] - 2 * h[NODE_LIVE]
    compact(h, max(64, min(2 * removed, _MOST_MOVES), min(unused >> 8, _MOST_MOVES >> 4)))
    wants = 0
    slots = h[TABLE_MASK] + 1
    if h[OLD_MASK] and h[OLD_CURSOR] > h[OLD_MASK]:
        wants |= WANTS_OLD_TABLE_DROPPED
    # What still stands in the old table only needs room as well.
    load = h[TABLE_USED] + h[NODE_LIVE] - h[TABLE_LIVE]
    sparse = h[OLD_MASK] == 0 and slots > MIN_TABLE_SLOTS and 8 * (h[NODE_LIVE] + CHUNK_KEYS) < slots
    if 4 * (load + CHUNK_KEYS + 1) > 3 * slots or sparse:
        wants |= WANTS_TABLE
    # A call makes at most one new set of each that is there, and one of a single owner.
    if 2 * h[SET_LIVE] + 3 > h[SET_CAPACITY]:
        wants |= WANTS_SETS
    h[NODE_PEAK] = max(h[NODE_PEAK], h[NODE_TOP])
    if h[NODE_PEAK] - h[NODE_TOP] >= TRIM_NODES:
        wants |= WANTS_TRIM
    return wants


@inner
def compact(h: Words, moves: int) -> None:
    """While less than half of the nodes are used, move the last ones into holes.

    What is moved stays where it was, too, until the epoch has grown: a match finds either.
    """
    if h[NODE_TOP] < MIN_COMPACT_NODES or 2 * h[NODE_LIVE] >= h[NODE_TOP]:
        return
    nodes = words64(h[NODES])
    links = words32(h[LINKS])
    # A match may still take a hole for the node that it was.
    announce(h)
    while moves > 0 and max(2 * h[NODE_LIVE], FIRST_NODE) < h[NODE_TOP]:
        moves -= 1
        last = h[NODE_TOP] - 1
        if links[LINK_WORDS * last + PARENT] == FREE:
            unlink_free(h, links, last)
        else:
            hole = h[SWEEP]
            while hole < last and links[LINK_WORDS * hole + PARENT] != FREE:
                hole += 1
            if hole >= last:
                h[SWEEP] = FIRST_NODE
                continue
            h[SWEEP] = hole + 1
            unlink_free(h, links, hole)
            _move(h, nodes, links, last, hole)
        h[NODE_TOP] = last
    announce(h)


@inner
def _move(h: Words, nodes: Words, links: Words, node: int, target: int) -> None:
    for i in range(NODE_WORDS):
        nodes[NODE_WORDS * target + i] = nodes[NODE_WORDS * node + i]
    for i in range(LINK_WORDS):
        links[LINK_WORDS * target + i] = links[LINK_WORDS * node + i]
    parent = links[LINK_WORDS * node + PARENT]
    before = links[LINK_WORDS * node + PREV]
    after = links[LINK_WORDS * node + NEXT]
    if before != NONE:
        links[LINK_WORDS * before + NEXT] = target
    elif parent != NONE:
        links[LINK_WORDS * parent + CHILD] = target
    if after != NONE:
        links[LINK_WORDS * after + PREV] = target
    before = links[LINK_WORDS * node + PREV_PEER]
    after = links[LINK_WORDS * node + NEXT_PEER]
    if before != NONE:
        links[LINK_WORDS * before + NEXT_PEER] = target
    elif held_by(nodes, node) != NO_OWNERS:
        meta = words64(h[SET_META])
        meta[SET_META_WORDS * held_by(nodes, node) + SET_FIRST] = target
    if after != NONE:
        links[LINK_WORDS * after + PREV_PEER] = target
    child = links[LINK_WORDS * node + CHILD]
    while child != NONE:
        links[LINK_WORDS * child + PARENT] = target
        child = links[LINK_WORDS * child + NEXT]
    fence()
    redirect(h, nodes[NODE_WORDS * node], node, target)
