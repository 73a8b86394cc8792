"""Where everything lies in the flash index's memory, for the compiled kernels and for Python alike.

All memory is arrays of 64-bit words (links, the owner sets' table and results: 32-bit ones). Nodes are numbered; two numbers are
never in the hash table, which lets them have a meaning there, too:

    NONE   no node; as a parent: not known
    ROOT   the parent of first blocks
"""

NONE = 0
ROOT = 1
FIRST_NODE = 2

# A node's two words: its key, and its two owner sets: who holds it (low half) and for whom it is reachable (high half).
NODE_WORDS = 2
# A node's links. NEXT and PREV: siblings, or the list of free nodes; peers are the nodes that the same owners hold.
LINK_WORDS = 6
PARENT, CHILD, NEXT, PREV, NEXT_PEER, PREV_PEER = range(LINK_WORDS)
FREE = -1
NODE_BYTES = NODE_WORDS * 8 + LINK_WORDS * 4

# A slot of the hash table: the high half of the key's hash, and the node. Its two values without a node:
EMPTY = 0
TOMB = 1
SLOT_BYTES = 8

# An owner set: its bits, and its hash, its references (or, when it has none, the next free set) and the first node that exactly
# these owners hold. Set 0 is the empty set.
SET_META_WORDS = 3
SET_HASH, SET_REFS, SET_FIRST = range(SET_META_WORDS)
NO_OWNERS = 0

# What is known of an owner: how many blocks it holds, and how many of them are out of reach.
OWNER_WORDS = 2
HELD, ORPHANED = range(OWNER_WORDS)

# The header: state that kernels change. Readers take nothing from it but EPOCH and GENERATION.
HEADER = (
    "EPOCH",  # grows before anything that a running match may rely on is reused or moved
    "GENERATION",  # grows whenever memory or the table of owners is replaced, see the view
    "NODES", "LINKS",  # addresses
    "TABLE", "TABLE_MASK", "TABLE_LIVE", "TABLE_USED",  # used: live and tombs
    "OLD", "OLD_MASK", "OLD_CURSOR",  # the table that is being replaced; its mask is 0 when there is none
    "SETS", "SET_WIDTH", "SET_META", "SET_CAPACITY", "INTERNED", "INTERNED_MASK",
    "SET_TOP", "SET_FREE", "SET_LIVE",
    "OWNERS",
    "NODE_TOP", "NODE_FREE", "NODE_LIVE", "NODE_PEAK", "SWEEP",  # peak: the highest top since memory was given back
    "PLACEHOLDERS", "ENTRIES", "ORPHANS",
    "MEMO_OLD", "MEMO_NEW",  # the last change of an owner set in this call
)  # fmt: skip
HEADER_WORDS = len(HEADER)
(
    EPOCH, GENERATION, NODES, LINKS, TABLE, TABLE_MASK, TABLE_LIVE, TABLE_USED, OLD, OLD_MASK, OLD_CURSOR, SETS, SET_WIDTH,
    SET_META, SET_CAPACITY, INTERNED, INTERNED_MASK, SET_TOP, SET_FREE, SET_LIVE, OWNERS, NODE_TOP, NODE_FREE, NODE_LIVE,
    NODE_PEAK, SWEEP, PLACEHOLDERS, ENTRIES, ORPHANS, MEMO_OLD, MEMO_NEW,
) = range(HEADER_WORDS)  # fmt: skip

# What a match reads besides: fixed for one generation. Whoever matches keeps the memory behind the addresses alive.
VIEW_WORDS = 9
(
    VIEW_GENERATION, VIEW_NODES, VIEW_TABLE, VIEW_TABLE_MASK, VIEW_OLD, VIEW_OLD_MASK, VIEW_SETS, VIEW_SET_WIDTH,
    VIEW_SET_CAPACITY,
) = range(VIEW_WORDS)  # fmt: skip

# What a match is given to write to: room for every owner once, twice (slots, depths), after the owners that are done.
RETRY = -1
"""A match met a change of memory; its result means nothing."""

# What a changing call answers.
RESULT_WORDS = 4
ADDED, OUT_OF_REACH, STORED, WANTS = range(RESULT_WORDS)

# Bits of WANTS: memory that Python has to see to before the next call.
WANTS_TABLE = 1
WANTS_OLD_TABLE_DROPPED = 2
WANTS_SETS = 4
WANTS_TRIM = 8

MAX_BLOCKS = 1 << 29
"""Nodes, and up to two owner sets of each, are numbered by signed 32-bit words."""
CHUNK_KEYS = 2048
"""Keys per call: bounds how long a call takes, and the room that has to be free before one."""
MIN_TABLE_SLOTS = 4 * CHUNK_KEYS
MIN_COMPACT_NODES = 4 * CHUNK_KEYS
"""Below so many nodes nothing is moved or given back."""
TRIM_NODES = 1 << 16
