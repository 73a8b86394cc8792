"""The calls that change an index. One at a time; matches go on meanwhile."""

from kvbus_blocks.flash.kernels.compaction import upkeep
from kvbus_blocks.flash.kernels.compiling import Words, inner, words32, words64
from kvbus_blocks.flash.kernels.epoch import announce
from kvbus_blocks.flash.kernels.sets import changed, forget_memo, has, refer
from kvbus_blocks.flash.kernels.table import expect, lookup, migrate
from kvbus_blocks.flash.kernels.tree import (
    abandon,
    adopt,
    change_held,
    held_by,
    make_node,
    reach,
    reachable_for,
    set_owners,
    unreach,
)
from kvbus_blocks.flash.layout import (
    ADDED,
    CHILD,
    ENTRIES,
    HELD,
    LINK_WORDS,
    LINKS,
    NEXT_PEER,
    NO_OWNERS,
    NODE_FREE,
    NODE_WORDS,
    NODES,
    NONE,
    OLD_MASK,
    ORPHANED,
    ORPHANS,
    OUT_OF_REACH,
    OWNER_WORDS,
    OWNERS,
    PARENT,
    PLACEHOLDERS,
    ROOT,
    SET_FIRST,
    SET_META,
    SET_META_WORDS,
    SET_WIDTH,
    SETS,
    STORED,
    WANTS,
)

# Keys that are fetched from memory before they are needed: as many as a core has misses on the way at a time, about.
_AHEAD = 12


def store(
    header: int,
    owner: int,
    below_root: int,
    parent: int,
    keys_at: int,
    first: int,
    step: int,
    count: int,
    result_at: int,
) -> None:
    """The owner holds ``count`` keys: words ``first``, ``first + step`` ... at ``keys_at``, below the parent or the root."""
    h = words64(header)
    keys = words64(keys_at)
    result = words64(result_at)
    nodes = words64(h[NODES])
    links = words32(h[LINKS])
    sets = words64(h[SETS])
    width = h[SET_WIDTH]
    owners = words64(h[OWNERS])
    forget_memo(h)
    if h[NODE_FREE] != NONE:
        # A match may still take a free node for the one that it was: its words are written one after the other.
        announce(h)
    above = ROOT
    reachable = True
    if not below_root:
        above = lookup(h, nodes, parent)
        reachable = above != NONE and has(sets, width, reachable_for(nodes, above), owner)
    added = 0
    orphans = 0
    stored = 0
    for i in range(min(count, _AHEAD)):
        expect(h, keys[first + i * step])
    for i in range(count):
        key = keys[first + i * step]
        if i + _AHEAD < count:
            expect(h, keys[first + (i + _AHEAD) * step])
        node = lookup(h, nodes, key)
        if node == NONE or above == NONE or links[LINK_WORDS * node + PARENT] != above:
            own_parent = i == 0 and not below_root and key == parent
            if own_parent or (node != NONE and (node == above or links[LINK_WORDS * node + PARENT] != NONE)):
                break
            if node == NONE:
                node = make_node(h, nodes, links, key)
            if above == NONE:
                above = make_node(h, nodes, links, parent)
                h[PLACEHOLDERS] += 1
            adopt(links, above, node)
        stored += 1
        if not has(sets, width, held_by(nodes, node), owner):
            _hold(h, nodes, links, owners, node, owner, reachable)
            added += 1
        if not reachable:
            orphans += 1
        elif not has(sets, width, reachable_for(nodes, node), owner):
            reach(h, nodes, links, node, owner)
        above = node
    h[ENTRIES] += added
    result[ADDED] = added
    result[OUT_OF_REACH] = orphans
    result[STORED] = stored
    result[WANTS] = upkeep(h, stored, 0)


def remove(header: int, owner: int, keys_at: int, first: int, step: int, count: int, result_at: int) -> None:
    """The owner holds these keys no more."""
    h = words64(header)
    keys = words64(keys_at)
    result = words64(result_at)
    nodes = words64(h[NODES])
    links = words32(h[LINKS])
    sets = words64(h[SETS])
    width = h[SET_WIDTH]
    owners = words64(h[OWNERS])
    forget_memo(h)
    removed = 0
    for i in range(min(count, _AHEAD)):
        expect(h, keys[first + i * step])
    for i in range(count):
        if i + _AHEAD < count:
            expect(h, keys[first + (i + _AHEAD) * step])
        node = lookup(h, nodes, keys[first + i * step])
        if node == NONE or not has(sets, width, held_by(nodes, node), owner):
            continue
        if has(sets, width, reachable_for(nodes, node), owner):
            unreach(h, nodes, links, node, owner)
        _release(h, nodes, links, owners, node, owner)
        removed += 1
    h[ENTRIES] -= removed
    result[ADDED] = removed
    result[WANTS] = upkeep(h, removed, removed)


