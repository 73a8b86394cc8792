"""Types of the HTTP APIs, standalone: requests with their checks, responses, stream chunks, error bodies, request extensions."""

from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import (
    ApiError,
    ContextOverflow,
    ErrorBody,
    InvalidRequest,
    anthropic_body,
    anthropic_status,
    context_length_exceeded,
    model_not_found,
    openai_body,
)

__all__ = [
    "ApiError",
    "ContextOverflow",
    "ErrorBody",
    "InvalidRequest",
    "RequestDecoder",
    "anthropic_body",
    "anthropic_status",
    "context_length_exceeded",
    "model_not_found",
    "openai_body",
]
