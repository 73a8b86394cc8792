"""What agents say to each other on a connection: frames of a 4-byte little-endian length and a msgpack message.

accept ->  Challenge      Hello ->  Welcome        then, one after the other, a request and its answer:
Open -> Opened            what a one-sided backend needs to read a region; the grant is checked
Fetch -> data, Fetched    the blocks themselves (tcp), each whole; whether they were valid to the end comes last
Sums -> Summed            checksums of blocks
Store -> Stored           the owner reads the blocks of ``source`` into its own
Finish -> Done            the reader is done with the lease
Notify -> Done
Wake -> Done              of backends whose owner has to look after transfers: one is under way
anything -> Refused
"""

from typing import Any

import msgspec


class Spoken(msgspec.Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    pass


class Challenge(Spoken, frozen=True):
    agent_id: str
    incarnation: int
    nonce: bytes


class Hello(Spoken, frozen=True):
    agent_id: str
    incarnation: int
    nonce: bytes
    proof: bytes


class Welcome(Spoken, frozen=True):
    proof: bytes


class Open(Spoken, frozen=True):
    grant: bytes
    backend: str
    payload: bytes = b""


class Opened(Spoken, frozen=True):
    region_size: int
    detail: bytes


class Fetch(Spoken, frozen=True):
    """``backend``: who carries the data, this connection (tcp) or another one that ``payload`` names."""

    grant: bytes
    indices: list[int]
    deadline_s: float
    backend: str = "tcp"
    payload: bytes = b""


class Fetched(Spoken, frozen=True):
    pass


class Sums(Spoken, frozen=True):
    grant: bytes
    indices: list[int]
    deadline_s: float


class Summed(Spoken, frozen=True):
    sums: list[int]


class Store(Spoken, frozen=True):
    grant: bytes
    indices: list[int]
    source: bytes
    deadline_s: float
    checksum: bool = False


class Stored(Spoken, frozen=True):
    pass


class Finish(Spoken, frozen=True):
    grant: bytes


class Notify(Spoken, frozen=True):
    payload: bytes


class Wake(Spoken, frozen=True):
    backend: str


class Done(Spoken, frozen=True):
    pass


class Refused(Spoken, frozen=True):
    """``code``: of the error; ``reason``: of a refused grant."""

    code: str
    detail: str
    reason: str = ""


Request = Open | Fetch | Sums | Store | Finish | Notify | Wake
Answer = Opened | Fetched | Summed | Stored | Done | Refused

_any = msgspec.msgpack.Decoder(Challenge | Hello | Welcome | Request | Answer)


def encode(message: Spoken) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(frame: bytes | bytearray | memoryview) -> Any:
    """Raise ValueError."""
    return _any.decode(frame)
