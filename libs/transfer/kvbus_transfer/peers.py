"""The reader's side of a peer: its connections, what was opened there, and what may be under way."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b

from kvbus_transfer.budget import ByteBudget
from kvbus_transfer.errors import (
    BackendFailed,
    ChecksumMismatch,
    GrantRefused,
    LimitReached,
    PeerLost,
    PeerUnreachable,
    Refusal,
    TransferError,
    TransferTimeout,
)
from kvbus_transfer.grants import AgentInfo
from kvbus_transfer.handshake import greet
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.messages import Open, Opened, Refused, Request, Spoken
from kvbus_transfer.stream import Stream

_OPENED_KEPT = 1024
_DIGEST_BYTES = 32
_DIGESTS_KEPT = 8
"""A grant of many blocks takes longer to digest (150 us for 16,384) than a block to read."""


class Peer:
    """One incarnation of another agent."""

    def __init__(
        self,
        info: AgentInfo,
        limits: TransferLimits,
        *,
        me: tuple[str, int],
        secret: bytes,
        tls: ssl.SSLContext | None,
        on_gone: "Callable[[Peer], None]" = lambda _: None,
    ) -> None:
        self.info = info
        self.is_gone = False
        """It has closed a connection, which no owner does that is well, or cannot be reached."""
        self._on_gone = on_gone
        self.budget = ByteBudget(limits.peer_bytes)
        self.resting: dict[str, float] = {}
        self.users = 0
        self._limits = limits
        self._me = me
        self._secret = secret
        self._tls = tls
        self._idle: list[Stream] = []
        self._opened: dict[tuple[bytes, str], Opened] = {}
        self._digests: dict[bytes, bytes] = {}

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Stream]:
        """A connection for one exchange. It is kept when the block ends well, closed when it does not."""
        stream = self._take_idle() or await self._connect()
        try:
            yield stream
        except BaseException:
            stream.close()
            raise
        if stream.is_open and len(self._idle) < self._limits.connections:
            self._idle.append(stream)
        else:
            stream.close()

    async def ask(self, request: Request) -> Spoken:
        """One request, one answer. Raise TransferError: what the peer refused, and what else went wrong."""
        for attempt in (1, 2):
            refused: TransferError | None = None
            reused = bool(self._idle)
            try:
                async with self.connection() as stream:
                    await stream.say(request)
                    answer = await stream.receive()
                    if isinstance(answer, Refused):
                        refused = self.error_of(answer)
            except PeerLost as lost:
                # A kept connection may have ended while nobody looked.
                if not reused or attempt == 2:
                    lost.peer = self.info.agent_id
                    raise
                self.drop_idle()
                continue
            if refused is not None:
                raise refused
            return answer
        raise AssertionError("unreachable")

    async def opened(self, grant: bytes, backend: str, payload: bytes = b"") -> Opened:
        """What this backend needs to read with the grant. Asked once: a grant of a lease that runs stays good."""
        key = (self._digest(grant), backend)
        known = self._opened.get(key)
        if known is None:
            answer = await self.ask(Open(grant=grant, backend=backend, payload=payload))
            if not isinstance(answer, Opened):
                raise PeerLost("an answer to another question", peer=self.info.agent_id)
            while len(self._opened) >= _OPENED_KEPT:
                del self._opened[next(iter(self._opened))]
            self._opened[key] = known = answer
        return known

    def _digest(self, grant: bytes) -> bytes:
        known = self._digests.get(grant)
        if known is None:
            while len(self._digests) >= _DIGESTS_KEPT:
                del self._digests[next(iter(self._digests))]
            self._digests[grant] = known = blake2b(grant, digest_size=_DIGEST_BYTES).digest()
        return known

    def forget_opened(self) -> None:
        self._opened.clear()

    def error_of(self, refused: Refused) -> TransferError:
        peer = self.info.agent_id
        if refused.code == GrantRefused.code:
            known = refused.reason in set(Refusal)
            return GrantRefused(Refusal(refused.reason) if known else Refusal.STALE, refused.detail, peer=peer)
        if refused.code == LimitReached.code:
            return LimitReached(refused.detail, own=False, peer=peer)
        kinds = (TransferTimeout, ChecksumMismatch, BackendFailed, PeerLost)
        kind = next((each for each in kinds if each.code == refused.code), BackendFailed)
        return kind(refused.detail, peer=peer)

    def drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        self.drop_idle()

    def _take_idle(self) -> Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if stream.is_open:
                return stream
        return None

    async def _connect(self) -> Stream:
        info, loop = self.info, asyncio.get_running_loop()
        if info.tls and self._tls is None:
            raise PeerUnreachable("it wants TLS, and this agent has none", peer=info.agent_id)
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._limits.hello_s):
                _, stream = await loop.create_connection(
                    lambda: Stream(lambda _: None), info.host, info.port, ssl=self._tls if info.tls else None
                )
                await greet(stream, *self._me, self._secret, owner_id=info.agent_id, owner_incarnation=info.incarnation)
        except (OSError, PeerLost) as error:  # TimeoutError is an OSError, and so are those of TLS
            if stream is not None:
                stream.close()
            self.is_gone = True
            where = f"{info.host}:{info.port}"
            raise PeerUnreachable(f"{where}: {error or 'no answer'}", peer=info.agent_id) from error
        except BaseException:
            if stream is not None:
                stream.close()
            raise
        connected = stream
        connected.closed.add_done_callback(lambda _: self._ended(connected))
        return connected

    def _ended(self, stream: Stream) -> None:
        if not stream.closed_here:
            self.is_gone = True
            self._on_gone(self)
