"""What can go wrong at the seam to the bus.

RuntimeFailure
|-- RequestFailed     a request was answered by an ErrorReply, or was not answered at all
|-- PayloadTooLarge   the message does not fit into the server's max_payload; nothing was sent
|-- BusUnreachable    there was no connection in time
|-- UnsupportedServer the NATS server is too old or lacks what kvbus needs
|-- Superseded        another process has registered under the same instance id
`-- ObjectFailed      an object is missing, too large, or not what its name says
"""

from kvbus_wire.errors import ErrorCode, ErrorReply


class RuntimeFailure(Exception):
    """Root of the errors of this package."""


class RequestFailed(RuntimeFailure):
    """``reply`` says why; raised by requesters, and by handlers as a typed refusal."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(f"{reply.code}: {reply.message}")
        self.reply = reply

    @classmethod
    def of(
        cls,
        code: ErrorCode,
        message: str,
        *,
        retryable: bool = False,
        retry_after_s: float | None = None,
        param: str | None = None,
        **details: str | int | float,
    ) -> "RequestFailed":
        return cls(
            ErrorReply(
                code=code,
                message=message,
                retryable=retryable,
                retry_after_s=retry_after_s,
                param=param,
                details=details,
            )
        )

    @property
    def code(self) -> ErrorCode:
        return self.reply.code

    @property
    def retryable(self) -> bool:
        return self.reply.retryable


class PayloadTooLarge(RuntimeFailure):
    """``size`` bytes are more than the ``limit`` of one message on this bus."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes for {subject} is above the bus limit of {limit} bytes")
        self.subject = subject
        self.size = size
        self.limit = limit


class UnsupportedServer(RuntimeFailure):
    """The text names what is missing and what to do."""


class BusUnreachable(RuntimeFailure, TimeoutError):
    """The text says at which address, and why as far as that is known. ``refused``: there is a server, and it does not take these
    credentials."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Superseded(RuntimeFailure):
    """A newer incarnation holds this instance id; this process must not go on under it."""

    def __init__(self, instance_id: str, incarnation: int, newer: int) -> None:
        super().__init__(f"instance {instance_id} (incarnation {incarnation}) was superseded by incarnation {newer}")
        self.instance_id = instance_id


class ObjectFailed(RuntimeFailure):
    """``reason``: missing, too_large or corrupt."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"object {name}: {reason}")
        self.name = name
        self.reason = reason
