"""Errors, and how each API shapes them.

ApiError                    any of them; raised before the response begins it becomes the response
└── InvalidRequest          400: the request itself is wrong
    └── ContextOverflow     the prompt leaves no room for an answer

The OpenAI APIs: ``{"error": {"message", "type", "param", "code"}}`` (`openai_body`).
Anthropic's: ``{"type": "error", "error": {"type", "message"}, "request_id"}`` (`anthropic_body`).
"""

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET


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
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ANTHROPIC_WORDS = {500: "Internal server error", 503: "Overloaded", 504: "Request timed out", 529: "Overloaded"}
"""Its own words for what may be tried again: in mid-stream there is no status, and OpenClaw goes by the words, not by the type."""

_OPENAI_WORDS = {500: "Internal server error", 503: "Service unavailable", 504: "Request timed out"}
"""Likewise: pi and OpenClaw try a Chat stream again by these words."""

TRANSIENT = (429, 503, 529)
RETRY_AFTER_S = 1.0
"""Of these where nobody knows better: they always say when, since without it Codex gives up at once on a 429."""

NOT_AGAIN = {"x-should-retry": "false"}
MAX_MESSAGE_CHARS = 1000


class ApiError(Exception):
    """``status``: of the HTTP response; ``code``: stable; ``param``: the field at fault; ``retry_after_s``: not before that;
    ``headers``: more of them for the response. ``retryable``: False where the same again cannot succeed though the status says
    that it may; the SDKs of OpenAI and Anthropic go by the header for that."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        error_type: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        retryable: bool = True,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:  # it may quote the request
            message = message[:MAX_MESSAGE_CHARS] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.error_type = error_type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        unsaid = retry_after_s is None and status in TRANSIENT and retryable
        self.retry_after_s = RETRY_AFTER_S if unsaid else retry_after_s
        self._headers = {**({} if retryable else NOT_AGAIN), **(headers or {})}

    @property
    def headers(self) -> Mapping[str, str]:
        headers = dict(self._headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, -int(-self.retry_after_s // 1)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    @property
    def body(self) -> ErrorBody:
        return openai_body(self)


class InvalidRequest(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class ContextOverflow(InvalidRequest):
    """In the words that OpenAI uses, which clients look for. ``completion_tokens``: what the request needs at least."""

    def __init__(self, *, limit: int, prompt_tokens: int, completion_tokens: int, param: str) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + completion_tokens} tokens ({prompt_tokens} in the messages, {completion_tokens} in the completion). "
            "Please reduce the length of the messages or completion.",
            param=param,
            code="context_length_exceeded",
        )
        self.limit = limit
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model `{model}` does not exist.", code="model_not_found", param="model")


def context_length_exceeded(*, limit: int, prompt_tokens: int, completion_tokens: int, param: str) -> ContextOverflow:
    return ContextOverflow(limit=limit, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, param=param)


def openai_body(error: ApiError) -> ErrorBody:
    words = _OPENAI_WORDS.get(error.status)
    message = f"{words}: {error.message}" if words else error.message
    return ErrorBody(ErrorDetail(message, error.error_type, error.param, error.code))


def anthropic_body(error: ApiError, request_id: str | None = None) -> AnthropicErrorBody:
    """Of what the client did, ``invalid_request_error`` unless the API has a type of its own for it; else ``api_error``."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if 400 <= error.status < 499 else "api_error")
    return AnthropicErrorBody(AnthropicErrorDetail(kind, _anthropic_message(error)), request_id or UNSET)


def anthropic_status(error: ApiError) -> int:
    """That API has a status of its own for a server that has too much to do."""
    return 529 if error.status == 503 and error.code == "overloaded" else error.status


def _anthropic_message(error: ApiError) -> str:
    """This API has no ``param``, so the words name the field. Claude Code reads both numbers of an overflow and compacts."""
    if isinstance(error, ContextOverflow):
        found = max(error.prompt_tokens, error.limit + 1)  # a prompt that just fits leaves no room for an answer
        return f"prompt is too long: {found} tokens > {error.limit} maximum"
    if words := _ANTHROPIC_WORDS.get(error.status):
        return f"{words}: {error.message}"
    if error.param and error.param not in error.message:
        return f"{error.param}: {error.message}"
    return error.message
