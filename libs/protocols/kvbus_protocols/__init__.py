"""Types of the HTTP APIs, standalone: requests with their checks, responses, stream chunks, error bodies, request extensions."""

from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import ApiError, ErrorBody, InvalidRequest, context_length_exceeded, model_not_found

__all__ = [
    "ApiError",
    "ErrorBody",
    "InvalidRequest",
    "RequestDecoder",
    "context_length_exceeded",
    "model_not_found",
]
