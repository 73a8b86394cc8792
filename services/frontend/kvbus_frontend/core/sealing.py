"""State that clients carry for us: thoughts, and summaries of conversations.

A sealed text is compressed and signed, so that it comes back exactly as it went out or not at all, and any frontend that has the
key can open it. It is integrity, not secrecy: whoever has the text can read it, and it was theirs to begin with.
"""

import base64
import binascii
import hashlib
import hmac
import zlib

PREFIX = "kvbus1."
MAC_BYTES = 16
MAX_TEXT_BYTES = 64 << 20


class Sealer:
    """``key``: the same for all frontends of a cluster. A text sealed for one purpose does not open for another."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(key).digest()

    def seal(self, purpose: str, text: str) -> str:
        data = zlib.compress(text.encode())
        return PREFIX + base64.urlsafe_b64encode(self._mac(purpose, data) + data).decode()

    def open(self, purpose: str, sealed: str) -> str | None:
        """None for anything that was not sealed with this key for this purpose."""
        if not sealed.startswith(PREFIX) or not sealed.isascii():
            return None
        try:
            blob = base64.b64decode(sealed[len(PREFIX) :], altchars=b"-_", validate=True)
        except binascii.Error:
            return None
        mac, data = blob[:MAC_BYTES], blob[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(purpose, data)):
            return None
        return zlib.decompressobj().decompress(data, MAX_TEXT_BYTES).decode(errors="replace")

    def _mac(self, purpose: str, data: bytes) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + data, "sha256")[:MAC_BYTES]
