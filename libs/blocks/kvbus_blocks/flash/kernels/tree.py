"""Nodes and how they hang together: making and forgetting them, and who can be reached along them.

The invariants are those of `kvbus_blocks.plain_index`; the root is a node here, which spares special cases.
"""

from kvbus_blocks.flash.kernels.compiling import Words, inner, words64
from kvbus_blocks.flash.kernels.sets import changed, has
from kvbus_blocks.flash.kernels.table import erase, insert
from kvbus_blocks.flash.layout import (
    CHILD,
    FREE,
    HELD,
    LINK_WORDS,
    NEXT,
    NEXT_PEER,
    NO_OWNERS,
    NODE_FREE,
    NODE_LIVE,
    NODE_TOP,
    NODE_WORDS,
    NONE,
    ORPHANED,
    ORPHANS,
    OWNER_WORDS,
    OWNERS,
    PARENT,
    PLACEHOLDERS,
    PREV,
    PREV_PEER,
    ROOT,
    SET_FIRST,
    SET_META,
    SET_META_WORDS,
    SET_WIDTH,
    SETS,
)

_LOW_HALF = 0xFFFFFFFF


@inner
def held_by(nodes: Words, node: int) -> int:
    return nodes[NODE_WORDS * node + 1] & _LOW_HALF


@inner
def reachable_for(nodes: Words, node: int) -> int:
    return nodes[NODE_WORDS * node + 1] >> 32


@inner
def set_owners(nodes: Words, node: int, held: int, reachable: int) -> None:
    """With one store: a match never sees a half."""
    nodes[NODE_WORDS * node + 1] = (reachable << 32) | held


@inner
def change_held(h: Words, nodes: Words, links: Words, node: int, owner: int) -> int:
    """The owner gets the node, or loses it: among which peers it is changes. Returns the new set.

    A node without owners has no peers, and does not name those it had: it may be moved when they are others' by then.
    """
    meta = words64(h[SET_META])
    held = held_by(nodes, node)
    if held != NO_OWNERS:
        before = links[LINK_WORDS * node + PREV_PEER]
        after = links[LINK_WORDS * node + NEXT_PEER]
        if before == NONE:
            meta[SET_META_WORDS * held + SET_FIRST] = after
        else:
            links[LINK_WORDS * before + NEXT_PEER] = after
        if after != NONE:
            links[LINK_WORDS * after + PREV_PEER] = before
    held = changed(h, held, owner)
    set_owners(nodes, node, held, reachable_for(nodes, node))
    after = NONE
    if held != NO_OWNERS:
        after = meta[SET_META_WORDS * held + SET_FIRST]
        if after != NONE:
            links[LINK_WORDS * after + PREV_PEER] = node
        meta[SET_META_WORDS * held + SET_FIRST] = node
    links[LINK_WORDS * node + PREV_PEER] = NONE
    links[LINK_WORDS * node + NEXT_PEER] = after
    return held


@inner
def unlink_free(h: Words, links: Words, node: int) -> None:
    above = links[LINK_WORDS * node + PREV]
    below = links[LINK_WORDS * node + NEXT]
    if above == NONE:
        h[NODE_FREE] = below
    else:
        links[LINK_WORDS * above + NEXT] = below
    if below != NONE:
        links[LINK_WORDS * below + PREV] = above


@inner
def make_node(h: Words, nodes: Words, links: Words, key: int) -> int:
    """A node without a place, which nobody holds."""
    node = h[NODE_FREE]
    if node == NONE:
        node = h[NODE_TOP]
        h[NODE_TOP] = node + 1
    else:
        unlink_free(h, links, node)
    set_owners(nodes, node, NO_OWNERS, NO_OWNERS)
    nodes[NODE_WORDS * node] = key
    for link in range(LINK_WORDS):
        links[LINK_WORDS * node + link] = NONE
    h[NODE_LIVE] += 1
    insert(h, key, node)
    return node


@inner
def _forget(h: Words, nodes: Words, links: Words, node: int) -> None:
    """It has no owners, no parent and no children."""
    erase(h, nodes[NODE_WORDS * node], node)
    first = h[NODE_FREE]
    links[LINK_WORDS * node + PARENT] = FREE
    links[LINK_WORDS * node + PREV] = NONE
    links[LINK_WORDS * node + NEXT] = first
    if first != NONE:
        links[LINK_WORDS * first + PREV] = node
    h[NODE_FREE] = node
    h[NODE_LIVE] -= 1


