"""Messages to the indexer. Queries go to any replica; the other questions are about one replica, and go to that."""

from kvbus_wire.message import Message, Part


class IndexQuery(Message, frozen=True):
    """Who holds how much of this chain? ``keys``: packed block keys from the first block on. ``counts``: it is a request on its
    way, and counts as a use of the prefix (see `IndexUse`); tools that only look say no."""

    model: str
    keys: bytes
    counts: bool = True


class Match(Part, frozen=True):
    """``depth``: leading blocks of the chain that the instance holds in the tier (``g1`` .. ``g4``).

    ``predicted``: no event has told so. A request with this prefix was sent to the worker, which computes it now, or has no event
    source at all. Such a match comes beside that of the events, if it is deeper.
    """

    instance_id: str
    tier: str
    depth: int
    predicted: bool = False


class IndexReply(Message, frozen=True):
    """Only instances with a depth of at least 1."""

    matches: tuple[Match, ...] = ()


class DescribeIndex(Message, frozen=True):
    """What is the state of this indexer? The reply is an IndexDescription."""


class SilentWorker(Part, frozen=True):
    """A worker that works, but of whose blocks no events come. ``why``: `silent` (it emits none), `unheard` (it says that it has
    emitted some) or `declared` (its engine has none, as its record says)."""

    instance_id: str
    why: str


class IndexDescription(Message, frozen=True):
    """``position``: last message of the event stream that was handled, of those in the stream made at ``stream``.
    ``checkpoint_age_s``: since this replica has saved its content, or found that another one has; None: never.
    """

    indexer_id: str
    caught_up: bool
    stream: str
    position: int
    entries: int
    blocks: int
    instances: int
    in_repair: int
    partial: int
    predicted_entries: int = 0
    checkpoint_age_s: float | None = None
    silent: tuple[SilentWorker, ...] = ()


class DigestIndex(Message, frozen=True):
    """Make a digest of all content. ``feeds``: of each feed, too. The reply is an IndexDigest."""

    feeds: bool = False


class FeedDigest(Part, frozen=True):
    """What one instance holds in one tier, as of its event ``kv_seq``: number of blocks, and sum of their short keys modulo
    2**64."""

    instance_id: str
    incarnation: int
    model: str
    tier: str
    kv_seq: int
    entries: int
    key_sum: int


class IndexDigest(Message, frozen=True):
    """Equal ``digest``: equal content, in whatever order it came. It is BLAKE2b-128 over the feeds that hold something, in order
    of (model, instance, incarnation, tier), each as (these, entries, key_sum). Predicted content is not in it."""

    indexer_id: str
    position: int
    entries: int
    digest: str
    feeds: tuple[FeedDigest, ...] = ()


class RankPrefixes(Message, frozen=True):
    """Which prefixes are used most? ``model``: empty for all. The reply is an IndexUse."""

    model: str = ""
    limit: int = 20


class UsedPrefix(Part, frozen=True):
    """A prefix of ``depth`` blocks that ends with the block ``key`` (short key). ``reads``: queries that began with it, counted for
    some time (older ones weigh less); ``owners``: instances that hold all of it now."""

    model: str
    key: int
    depth: int
    reads: float
    owners: int


class ModelUse(Part, frozen=True):
    """Blocks: ``asked`` for in queries, ``found`` on the instance that had most of the chain, ``stored`` and ``removed`` on all
    instances. ``found`` per ``stored`` is how often a block is read once it is written. ``blocks``: distinct ones now;
    ``entries``: once per instance and tier that holds them."""

    model: str
    asked: int
    found: int
    stored: int
    removed: int
    blocks: int
    entries: int


class IndexUse(Message, frozen=True):
    """Prefixes with most reads times depth first. Counted by this replica, which answers a share of the queries."""

    indexer_id: str
    models: tuple[ModelUse, ...]
    prefixes: tuple[UsedPrefix, ...]
