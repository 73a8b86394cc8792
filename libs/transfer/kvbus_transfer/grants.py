"""Sealed grants: the right to read (or write) pieces of a region of one agent while a lease runs.

    grant = msgpack(GrantBody) || BLAKE2b-128(key of the owner's incarnation, msgpack(GrantBody))

The key never leaves the owner, so nobody else can make or change a grant. The rest of the body tells the reader where the owner
listens and how long the lease runs: a grant needs nothing besides itself.
"""

import hmac
from hashlib import blake2b

import msgspec

from kvbus_transfer.errors import GrantRefused, Refusal

SEAL_BYTES = 16
_PERSON = b"kvbus.grant.v1"


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where an agent is and what it can do. ``incarnation``: another one after each start. ``host_id``: agents with the same one
    may share memory. ``backends``: name -> what a peer needs to reach that one (empty: nothing)."""

    agent_id: str
    incarnation: int
    host_id: str
    host: str
    port: int
    tls: bool = False
    backends: dict[str, bytes] = {}

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "AgentInfo":
        """Raise ValueError."""
        return msgspec.msgpack.decode(data, type=cls)


class GrantBody(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``peer``: the only agent that may use it (empty: any). ``segments``: (offset, length) in the region, numbered from 0.
    ``expires_ms``: unix time, a hint for the reader (the owner has its own clock). ``slot``: of the lease in the owner's table.
    ``layout``: fingerprint of what the bytes mean; a reader that expects another one refuses."""

    owner: AgentInfo
    lease_id: int
    region_id: int
    segments: list[tuple[int, int]]
    expires_ms: int
    slot: int
    peer: str = ""
    access: str = "read"
    layout: str = ""


_decoder = msgspec.msgpack.Decoder(GrantBody)


class Sealer:
    """Makes and checks grants with the key of one incarnation."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, body: GrantBody) -> bytes:
        data = msgspec.msgpack.encode(body)
        return data + self._mac(data)

    def is_sealed(self, grant: bytes) -> bool:
        return len(grant) > SEAL_BYTES and hmac.compare_digest(grant[-SEAL_BYTES:], self._mac(grant[:-SEAL_BYTES]))

    def _mac(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=SEAL_BYTES, key=self._key, person=_PERSON).digest()


def body_of(grant: bytes) -> GrantBody:
    """What a grant says, unchecked: only its owner can tell whether it is genuine. Raise GrantRefused for what is no grant."""
    try:
        return _decoder.decode(memoryview(grant)[:-SEAL_BYTES])
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise GrantRefused(Refusal.FORGED, "it cannot be read") from error


def pick(body: GrantBody, indices: list[int]) -> list[tuple[int, int]]:
    """The segments of these numbers. Raise GrantRefused."""
    count = len(body.segments)
    if any(not 0 <= index < count for index in indices):
        raise GrantRefused(Refusal.OUT_OF_RANGE, f"it has {count} segments", peer=body.owner.agent_id)
    return [body.segments[index] for index in indices]
