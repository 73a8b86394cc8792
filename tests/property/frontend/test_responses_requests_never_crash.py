"""Whatever JSON comes as a Responses request: it is understood, or refused as the client's doing."""

from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.compaction import kept_items
from kvbus_frontend.core.response_echo import blank_response
from kvbus_frontend.core.stored_responses import StoredResponse, pack, references, resolved, unpack, with_ids
from kvbus_protocols import ApiError, RequestDecoder
from kvbus_protocols.responses.request import ResponsesRequest
from kvbus_protocols.responses_turns import responses_conversation
from kvbus_testkit.responses import check_schema
from kvbus_tokenizers import GenerationConfig

KINDS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "tool_search_call", "tool_search_output", "additional_tools", "compaction", "item_reference", "web_search_call", "new",
)  # fmt: skip
TEXTS = st.sampled_from(["", "a", "c1", "c2", "x" * 70]) | st.text(max_size=5)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly sound ones, with some fields missing and now and then one that makes no sense."""
    return st.fixed_dictionaries({}, optional={name: mostly(field) for name, field in fields.items()})


def mostly(field: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 29).flatmap(lambda number: JUNK if number == 29 else field)


PARTS = objects(
    type=st.sampled_from(["input_text", "output_text", "input_image", "input_file", "reasoning_text", "refusal"]),
    text=TEXTS,
    image_url=TEXTS,
    file_data=TEXTS,
    filename=TEXTS,
)
CONTENT = TEXTS | st.lists(PARTS, max_size=3)
TOOLS = st.recursive(
    objects(
        type=st.sampled_from(["function", "custom", "tool_search", "web_search"]),
        name=TEXTS,
        parameters=st.just({"type": "object"}),
        execution=st.just("client"),
        format=objects(type=st.just("grammar"), syntax=st.sampled_from(["lark", "regex"]), definition=TEXTS),
    ),
    lambda inner: objects(type=st.just("namespace"), name=TEXTS, tools=st.lists(inner, max_size=2)),
    max_leaves=3,
)
ITEMS = objects(
    type=st.sampled_from(KINDS),
    id=TEXTS,
    role=st.sampled_from(["user", "assistant", "developer", "system", "robot"]),
    content=CONTENT,
    call_id=st.sampled_from(["c1", "c2"]),
    name=TEXTS,
    namespace=TEXTS,
    arguments=TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=1),
    input=TEXTS,
    output=CONTENT,
    summary=st.lists(PARTS, max_size=1),
    encrypted_content=TEXTS,
    tools=st.lists(TOOLS, max_size=2),
    status=TEXTS,
)
CHOICES = st.sampled_from(["auto", "none", "required"]) | objects(
    type=st.sampled_from(["function", "custom", "allowed_tools", "web_search"]),
    name=TEXTS,
    mode=st.just("required"),
    tools=st.lists(objects(type=st.just("function"), name=TEXTS), max_size=2),
)
REQUESTS = objects(
    model=st.just("m"),
    input=TEXTS | st.lists(ITEMS, max_size=5),
    tools=st.lists(TOOLS, max_size=3),
    tool_choice=CHOICES,
    instructions=TEXTS,
    metadata=st.dictionaries(TEXTS, TEXTS, max_size=2),
    text=objects(
        format=objects(type=st.sampled_from(["text", "json_schema", "json_object"]), name=TEXTS, schema=st.just({}))
    ),
    reasoning=objects(effort=st.sampled_from(["low", "none"]), summary=st.just("auto")),
    include=st.lists(TEXTS, max_size=1),
)


@given(REQUESTS)
def test_any_request_is_understood_or_refused(body: dict[str, Any]) -> None:
    with suppress(ApiError):
        request = RequestDecoder(ResponsesRequest).decode(msgspec.json.encode({"model": "m", "input": "x", **body}))
        request.check()
        wanted = references(request.items)
        given_items = resolved(request.items, {wanted[0]: {"id": wanted[0], "type": "reasoning"}} if wanted else {})
        items = with_ids(given_items, "0" * 48)
        assert all(isinstance(item["id"], str) and item["type"] for item in items)
        kept_items(items)
        responses_conversation(msgspec.structs.replace(request, input=items), earlier=items)
        response = blank_response(request, "resp_1", GenerationConfig(), created_at=1)
        plain = msgspec.json.decode(msgspec.json.encode(response))
        stored = StoredResponse(response=plain, input=items)
        assert unpack(pack(stored)) == stored
        if not plain["tools"] and isinstance(plain["tool_choice"], str):
            check_schema("Response", plain)
