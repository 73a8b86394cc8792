"""Limits of the tier in the cluster's store, and what is still to be deleted there."""

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec


class ClusterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``read_deadline_s``, ``write_deadline_s``: of one object. ``parallel``: objects moved at the same time. ``rest_s``: first
    rest of a store that has failed; ``failures``: so many in a row. ``flush_s``: how old a change of a lease may get before it is
    written down. ``pin_share``: of the capacity, per tenant. ``log_parts``: objects of a log before it is written anew."""

    capacity_bytes: int
    pin_share: float = 0.25
    read_deadline_s: float = 2.0
    write_deadline_s: float = 10.0
    parallel: int = 16
    rest_s: float = 1.0
    failures: int = 3
    flush_s: float = 5.0
    log_parts: int = 256


def check_store_url(url: str) -> None:
    """Raise ValueError, without saying what could be a password."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("a directory is file:///path, from the root on")
    elif parts.scheme == "s3":
        if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc or parts.query:
            raise ValueError("a bucket is s3://bucket/prefix; credentials come from AWS_* variables")
    else:
        raise ValueError("neither file:///directory nor s3://bucket/prefix")


class Removals:
    """Names that are to be deleted: neither forgotten after a failure nor tried for ever."""

    def __init__(self, attempts: int = 8) -> None:
        self._attempts = attempts
        self._left: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self._left.setdefault(name, self._attempts)

    def discard(self, name: str) -> None:
        """It was written anew."""
        self._left.pop(name, None)

    def due(self, limit: int) -> list[str]:
        """The longest waiting first."""
        return [name for name, _ in zip(self._left, range(limit), strict=False)]

    def done(self, names: Iterable[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    def failed(self, names: Iterable[str]) -> list[str]:
        """They go to the end; those are given up that were tried too often."""
        given_up = []
        for name in names:
            left = self._left.pop(name, 1) - 1
            if left:
                self._left[name] = left
            else:
                given_up.append(name)
        return given_up
