"""What can go wrong with a transfer.

    TransferError
      GrantRefused        the owner does not honour the grant; ``reason`` says why (`Refusal`)
      PeerUnreachable     no connection to the owner
      PeerLost            the connection ended in the middle
      TransferTimeout     the deadline passed
      ChecksumMismatch    what arrived is not what the owner has
      BackendFailed       one backend could not do it; another may
      LimitReached        a limit of this side (``own``) or of the peer

Whatever is raised, the destinations hold garbage and must not be used: only a `read` that returns has brought whole blocks.
"""

from enum import StrEnum


class Refusal(StrEnum):
    FORGED = "forged"
    STALE = "stale"
    EXPIRED = "expired"
    RELEASED = "released"
    OUT_OF_RANGE = "out_of_range"
    WRONG_PEER = "wrong_peer"
    WRONG_ACCESS = "wrong_access"
    WRONG_LAYOUT = "wrong_layout"


class TransferError(Exception):
    """Root of this package's errors. ``retryable``: the same call may succeed later. ``peer``: who is at the other end."""

    code = "transfer_error"
    retryable = False

    def __init__(self, detail: str, *, peer: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.peer = peer


class GrantRefused(TransferError):
    code = "grant_refused"

    def __init__(self, reason: Refusal, detail: str = "", *, peer: str = "") -> None:
        super().__init__(detail, peer=peer)
        self.reason = reason

    def __str__(self) -> str:
        return f"the grant is refused ({self.reason}){': ' if self.detail else ''}{self.detail}"


class PeerUnreachable(TransferError):
    code = "peer_unreachable"
    retryable = True


class PeerLost(TransferError):
    code = "peer_lost"
    retryable = True


class TransferTimeout(TransferError):
    code = "transfer_timeout"
    retryable = True


class ChecksumMismatch(TransferError):
    code = "checksum_mismatch"
    retryable = True


class BackendFailed(TransferError):
    code = "backend_failed"
    retryable = True


class LimitReached(TransferError):
    """``own``: it is a limit of this side, and says nothing about the peer."""

    code = "limit_reached"
    retryable = True

    def __init__(self, detail: str, *, own: bool, peer: str = "") -> None:
        super().__init__(detail, peer=peer)
        self.own = own
