"""The hash table from keys to nodes: open addressing, linear probing, replaced step by step.

While a table is being replaced both are searched, the new one first. What is moved stays in the old table as well, so a reader
finds every key at any moment, whichever table it looks into first. A slot is written with one store.
"""

from kvbus_blocks.flash.kernels.compiling import Words, fence, inner, prefetch, words64
from kvbus_blocks.flash.layout import (
    EMPTY,
    FIRST_NODE,
    NODE_WORDS,
    NONE,
    OLD,
    OLD_CURSOR,
    OLD_MASK,
    SLOT_BYTES,
    TABLE,
    TABLE_LIVE,
    TABLE_MASK,
    TABLE_USED,
    TOMB,
)

_LOW_HALF = 0xFFFFFFFF
# 2**64 / golden ratio, as a signed word: spreads keys that are not spread already (Knuth, TAOCP 3, 6.4).
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


@inner
def tag_of(key: int) -> int:
    """32 bits that say where a key belongs and, nearly always, whether a slot is its own."""
    return ((key * _SPREAD) >> 32) & _LOW_HALF


@inner
def home(tag: int, mask: int) -> int:
    """The upper bits: so what is taken over slot by slot goes to ascending places, and finds them in the cache."""
    return (tag * (mask + 1)) >> 32


@inner
def find(table: Words, mask: int, nodes: Words, key: int) -> int:
    tag = tag_of(key)
    at = home(tag, mask)
    while True:
        slot = table[at]
        if slot == EMPTY:
            return NONE
        if (slot >> 32) & _LOW_HALF == tag:
            node = slot & _LOW_HALF
            if node >= FIRST_NODE and nodes[NODE_WORDS * node] == key:
                return node
        at = (at + 1) & mask


@inner
def lookup(h: Words, nodes: Words, key: int) -> int:
    """The node of the key, or NONE."""
    node = find(words64(h[TABLE]), h[TABLE_MASK], nodes, key)
    if node == NONE and h[OLD_MASK]:
        node = find(words64(h[OLD]), h[OLD_MASK], nodes, key)
    return node


@inner
def expect(h: Words, key: int) -> None:
    """The key is looked up soon."""
    tag = tag_of(key)
    prefetch(h[TABLE] + SLOT_BYTES * home(tag, h[TABLE_MASK]))
    if h[OLD_MASK]:
        prefetch(h[OLD] + SLOT_BYTES * home(tag, h[OLD_MASK]))


@inner
def insert(h: Words, key: int, node: int) -> None:
    """The key is in no table. The node's words must have been written."""
    tag = tag_of(key)
    fence()
    _put(h, words64(h[TABLE]), h[TABLE_MASK], (tag << 32) | node, tag)


@inner
def _put(h: Words, table: Words, mask: int, slot: int, tag: int) -> None:
    at = home(tag, mask)
    while table[at] > TOMB or table[at] < EMPTY:
        at = (at + 1) & mask
    if table[at] == EMPTY:
        h[TABLE_USED] += 1
    table[at] = slot
    h[TABLE_LIVE] += 1


@inner
def _slot_of(table: Words, mask: int, key: int, node: int) -> int:
    """Where the node stands, or -1."""
    tag = tag_of(key)
    slot = (tag << 32) | node
    at = home(tag, mask)
    while table[at] != slot:
        if table[at] == EMPTY:
            return -1
        at = (at + 1) & mask
    return at


@inner
def erase(h: Words, key: int, node: int) -> None:
    table = words64(h[TABLE])
    mask = h[TABLE_MASK]
    at = _slot_of(table, mask, key, node)
    if at >= 0:
        table[at] = TOMB
        h[TABLE_LIVE] -= 1
        # No probe goes on behind the end of a run, so tombs there are not needed.
        while table[at] == TOMB and table[(at + 1) & mask] == EMPTY:
            table[at] = EMPTY
            h[TABLE_USED] -= 1
            at = (at - 1) & mask
    if h[OLD_MASK]:
        old = words64(h[OLD])
        at = _slot_of(old, h[OLD_MASK], key, node)
        if at >= 0:
            old[at] = TOMB


@inner
def redirect(h: Words, key: int, node: int, target: int) -> None:
    """The node has moved."""
    slot = (tag_of(key) << 32) | target
    table = words64(h[TABLE])
    at = _slot_of(table, h[TABLE_MASK], key, node)
    if at >= 0:
        table[at] = slot
    if h[OLD_MASK]:
        old = words64(h[OLD])
        at = _slot_of(old, h[OLD_MASK], key, node)
        if at >= 0:
            old[at] = slot


@inner
def migrate(h: Words, slots: int) -> None:
    """Take over the next slots of the old table; the cursor behind its end says that nothing is left."""
    if h[OLD_MASK] == 0:
        return
    old = words64(h[OLD])
    table = words64(h[TABLE])
    mask = h[TABLE_MASK]
    end = min(h[OLD_CURSOR] + slots, h[OLD_MASK] + 1)
    for at in range(h[OLD_CURSOR], end):
        slot = old[at]
        if slot != EMPTY and slot != TOMB:
            _put(h, table, mask, slot, (slot >> 32) & _LOW_HALF)
    h[OLD_CURSOR] = end
