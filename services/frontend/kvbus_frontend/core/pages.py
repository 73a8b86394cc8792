"""Lists in pages, by the ids of their items."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from kvbus_protocols.errors import InvalidRequest

T = TypeVar("T")

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


class Page(msgspec.Struct, Generic[T], frozen=True):
    """``has_more``: further items in the direction in which the pages are read."""

    items: Sequence[T]
    has_more: bool


def page_of(items: Sequence[T], item_id: Callable[[T], str], query: Mapping[str, str]) -> Page[T]:
    """``query``: ``limit``, and ``after_id`` or ``before_id``. Raise InvalidRequest."""
    limit = _limit(query.get("limit"))
    ids = [item_id(item) for item in items]
    if "before_id" in query:
        end = _position(ids, query["before_id"], "before_id")
        start = max(0, end - limit)
        return Page(items[start:end], start > 0)
    start = _position(ids, query["after_id"], "after_id") + 1 if "after_id" in query else 0
    return Page(items[start : start + limit], start + limit < len(items))


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:6]) <= MAX_LIMIT:
        raise InvalidRequest(f"limit: Input should be 1 to {MAX_LIMIT}", param="limit")
    return int(given)


def _position(ids: Sequence[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise InvalidRequest(f"{param}: there is no item with this id", param=param)
    return ids.index(wanted)