@inner
def adopt(links: Words, parent: int, node: int) -> None:
    first = links[LINK_WORDS * parent + CHILD]
    links[LINK_WORDS * node + PARENT] = parent
    links[LINK_WORDS * node + PREV] = NONE
    links[LINK_WORDS * node + NEXT] = first
    if first != NONE:
        links[LINK_WORDS * first + PREV] = node
    links[LINK_WORDS * parent + CHILD] = node


@inner
def abandon(h: Words, nodes: Words, links: Words, node: int) -> None:
    """Nobody holds the node any more: forget it, or where it lies if it has children."""
    parent = links[LINK_WORDS * node + PARENT]
    before = links[LINK_WORDS * node + PREV]
    after = links[LINK_WORDS * node + NEXT]
    if before == NONE:
        links[LINK_WORDS * parent + CHILD] = after
    else:
        links[LINK_WORDS * before + NEXT] = after
    if after != NONE:
        links[LINK_WORDS * after + PREV] = before
    links[LINK_WORDS * node + PARENT] = NONE
    links[LINK_WORDS * node + PREV] = NONE
    links[LINK_WORDS * node + NEXT] = NONE
    if parent != ROOT and held_by(nodes, parent) == NO_OWNERS and links[LINK_WORDS * parent + CHILD] == NONE:
        _forget(h, nodes, links, parent)
        h[PLACEHOLDERS] -= 1
    if links[LINK_WORDS * node + CHILD] == NONE:
        _forget(h, nodes, links, node)
    else:
        h[PLACEHOLDERS] += 1


@inner
def _first_orphan(h: Words, nodes: Words, links: Words, node: int, owner: int) -> int:
    """Of this node and the siblings after it, the first that the owner holds without reaching it."""
    sets = words64(h[SETS])
    width = h[SET_WIDTH]
    while node != NONE:
        if has(sets, width, held_by(nodes, node), owner) and not has(sets, width, reachable_for(nodes, node), owner):
            return node
        node = links[LINK_WORDS * node + NEXT]
    return NONE


@inner
def reach(h: Words, nodes: Words, links: Words, start: int, owner: int) -> None:
    """The owner holds the whole prefix of an orphan of its: so that is reachable, and what it holds below as well."""
    orphaned = OWNER_WORDS * owner + ORPHANED
    owners = words64(h[OWNERS])
    node = start
    while True:
        set_owners(nodes, node, held_by(nodes, node), changed(h, reachable_for(nodes, node), owner))
        h[ORPHANS] -= 1
        owners[orphaned] -= 1
        # Nearly always: spares looking at the children, of which a system prompt has thousands.
        if owners[orphaned] == 0:
            return
        follower = _first_orphan(h, nodes, links, links[LINK_WORDS * node + CHILD], owner)
        while follower == NONE and node != start:
            follower = _first_orphan(h, nodes, links, links[LINK_WORDS * node + NEXT], owner)
            node = links[LINK_WORDS * node + PARENT]
        if follower == NONE:
            return
        node = follower


@inner
def _first_reached(h: Words, nodes: Words, links: Words, node: int, owner: int) -> int:
    sets = words64(h[SETS])
    width = h[SET_WIDTH]
    while node != NONE:
        if has(sets, width, reachable_for(nodes, node), owner):
            return node
        node = links[LINK_WORDS * node + NEXT]
    return NONE


@inner
def unreach(h: Words, nodes: Words, links: Words, start: int, owner: int) -> None:
    """The owner is about to lose a node that it reaches: it and what the owner holds below become orphans."""
    held = OWNER_WORDS * owner + HELD
    orphaned = OWNER_WORDS * owner + ORPHANED
    owners = words64(h[OWNERS])
    node = start
    while True:
        set_owners(nodes, node, held_by(nodes, node), changed(h, reachable_for(nodes, node), owner))
        h[ORPHANS] += 1
        owners[orphaned] += 1
        if owners[orphaned] == owners[held]:
            return
        follower = _first_reached(h, nodes, links, links[LINK_WORDS * node + CHILD], owner)
        while follower == NONE and node != start:
            follower = _first_reached(h, nodes, links, links[LINK_WORDS * node + NEXT], owner)
            node = links[LINK_WORDS * node + PARENT]
        if follower == NONE:
            return
        node = follower
