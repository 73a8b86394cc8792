"""Tool calls as models wrote them, for the requests in which they come back.

Clients parse the arguments of a call and write them anew: other spaces, other order, other numbers. In the next prompt the call
is to stand as the model wrote it, or its tokens and all that follow are new to every cache. What was written is used only for
arguments of equal value, so a client that edits a call gets its own edit.
"""

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from json import JSONDecoder
from typing import Any

import msgspec

from kvbus_frontend.core.json_object import as_object

ENTRY_BYTES = 450
"""Of a call beside its texts: the entry, two names for it and their slots."""

_DECODER = JSONDecoder()

_EXACT = 2**53
"""Beyond this, doubles do not know every whole number."""


class WrittenCall(msgspec.Struct, frozen=True):
    """``arguments``: JSON text; ``written``: the bare text per argument, for formats that have no JSON on the wire."""

    id: str
    name: str
    arguments: str
    written: Mapping[str, str] | None = None

    @property
    def size_bytes(self) -> int:
        written = self.written or {}
        texts = (self.id, self.name, self.arguments, *written.keys(), *written.values())
        return ENTRY_BYTES + sum(map(sys.getsizeof, texts))


class _Kept(msgspec.Struct):
    call: WrittenCall
    scope: str
    value: bytes
    expires: float


class WrittenCalls:
    """Bounded in bytes, in number, and in the time since a call was last asked for. Thread-safe. ``scope`` keeps tenants apart."""

    def __init__(self, *, limit_bytes: int, limit_calls: int, ttl_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._limit_calls = limit_calls
        self._ttl_s = ttl_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._latest: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, call: WrittenCall, *, scope: str = "", now: float) -> None:
        value = value_digest(call.name, call.arguments)
        key = _key(scope, plain_id(call.id), value)
        with self._lock:
            if (before := self._kept.pop(key, None)) is not None:
                self.size_bytes -= before.call.size_bytes
            self._kept[key] = _Kept(call, scope, value, now + self._ttl_s)
            self._latest[_key(scope, "", value)] = key
            self.size_bytes += call.size_bytes
            while self._kept and (
                self.size_bytes > self._limit_bytes
                or len(self._kept) > self._limit_calls
                or next(iter(self._kept.values())).expires <= now
            ):
                self._drop_oldest()

    def find(self, call_id: str, name: str, arguments: str, *, scope: str = "", now: float) -> WrittenCall | None:
        """The call with this id (letters and digits count only, clients drop the rest) and arguments of this value; else the latest
        one of this value, under the id that was asked for."""
        value = value_digest(name, arguments)
        key, any_id = _key(scope, plain_id(call_id), value), _key(scope, "", value)
        with self._lock:
            if key not in self._kept:
                key = self._latest.get(any_id, key)
            kept = self._kept.get(key)
            if kept is None or kept.expires <= now:
                return None
            kept.expires = now + self._ttl_s
            self._kept.move_to_end(key)
        same_id = plain_id(kept.call.id) == plain_id(call_id)
        return kept.call if same_id else msgspec.structs.replace(kept.call, id=call_id)

    def _drop_oldest(self) -> None:
        key, kept = self._kept.popitem(last=False)
        self.size_bytes -= kept.call.size_bytes
        latest = _key(kept.scope, "", kept.value)
        if self._latest.get(latest) == key:
            del self._latest[latest]

    def check_integrity(self) -> None:
        """For tests. Raise AssertionError."""
        assert self.size_bytes == sum(kept.call.size_bytes for kept in self._kept.values())  # noqa: S101
        assert self.size_bytes <= self._limit_bytes  # noqa: S101
        assert set(self._latest.values()) <= self._kept.keys()  # noqa: S101


def member_texts(text: str) -> dict[str, str]:
    """The text of each value in the text of a JSON object; empty for text that is none. Of values under one key, the last."""
    found: dict[str, str] = {}
    try:
        at = _skip(text, 0)
        if text[at] != "{":
            return {}
        at = _skip(text, at + 1)
        while text[at] != "}":
            key, at = _DECODER.raw_decode(text, at)
            start = _skip(text, _skip(text, at) + 1)
            _, at = _DECODER.raw_decode(text, start)
            found[key] = text[start:at]
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
    except (ValueError, IndexError, RecursionError):
        return {}
    return found


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def plain_id(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))


def value_digest(name: str, arguments: str) -> bytes:
    """Equal for calls of one function whose arguments have the same value as JSON. Text that is none has the value of the object
    that clients were given in its place."""
    try:
        value = json.dumps(_plain(_decoded(arguments or "{}")), sort_keys=True, separators=(",", ":"))
    except (msgspec.DecodeError, RecursionError):
        value = "\0" + arguments
    return _key(name, value, b"")


def _decoded(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return msgspec.json.decode(as_object(arguments))


def _plain(value: Any) -> Any:
    """Numbers in one spelling: JSON has one kind of them, and clients write 1.0 as 1, or know doubles only."""
    if isinstance(value, int) and _EXACT < abs(value) <= sys.float_info.max:
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _key(first: str, second: str, digest: bytes) -> bytes:
    texts = (first.encode(errors="surrogatepass"), second.encode(errors="surrogatepass"))
    return blake2b(b"%d:%b%b" % (len(texts[0]), b"".join(texts), digest), digest_size=16).digest()
