"""A response as it is kept: with all items before it, so that it needs no other one to be continued."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvbus_frontend.core.response_ids import input_item_id
from kvbus_protocols.errors import ApiError, InvalidRequest
from kvbus_protocols.responses.response import ENDED, ItemList

Item = dict[str, Any]

DEFAULT_PAGE = 20
MAX_PAGE = 100
COMPRESSION = 1
"""Histories are repetitive, and a response waits while it is packed."""


class NotAResponse(Exception):
    """Bytes that are no stored response."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """``response``: the object as it was sent. ``input``: the items of its request; ``earlier``: those before, oldest first.

    ``owner``: the frontend that runs it in the background (its instance id and incarnation); ``streamed``: its events are kept.
    """

    response: dict[str, Any]
    input: list[Item]
    earlier: list[Item] = []
    owner: str = ""
    incarnation: int = 0
    streamed: bool = False

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def is_ended(self) -> bool:
        return self.response["status"] in ENDED

    @property
    def history(self) -> list[Item]:
        """What the next response begins with. A call that was cut off was never made."""
        output = [item for item in self.response["output"] if not _is_cut_call(item)]
        return [*self.earlier, *self.input, *output]

    def item(self, item_id: str) -> Item | None:
        return next((item for item in self.history if item.get("id") == item_id), None)

    def ended_as(self, status: str, error: Mapping[str, str] | None = None) -> "StoredResponse":
        """Told by somebody else than its owner."""
        return msgspec.structs.replace(self, response={**self.response, "status": status, "error": error})


def _is_cut_call(item: Item) -> bool:
    return str(item["type"]).endswith("_call") and item.get("status") == "incomplete"


def pack(stored: StoredResponse) -> bytes:
    return zlib.compress(msgspec.json.encode(stored), COMPRESSION)


def unpack(data: bytes) -> StoredResponse:
    """Raise NotAResponse."""
    try:
        return msgspec.json.decode(zlib.decompress(data), type=StoredResponse)
    except (zlib.error, msgspec.DecodeError) as error:
        raise NotAResponse(str(error)) from error


# items


def with_ids(items: Sequence[Item], root: str) -> list[Item]:
    """Input items as they are listed later: each with an id and a type, messages with their content as parts."""
    return [_listed(item, root, i) for i, item in enumerate(items)]


def _listed(item: Item, root: str, index: int) -> Item:
    kind = item.get("type") or "message"
    listed = {**item, "type": kind, "id": item.get("id") or input_item_id(kind, root, index)}
    if kind != "message":
        return listed
    listed["status"] = item.get("status") or "completed"
    content = item.get("content")
    if isinstance(content, str):
        is_output = item.get("role") == "assistant"
        part = {"type": "output_text" if is_output else "input_text", "text": content}
        listed["content"] = [{**part, "annotations": [], "logprobs": []} if is_output else part]
    return listed


def references(items: Iterable[Item]) -> list[str]:
    """Ids of the items that stand elsewhere."""
    return [str(item["id"]) for item in items if _is_reference(item)]


def _is_reference(item: Item) -> bool:
    if item.get("type") == "item_reference":
        return bool(item.get("id"))
    return item.get("type") is None and item.get("id") is not None and not item.keys() & {"role", "content"}


def resolved(items: Sequence[Item], found: Mapping[str, Item]) -> list[Item]:
    """Raise ApiError for a reference that was not found."""
    return [_referred(item, found) if _is_reference(item) else item for item in items]


def _referred(item: Item, found: Mapping[str, Item]) -> Item:
    item_id = str(item["id"])
    if item_id not in found:
        raise ApiError(
            404,
            f"Item with id '{item_id}' not found. Items are not persisted when 'store' is set to false.",
            param="input",
            code="item_not_found",
        )
    return found[item_id]


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> ItemList:
    """``query``: ``limit``, ``order`` (desc unless asc), ``after``. Raise InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(
            f"Invalid value: '{order}'. Supported values are: 'asc' and 'desc'.", param="order", code="invalid_value"
        )
    given = query.get("limit", str(DEFAULT_PAGE))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"'limit' must be 1 to {MAX_PAGE}.", param="limit", code="invalid_value")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise InvalidRequest(f"No item with id '{query['after']}'.", param="after", code="invalid_value")
        start = ids.index(query["after"]) + 1
    page = ordered[start : start + limit]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(ordered),
    )
