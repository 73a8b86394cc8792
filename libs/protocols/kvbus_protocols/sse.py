"""Server-sent events as the OpenAI APIs use them: ``data:`` lines with JSON, and the sentinel at the end."""

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(data: msgspec.Struct) -> bytes:
    """One event with its blank line, to be sent in one write: some readers reset at every read."""
    return b"data: " + _encoder.encode(data) + b"\n\n"