def clear(header: int, owner: int, result_at: int) -> None:
    """The owner holds nothing."""
    h = words64(header)
    result = words64(result_at)
    nodes = words64(h[NODES])
    links = words32(h[LINKS])
    sets = words64(h[SETS])
    meta = words64(h[SET_META])
    width = h[SET_WIDTH]
    owners = words64(h[OWNERS])
    forget_memo(h)
    removed = owners[OWNER_WORDS * owner + HELD]
    which = NO_OWNERS
    while owners[OWNER_WORDS * owner + HELD]:
        which += 1
        # A set that is free has bits, but no node.
        node = meta[SET_META_WORDS * which + SET_FIRST]
        if node == NONE or not has(sets, width, which, owner):
            continue
        while node != NONE:
            after = links[LINK_WORDS * node + NEXT_PEER]
            reachable = reachable_for(nodes, node)
            if has(sets, width, reachable, owner):
                set_owners(nodes, node, held_by(nodes, node), changed(h, reachable, owner))
                h[ORPHANS] += 1
                owners[OWNER_WORDS * owner + ORPHANED] += 1
            _release(h, nodes, links, owners, node, owner)
            node = after
    h[ENTRIES] -= removed
    result[ADDED] = removed
    result[WANTS] = upkeep(h, removed, removed)


def settle(header: int) -> None:
    """Take over all that is left in the old table."""
    h = words64(header)
    migrate(h, h[OLD_MASK] + 1)


def copy_held(header: int, owner: int, keys_at: int, parents_at: int) -> None:
    """The keys that the owner holds and those of their parents; a first block is its own."""
    h = words64(header)
    keys = words64(keys_at)
    parents = words64(parents_at)
    nodes = words64(h[NODES])
    links = words32(h[LINKS])
    sets = words64(h[SETS])
    meta = words64(h[SET_META])
    owners = words64(h[OWNERS])
    count = owners[OWNER_WORDS * owner + HELD]
    done = 0
    which = NO_OWNERS
    while done < count:
        which += 1
        node = meta[SET_META_WORDS * which + SET_FIRST]
        if node == NONE or not has(sets, h[SET_WIDTH], which, owner):
            continue
        while node != NONE:
            parent = links[LINK_WORDS * node + PARENT]
            keys[done] = nodes[NODE_WORDS * node]
            parents[done] = nodes[NODE_WORDS * (node if parent == ROOT else parent)]
            done += 1
            node = links[LINK_WORDS * node + NEXT_PEER]


@inner
def _hold(h: Words, nodes: Words, links: Words, owners: Words, node: int, owner: int, reachable: bool) -> None:
    """The owner gets the node: reachable at once when that is simple, else an orphan for now."""
    held = held_by(nodes, node)
    is_leaf = links[LINK_WORDS * node + CHILD] == NONE
    owners[OWNER_WORDS * owner + HELD] += 1
    if held == NO_OWNERS and not is_leaf:
        h[PLACEHOLDERS] -= 1
    was_reachable = reachable_for(nodes, node)
    held_now = change_held(h, nodes, links, node, owner)
    if reachable and is_leaf and was_reachable == held:
        refer(h, held_now, held)
        set_owners(nodes, node, held_now, held_now)
    else:
        h[ORPHANS] += 1
        owners[OWNER_WORDS * owner + ORPHANED] += 1


@inner
def _release(h: Words, nodes: Words, links: Words, owners: Words, node: int, owner: int) -> None:
    """The owner lets go of an orphan of its."""
    held = change_held(h, nodes, links, node, owner)
    h[ORPHANS] -= 1
    owners[OWNER_WORDS * owner + HELD] -= 1
    owners[OWNER_WORDS * owner + ORPHANED] -= 1
    if held == NO_OWNERS:
        abandon(h, nodes, links, node)
