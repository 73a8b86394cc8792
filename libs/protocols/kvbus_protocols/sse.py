"""Server-sent events as bytes: ``data:`` lines with JSON, a name where an API has one, and the sentinel of the OpenAI APIs."""

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(data: msgspec.Struct | str | list[int], name: str | None = None) -> bytes:
    """One event with its blank line, to be sent in one write: some readers reset at every read. ``name``: its ``event:`` line."""
    line = b"data: " + _encoder.encode(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line
