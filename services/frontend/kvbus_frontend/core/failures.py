"""What went wrong inside, as the HTTP API says it."""

from kvbus_protocols.errors import TRANSIENT, ApiError, InvalidRequest
from kvbus_wire.errors import ErrorCode, ErrorReply

_STATUS = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.CANCELLED: 499,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NO_WORKERS: 503,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.GONE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
}
_PARAMS = {"mock": "kvbus.mock"}
"""Fields that have another name in the HTTP API than on the bus."""


def api_error(reply: ErrorReply) -> ApiError:
    """A typed refusal of another service."""
    status = _STATUS.get(reply.code, 500)
    param = _PARAMS.get(reply.param, reply.param) if reply.param is not None else None
    if status == 400:
        return InvalidRequest(reply.message, param=param, code=str(reply.code))
    return ApiError(
        status,
        reply.message,
        code=str(reply.code),
        param=param,
        retry_after_s=reply.retry_after_s,
        retryable=reply.retryable or status not in TRANSIENT,
    )


def internal_error(cause: BaseException) -> ApiError:
    """Nobody's doing but the server's own."""
    error = ApiError(500, "The server failed to process the request.", code="internal")
    error.__cause__ = cause
    return error


def told(failure: Exception) -> ApiError:
    """A failure as the client is told of it."""
    return failure if isinstance(failure, ApiError) else internal_error(failure)
