"""The one error reply of every request/reply subject."""

from enum import StrEnum

from kvbus_wire.message import Message


class ErrorCode(StrEnum):
    """Stable codes; what HTTP status and error body they become is the frontend's business."""

    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED = "unsupported"
    NO_WORKERS = "no_workers"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limit_exceeded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"
    GONE = "gone"
    INTERNAL = "internal"


class ErrorReply(Message, frozen=True, tag="error"):
    """``retryable``: the same request may succeed elsewhere or later; ``retry_after_s``: not before that."""

    code: ErrorCode
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    param: str | None = None
    details: dict[str, str | int | float] = {}
