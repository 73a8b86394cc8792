"""What an indexer saves of its content: a header, then one part per feed, each behind its length (u32, little-endian).

Readers refuse what they do not know, and read the event stream from its beginning instead; so this format may change, other than
that of messages.
"""

from collections.abc import Iterator

from kvbus_wire.message import DecodeFailed, Decoder, Message, encode

VERSION = 1
_LENGTH_BYTES = 4


class CheckpointHeader(Message, frozen=True):
    """Valid for the event stream ``stream`` (its time of creation, which tells it from a former one of the same name) as long as
    that holds all messages behind ``stream_seq``. ``saved_ms``: for people."""

    version: int
    stream: str
    stream_seq: int
    indexer_id: str
    saved_ms: int


class CheckpointFeed(Message, frozen=True):
    """What an instance held in one tier as of its event ``kv_seq``, as chains of blocks.

    ``keys``: short keys (u64, little-endian) of all chains; ``lengths``: blocks per chain (u32); ``parents``: the block above each
    chain (u64), or the chain's own first key where there is none.
    """

    instance_id: str
    incarnation: int
    model: str
    tier: str
    kv_seq: int
    keys: bytes
    lengths: bytes
    parents: bytes


_header_decoder = Decoder.of(CheckpointHeader)
_feed_decoder = Decoder.of(CheckpointFeed)


def framed(part: CheckpointHeader | CheckpointFeed) -> bytes:
    data = encode(part)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def read_checkpoint(data: bytes) -> tuple[CheckpointHeader, Iterator[CheckpointFeed]]:
    """The feeds are decoded one by one. Raise DecodeFailed, also while iterating."""
    frames = _frames(memoryview(data))
    first = next(frames, None)
    if first is None:
        raise DecodeFailed("an empty checkpoint")
    header: CheckpointHeader = _header_decoder.decode(first)
    if header.version != VERSION:
        raise DecodeFailed(f"a checkpoint of version {header.version}; this one reads {VERSION}")
    return header, (_feed_decoder.decode(frame) for frame in frames)


def _frames(data: memoryview) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        begin = start + _LENGTH_BYTES
        start = begin + int.from_bytes(data[begin - _LENGTH_BYTES : begin], "little")
        if start > len(data):
            raise DecodeFailed("a checkpoint that ends too early")
        yield bytes(data[begin:start])
