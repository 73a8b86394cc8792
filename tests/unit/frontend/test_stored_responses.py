"""Responses as they are kept, and the ids of their items."""

from typing import Any

import pytest

from kvbus_frontend.core.compaction import KEPT_USER_CHARS, kept_items
from kvbus_frontend.core.response_ids import id_root, is_response_id, new_response_id, response_of
from kvbus_frontend.core.stored_responses import (
    NotAResponse,
    StoredResponse,
    pack,
    references,
    resolved,
    unpack,
    with_ids,
)
from kvbus_protocols.errors import ApiError

ROOT = "0" * 48


def stored(**fields: Any) -> StoredResponse:
    response = {"id": f"resp_{ROOT}", "status": "completed", "output": [], **fields.pop("response", {})}
    return StoredResponse(response=response, input=[], **fields)


def test_packing_loses_nothing() -> None:
    one = stored(earlier=[{"id": "a", "text": "ü\ud7ff", "number": 1.5, "nothing": None}], owner="f", incarnation=3)
    assert unpack(pack(one)) == one


@pytest.mark.parametrize("data", [b"", b"x", pack(stored())[:-3], b"x\x9cK\xcb\xcf\x07\x00\x02\x82\x01E"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(NotAResponse):
        unpack(data)


def test_calls_that_were_cut_off_are_no_part_of_the_history() -> None:
    output = [
        {"id": "1", "type": "function_call", "status": "completed"},
        {"id": "2", "type": "message", "status": "incomplete"},
        {"id": "3", "type": "custom_tool_call", "status": "incomplete"},
    ]
    assert [item["id"] for item in stored(response={"output": output}).history] == ["1", "2"]


def test_items_get_the_ids_types_and_content_that_lists_have() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{ }", "id": "fc_mine"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": None},
        {"type": "something_new"},
    ]
    listed = with_ids(items, ROOT)
    assert [item["id"] for item in listed] == [
        f"msg_{ROOT}i0000", f"msg_{ROOT}i0001", "fc_mine", f"fco_{ROOT}i0003", f"item_{ROOT}i0004",
    ]  # fmt: skip
    assert listed[0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert listed[1]["content"] == [{"type": "output_text", "text": "ho", "annotations": [], "logprobs": []}]
    assert listed[2] == items[2]
    assert with_ids(listed, "other") == listed


def test_an_item_s_id_tells_its_response() -> None:
    response_id = new_response_id()
    assert is_response_id(response_id)
    assert response_of(f"msg_{id_root(response_id)}0003") == response_id
    assert response_of(f"fco_{id_root(response_id)}i0003") == response_id
    assert [response_of(text) for text in ("msg_1", "", f"msg_{ROOT}", f"msg_{ROOT}zzzz")] == [None] * 4
    assert not is_response_id("resp_*")
    assert not is_response_id(response_id + "0")


def test_references_are_followed_or_refused() -> None:
    items = [{"type": "item_reference", "id": "a"}, {"id": "b"}, {"role": "user", "content": "x", "id": "c"}]
    assert references(items) == ["a", "b"]
    found = {"a": {"id": "a", "type": "message"}, "b": {"id": "b", "type": "reasoning"}}
    assert [item["id"] for item in resolved(items, found)] == ["a", "b", "c"]
    with pytest.raises(ApiError, match="'b' not found"):
        resolved(items, {"a": found["a"]})


def test_compaction_keeps_what_the_user_and_the_developer_wrote_the_newest_first() -> None:
    long = "x" * (KEPT_USER_CHARS - 100)
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": "rules " + long},
        {"type": "message", "role": "user", "content": "too old"},
        {"type": "message", "role": "user", "content": long},
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "reasoning", "summary": []},
        {"type": "additional_tools", "tools": []},
        {"type": "message", "role": "user", "content": "new " + "y" * 100},
    ]
    assert kept_items(items) == [items[0], items[5], items[6]]
