"""Messages above the bus's payload limit travel in numbered parts to a subject with one server. Pure.

Every part is acknowledged, so the sender stops when nobody assembles; the last part is answered with the reply itself.
"""

from collections.abc import Mapping

import msgspec

HEADER_ID = "Kvbus-Parts-Id"
HEADER_PART = "Kvbus-Part"
HEADER_BYTES = "Kvbus-Parts-Bytes"


class PartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``message_bytes``: one assembled message; ``total_bytes``: all that are being assembled; ``age_s``: since the last part."""

    message_bytes: int = 64 << 20
    total_bytes: int = 256 << 20
    assemblies: int = 64
    age_s: float = 30.0


class PartsRefused(Exception):
    """``reason``: too_large, too_many, or broken (parts that do not fit together, or came too late)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def split(data: bytes, part_bytes: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[i : i + part_bytes] for i in range(0, len(data), part_bytes)]


def part_headers(parts_id: str, index: int, count: int, total: int) -> dict[str, str]:
    return {HEADER_ID: parts_id, HEADER_PART: f"{index}/{count}", HEADER_BYTES: str(total)}


def is_part(headers: Mapping[str, str]) -> bool:
    return HEADER_ID in headers


class _Assembly(msgspec.Struct):
    total: int
    count: int
    parts: list[bytes | None]
    received: int
    last_at: float


class Assembler:
    """Collects parts, in any order and with duplicates, within limits. The clock is passed in with each call."""

    def __init__(self, limits: PartLimits) -> None:
        self._limits = limits
        self._open: dict[str, _Assembly] = {}
        self._reserved = 0

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def reserved_bytes(self) -> int:
        return self._reserved

    def add(self, headers: Mapping[str, str], data: bytes, now: float) -> bytes | None:
        """The whole message once its last part is there, else None. Raise PartsRefused; the assembly is then forgotten."""
        parts_id = headers[HEADER_ID]
        try:
            index, count = (int(text) for text in headers[HEADER_PART].split("/"))
            total = int(headers[HEADER_BYTES])
        except (KeyError, ValueError):
            raise PartsRefused("broken", "malformed part headers") from None
        if not (0 <= index < count and total > 0 and count <= total):
            raise PartsRefused("broken", f"part {index} of {count} with {total} bytes in all")
        self.expire(now)
        assembly = self._open.get(parts_id) or self._begin(parts_id, count, total, now)
        try:
            return self._put(parts_id, assembly, index, count, total, data, now)
        except PartsRefused:
            self._forget(parts_id)
            raise

    def _begin(self, parts_id: str, count: int, total: int, now: float) -> _Assembly:
        if total > self._limits.message_bytes:
            raise PartsRefused("too_large", f"{total} bytes are above the limit of {self._limits.message_bytes}")
        full = len(self._open) >= self._limits.assemblies or self._reserved + total > self._limits.total_bytes
        if full:
            raise PartsRefused(
                "too_many", f"{len(self._open)} messages with {self._reserved} bytes are being assembled"
            )
        assembly = _Assembly(total, count, [None] * count, 0, now)
        self._open[parts_id] = assembly
        self._reserved += total
        return assembly

    def _put(
        self, parts_id: str, assembly: _Assembly, index: int, count: int, total: int, data: bytes, now: float
    ) -> bytes | None:
        if (count, total) != (assembly.count, assembly.total):
            raise PartsRefused("broken", "parts disagree about the whole")
        assembly.last_at = now
        if assembly.parts[index] is None:
            assembly.parts[index] = data
            assembly.received += len(data)
        if assembly.received > total:
            raise PartsRefused("broken", f"{assembly.received} bytes came where {total} were announced")
        whole = [part for part in assembly.parts if part is not None]
        if len(whole) < count:
            return None
        if assembly.received != total:
            raise PartsRefused("broken", f"{assembly.received} bytes came where {total} were announced")
        self._forget(parts_id)
        return b"".join(whole)

    def _forget(self, parts_id: str) -> None:
        assembly = self._open.pop(parts_id, None)
        if assembly is not None:
            self._reserved -= assembly.total

    def expire(self, now: float) -> int:
        """Forget what has got no part for too long; how many that were."""
        old = [key for key, assembly in self._open.items() if now - assembly.last_at > self._limits.age_s]
        for key in old:
            self._forget(key)
        return len(old)

    def check_integrity(self) -> None:
        assert self._reserved == sum(a.total for a in self._open.values())  # noqa: S101
        for assembly in self._open.values():
            assert assembly.received == sum(len(p) for p in assembly.parts if p is not None)  # noqa: S101
