"""Strings of the Messages API that clients keep for us and send back: signatures of thoughts and ids of tool calls.

Both hold all that is needed to read them again, so any replica can, and none has to remember anything. Neither is a proof of
origin: a client may write what it likes into its own history anyway.
"""

import base64
import binascii
import re
import secrets
import zlib

MAX_THOUGHT_BYTES = 1 << 22
"""A signature that unpacks to more than this is not ours."""

_MARK = b"kvbus1"
_CALL_ID = re.compile(r"toolu_?[0-9a-f]{16}_?([A-Za-z0-9_-]+)\Z")
"""Some clients drop all but letters and digits of an id."""


def sign_thought(thought: str) -> str:
    """A signature that holds the thought: some clients send back nothing else of it."""
    data = thought.encode(errors="replace")[:MAX_THOUGHT_BYTES]
    return _encode(_MARK + zlib.compress(data))


def signed_thought(signature: str | None) -> str | None:
    """The thought in a signature of ours; None for any other string."""
    data = _decode(signature or "")
    if not data.startswith(_MARK):
        return None
    try:
        thought = zlib.decompressobj().decompress(data[len(_MARK) :], MAX_THOUGHT_BYTES)
        return thought.decode(errors="ignore")  # it may have been cut within a character
    except zlib.error:
        return None


def tool_use_id(call_id: str) -> str:
    """An id in this API's form, unique beyond the answer that it is in, which holds the model's own id."""
    if call_id.startswith("toolu_"):
        return call_id
    return f"toolu_{secrets.token_hex(8)}_{_encode(call_id.encode(errors='replace'))}"


def call_id_of(tool_use_id: str) -> str:
    """The model's own id; an id that is not ours is the model's own."""
    match = _CALL_ID.match(tool_use_id)
    if match is None:
        return tool_use_id
    try:
        return _decode(match[1]).decode() or tool_use_id
    except UnicodeDecodeError:
        return tool_use_id


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    """Empty when it is no such text."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
