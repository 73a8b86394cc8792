"""Whatever a client sends is a conversation or a refusal."""

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_protocols import InvalidRequest, RequestDecoder
from kvbus_protocols.conversation import ToolResultPart
from kvbus_protocols.messages import MessagesRequest
from kvbus_protocols.messages_turns import messages_conversation

DECODER = RequestDecoder(MessagesRequest)

WORDS = st.sampled_from(["", "a", "x-anthropic-billing-header: b", "☃"])
KEPT = st.sampled_from([None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
SOURCES = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": "AA"},
        {"type": "url", "url": "u"},
        {"type": "text", "data": "t"},
        {"type": "file", "file_id": "f"},
        {"type": "content", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    ]
)


def block(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields}, optional={"cache_control": KEPT})


TEXT = block("text", text=WORDS)
IMAGE = block("image", source=SOURCES)
DOCUMENT = block("document", source=SOURCES, title=st.none() | WORDS)
REFERENCE = block("tool_reference", tool_name=WORDS)
RESULT = block(
    "tool_result",
    tool_use_id=WORDS,
    content=st.none() | WORDS | st.lists(TEXT | IMAGE | DOCUMENT | REFERENCE, max_size=3),
)
USE = block("tool_use", id=WORDS, name=WORDS, input=st.dictionaries(WORDS, st.integers(), max_size=2))
THINKING = block("thinking", thinking=WORDS, signature=WORDS)
REDACTED = block("redacted_thinking", data=WORDS)
BLOCKS = TEXT | IMAGE | DOCUMENT | RESULT | USE | THINKING | REDACTED
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "assistant", "system"]), "content": WORDS | st.lists(BLOCKS, max_size=3)}
)
TOOL = st.fixed_dictionaries({}, optional={
    "name": WORDS, "type": st.sampled_from([None, "custom", "web_search_20250305"]), "input_schema": st.just({}),
    "defer_loading": st.booleans(), "cache_control": KEPT,
})  # fmt: skip
REQUESTS = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.integers(1, 5000), "messages": st.lists(MESSAGES, min_size=1, max_size=6)},
    optional={
        "system": WORDS | st.lists(TEXT, max_size=2),
        "tools": st.lists(TOOL, max_size=3),
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"]), "name": WORDS}),
        "thinking": st.fixed_dictionaries(
            {"type": st.sampled_from(["enabled", "adaptive"]), "budget_tokens": st.just(1024)}
        ),
        "cache_control": KEPT,
        "metadata": st.fixed_dictionaries({"user_id": WORDS}),
    },
)


@settings(max_examples=300)
@given(REQUESTS)
def test_a_request_becomes_a_conversation_that_is_sound_or_is_refused(request: dict[str, Any]) -> None:
    try:
        conversation = messages_conversation(DECODER.decode(msgspec.json.encode(request)))
    except InvalidRequest as refusal:
        assert refusal.message  # noqa: PT017  # either is fine, anything else is not
        return
    turns = conversation.turns
    assert turns
    assert all(turn.parts for turn in turns)
    assert all(one.role != other.role for one, other in pairwise(turns))
    assert all((turn.role == "tool") == isinstance(part, ToolResultPart) for turn in turns for part in turn.parts)
    assert all(-1 <= point.turn < len(turns) for point in conversation.breakpoints)
    assert len(conversation.breakpoints) <= 4
    if conversation.continue_final:
        assert turns[-1].role == "assistant"
    again = messages_conversation(DECODER.decode(msgspec.json.encode(request)))
    assert again == conversation
