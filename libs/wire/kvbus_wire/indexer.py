"""Messages to the indexer."""

from kvbus_wire.message import Message, Part


class IndexQuery(Message, frozen=True):
    """Who holds how much of this chain? ``keys``: packed block keys from the first block on."""

    model: str
    keys: bytes


class Match(Part, frozen=True):
    """``depth``: leading blocks of the chain that the instance holds in the tier (``g1`` .. ``g4``)."""

    instance_id: str
    tier: str
    depth: int


class IndexReply(Message, frozen=True):
    """Only instances with a depth of at least 1."""

    matches: tuple[Match, ...] = ()
