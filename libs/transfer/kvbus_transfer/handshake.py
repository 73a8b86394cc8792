"""Who is at the other end: both sides prove that they know the secret of the cluster, without sending it.

Without a secret any name is believed; what protects blocks then is that nobody can make a grant but its owner.
"""

import hmac
import secrets
from hashlib import blake2b

from kvbus_transfer.errors import PeerUnreachable
from kvbus_transfer.messages import Challenge, Hello, Refused, Welcome
from kvbus_transfer.stream import Stream

_NONCE_BYTES = 16


def _proof(secret: bytes, role: bytes, challenge: Challenge, agent_id: str, incarnation: int, nonce: bytes) -> bytes:
    digest = blake2b(digest_size=32, key=blake2b(secret, digest_size=32).digest(), person=b"kvbus.hello.v1")
    for part in (
        role,
        challenge.nonce,
        nonce,
        challenge.agent_id.encode(),
        str(challenge.incarnation).encode(),
        agent_id.encode(),
        str(incarnation).encode(),
    ):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


async def welcome(stream: Stream, agent_id: str, incarnation: int, secret: bytes) -> str | None:
    """The listener's side. The name of the peer, or None when it does not know the secret. Raise PeerLost."""
    challenge = Challenge(agent_id=agent_id, incarnation=incarnation, nonce=secrets.token_bytes(_NONCE_BYTES))
    await stream.say(challenge)
    hello = await stream.receive()
    if not isinstance(hello, Hello):
        return None
    said = (challenge, hello.agent_id, hello.incarnation, hello.nonce)
    if not hmac.compare_digest(hello.proof, _proof(secret, b"reader", *said)):
        await stream.say(Refused(code="unknown_peer", detail="the secrets differ"))
        return None
    await stream.say(Welcome(proof=_proof(secret, b"owner", *said)))
    return hello.agent_id


async def greet(
    stream: Stream, agent_id: str, incarnation: int, secret: bytes, *, owner_id: str, owner_incarnation: int
) -> None:
    """The connecting side. Raise PeerUnreachable when it is somebody else; PeerLost."""
    challenge = await stream.receive()
    if not isinstance(challenge, Challenge) or challenge.agent_id != owner_id:
        raise PeerUnreachable("another agent listens there", peer=owner_id)
    if challenge.incarnation != owner_incarnation:
        raise PeerUnreachable("it has been started anew since", peer=owner_id)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    said = (challenge, agent_id, incarnation, nonce)
    await stream.say(
        Hello(agent_id=agent_id, incarnation=incarnation, nonce=nonce, proof=_proof(secret, b"reader", *said))
    )
    answer = await stream.receive()
    if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof, _proof(secret, b"owner", *said)):
        raise PeerUnreachable("it does not know the same secret", peer=owner_id)
