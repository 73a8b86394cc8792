"""Why kvbm refuses.

KvbmError
  InvalidRequest    the keys are no chain, the checksums do not fit the lease, an impossible block
  TooManyKeys       over the limit of one request
  TooManyLeases     over the limit of one instance; retryable
  LeaseGone         the lease has ended, or never was
  PoolGone          no such pool: kvbm was restarted or took the pool back; attach again
  NoRoomForPool     the budget, the pool limit or the file system has no room
  Draining          kvbm is going away
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


class LeaseGone(KvbmError):
    code = ErrorCode.GONE


class PoolGone(KvbmError):
    code = ErrorCode.GONE


class Unsupported(KvbmError):
    code = ErrorCode.UNSUPPORTED


class NoRoomForPool(KvbmError):
    code = ErrorCode.OVERLOADED


class SnapshotGone(KvbmError):
    code = ErrorCode.GONE


class Draining(KvbmError):
    code = ErrorCode.DRAINING
    retryable = True
