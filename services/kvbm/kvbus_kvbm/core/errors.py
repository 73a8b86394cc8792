"""Why kvbm refuses.

KvbmError
  InvalidRequest     the keys are no chain, the checksums do not fit the lease, an impossible block
  TooManyKeys        over the limit of one request
  TooManyLeases      over the limit of one instance; retryable
  Unsupported        another block size than the model's blocks have here
  NoRoomForPool      the budget, the pool limit or the file system has no room
  Draining           kvbm is going away
  Gone
    LeaseGone        the lease has ended, or never was
    PoolGone         no such pool: kvbm was restarted or took the pool back; attach again
    SnapshotGone     the snapshot's chunks are not kept any more; ask for a new one
StorageRefused       a lower tier cannot be used as it is set up; ends the start, no reply to anybody
"""

from kvbus_wire.errors import ErrorCode, ErrorReply


class KvbmError(Exception):
    """``reply`` is what the requester gets."""

    code = ErrorCode.INTERNAL
    retryable = False

    def __init__(self, message: str, **details: str | int | float) -> None:
        super().__init__(message)
        self.details = details

    @property
    def reply(self) -> ErrorReply:
        return ErrorReply(code=self.code, message=str(self), retryable=self.retryable, details=self.details)


class InvalidRequest(KvbmError):
    code = ErrorCode.INVALID_REQUEST


class TooManyKeys(KvbmError):
    code = ErrorCode.PAYLOAD_TOO_LARGE


class TooManyLeases(KvbmError):
    code = ErrorCode.OVERLOADED
    retryable = True


class Gone(KvbmError):
    """``what``: lease, pool or snapshot, also in the details of the reply: only a pool that is gone calls for attaching again."""

    code = ErrorCode.GONE
    what = ""

    def __init__(self, message: str) -> None:
        super().__init__(message, what=self.what)


class LeaseGone(Gone):
    what = "lease"


class PoolGone(Gone):
    what = "pool"


class Unsupported(KvbmError):
    code = ErrorCode.UNSUPPORTED


class NoRoomForPool(KvbmError):
    code = ErrorCode.OVERLOADED


class SnapshotGone(Gone):
    what = "snapshot"


class Draining(KvbmError):
    code = ErrorCode.DRAINING
    retryable = True


class StorageRefused(Exception):
    """A person has to correct it: what is wrong, with the numbers."""
