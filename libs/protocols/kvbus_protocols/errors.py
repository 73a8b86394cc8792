"""Errors as the OpenAI APIs shape them: ``{"error": {"message", "type", "param", "code"}}`` and a status.

ApiError                    any of them; raised before the response begins it becomes the response
└── InvalidRequest          400: the request itself is wrong
"""

from collections.abc import Mapping

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


MAX_MESSAGE_CHARS = 1000


class ApiError(Exception):
    """``status``: of the HTTP response; ``code``: stable; ``param``: the field at fault; ``retry_after_s``: not before that."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        error_type: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:  # it may quote the request
            message = message[:MAX_MESSAGE_CHARS] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.error_type = error_type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, -int(-self.retry_after_s // 1)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(self.message, self.error_type, self.param, self.code))


class InvalidRequest(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model `{model}` does not exist.", code="model_not_found", param="model")


def context_length_exceeded(*, limit: int, prompt_tokens: int, completion_tokens: int, param: str) -> InvalidRequest:
    """In the words OpenAI uses, which clients look for. ``completion_tokens``: what the request needs at least."""
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + completion_tokens} tokens "
        f"({prompt_tokens} in the messages, {completion_tokens} in the completion). "
        "Please reduce the length of the messages or completion.",
        param=param,
        code="context_length_exceeded",
    )
