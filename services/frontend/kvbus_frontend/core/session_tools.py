"""The tools of sessions, for requests that leave theirs out although the prompt to reuse begins with them.

Codex condenses a history with the same input and no tools. Templates write tools at the top, so without them nothing of what the
session has computed would count. A frontend that does not know the session renders the request as it is.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

ENTRY_BYTES = 400
"""Of an entry beside its texts: the key, the slots, the objects around them."""


class SessionKey(msgspec.Struct, frozen=True):
    """``tenant``: the salt that keeps tenants apart; ``model``: by the name that the session uses."""

    tenant: str
    model: str
    session: str

    @property
    def size_bytes(self) -> int:
        """At most: a character takes up to four bytes, and a client may name a model as it likes."""
        return 4 * (len(self.tenant) + len(self.model) + len(self.session))


class SessionTools:
    """The newest tools per session, as their client sent them. Bounded in bytes: what was used least recently goes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[SessionKey, bytes] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, key: SessionKey, tools: Sequence[dict[str, Any]]) -> None:
        """Without effect for tools that do not fit at all."""
        if (before := self._kept.pop(key, None)) is not None:
            self.size_bytes -= _size(key, before)
        packed = msgspec.json.encode(tools)
        if _size(key, packed) > self._limit_bytes:
            return
        self._kept[key] = packed
        self.size_bytes += _size(key, packed)
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= _size(*self._kept.popitem(last=False))

    def find(self, key: SessionKey) -> list[dict[str, Any]] | None:
        packed = self._kept.get(key)
        if packed is None:
            return None
        self._kept.move_to_end(key)
        return msgspec.json.decode(packed, type=list[dict[str, Any]])

    def check_integrity(self) -> None:
        """For tests. Raise AssertionError."""
        assert self.size_bytes == sum(_size(key, packed) for key, packed in self._kept.items())  # noqa: S101
        assert self.size_bytes <= self._limit_bytes  # noqa: S101


def _size(key: SessionKey, packed: bytes) -> int:
    return ENTRY_BYTES + key.size_bytes + len(packed)
