"""Ids of responses and of their items: an item's id tells the response it belongs to, so that a reference to it can be followed."""

import re
import secrets

_RESPONSE = re.compile(r"resp_[0-9a-f]{48}\Z")
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{48})i?[0-9a-f]{4,}\Z")

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "compaction": "cmp",
}


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(24)}"


def is_response_id(text: str) -> bool:
    """Whether it can be one of ours."""
    return _RESPONSE.match(text) is not None


def id_root(response_id: str) -> str:
    """What the ids of a response's items have in common."""
    return response_id.partition("_")[2]


def input_item_id(kind: str, root: str, index: int) -> str:
    """Of an item that came without one. Output items have no ``i``."""
    return f"{_PREFIXES.get(kind, 'item')}_{root}i{index:04x}"


def response_of(item_id: str) -> str | None:
    """The response that an item belongs to; None: it is not one of ours."""
    found = _ITEM.match(item_id)
    return f"resp_{found[1]}" if found is not None else None
