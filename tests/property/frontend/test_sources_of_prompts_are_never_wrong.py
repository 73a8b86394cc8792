"""What is said to come from a field comes from it: with another text in the field, another text stands there, and nowhere else.

Tried with templates of all families, and texts so short and alike that a search for them would be mistaken all the time.
"""

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_frontend.core.field_marks import Marking
from kvbus_frontend.core.formats import told_formats
from kvbus_frontend.core.message_style import style_of
from kvbus_frontend.core.prompt_sources import Sources, marked_finder, sources_of
from kvbus_frontend.core.prompt_view import segments_of
from kvbus_frontend.core.requests import PromptForm, render_conversation
from kvbus_frontend.core.template_limits import limits_of
from kvbus_frontend.core.template_traits import traits_of
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.chat_turns import chat_conversation
from kvbus_protocols.errors import ApiError
from kvbus_tokenizers import Segment, byte_level_bundle, load_template, load_tokenizer

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
OTHER = "Qzxj"
"""A text that no template and no request has."""

texts = st.text(alphabet='ab" \nu{<é', min_size=1, max_size=6) | st.sampled_from(
    [
        "user",
        "assistant",
        "system",
        "<|im_end|>",
        "</think>",
        "<think>a</think>b",
        "<tool_response>a</tool_response>",
        "a",
    ]
)
names = st.sampled_from(["read", "write", "user", "name"])


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for i in range(draw(st.integers(1, 3))):
        content: Any = draw(texts)
        if draw(st.booleans()):
            content = [{"type": "text", "text": text} for text in (content, draw(texts))]
        messages.append({"role": "user", "content": content})
        said: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        if draw(st.booleans()):
            said["reasoning_content"] = draw(texts)
        messages.append(said)
        if draw(st.booleans()):
            arguments = json.dumps({"text": draw(texts), "n": 1})
            said["tool_calls"] = [
                {"id": f"c{i}", "type": "function", "function": {"name": draw(names), "arguments": arguments}}
            ]
            messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts)})
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if draw(st.booleans()):
        parameters = {"type": "object", "properties": {"text": {"type": "string", "description": draw(texts)}}}
        body["tools"] = [
            {"type": "function", "function": {"name": name, "description": draw(texts), "parameters": parameters}}
            for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))
        ]
    return body


class Model:
    def __init__(self, path: Path) -> None:
        bundle = byte_level_bundle(chat_template=path.read_text())
        self.tokenizer = load_tokenizer(bundle)
        template = load_template(bundle, self.tokenizer)
        self._form = PromptForm(
            template, limits_of(template), style_of(traits_of(template), told_formats(template, bundle))
        )

    def render(self, body: dict[str, Any], marking: Marking | None = None) -> list[Segment]:
        conversation = chat_conversation(msgspec.convert(body, ChatRequest))
        if marking is None:
            return render_conversation(conversation, self._form)
        finder = marked_finder(lambda *_call: None, marking, lambda *_found: None)
        return render_conversation(conversation, self._form, finder)

    def sources(self, body: dict[str, Any], text: str) -> Sources:
        def render(document: dict[str, Any], marking: Marking) -> str:
            return joined(self.render({**body, **document}, marking))

        document: dict[str, Any] = {name: value for name, value in body.items() if name != "model"}
        return sources_of(document, text, render, changed={}, reseal=lambda sealed, _item, _mark: sealed)


def joined(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def changed(value: Any, path: str, where: str = "") -> Any:
    """The body with another text in one field."""
    if where == path:
        return value.replace(value.strip(), OTHER)
    if isinstance(value, dict):
        return {key: changed(item, path, f"{where}.{key}".removeprefix(".")) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, path, f"{where}[{i}]") for i, item in enumerate(value)]
    return value


def expected(text: str, sources: Sources, path: str) -> Iterator[str]:
    position = 0
    for span in sources.spans:
        if span.field.path == path:
            yield from (text[position : span.start], OTHER)
            position = span.end
    yield text[position:]


@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_another_text_in_a_field_stands_where_its_text_was_said_to_stand(path: Path) -> None:
    model = Model(path)

    @given(body=bodies(), data=st.data())
    @settings(max_examples=20, deadline=None)
    def check(body: dict[str, Any], data: st.DataObject) -> None:
        try:
            segments = model.render(body)
        except ApiError:
            return
        text = joined(segments)
        sources = model.sources(body, text)
        pieces, _ = segments_of(segments, sources.spans, model.tokenizer)
        assert "".join(piece.text for piece in pieces) == text
        assert sum(piece.tokens or 0 for piece in pieces) == len(model.tokenizer.encode_segments(segments))
        fields = sorted({span.field.path for span in sources.spans if span.field.text})
        if not fields:
            return
        field = data.draw(st.sampled_from(fields))
        plain = joined(model.render(changed(body, field)))
        if OTHER in plain and is_compared(field, body):
            return
        assert plain == "".join(expected(text, sources, field)), field

    check()


def is_compared(field: str, body: dict[str, Any]) -> bool:
    """Whether a template may look into the text, so that another one changes more than itself."""
    value: Any = body
    for part in field.replace("[", ".[").split("."):
        value = value[int(part.strip("[]"))] if part.startswith("[") else value[part]
    return any(mark in value for mark in "<{") or set(value) <= set(string.whitespace)


def test_almost_everything_of_a_plain_request_is_found() -> None:
    model = Model(next(path for path in TEMPLATES if path.stem == "qwen3"))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a user"}, {"role": "assistant", "content": "user a"}],
    }
    body["messages"] += [{"role": "user", "content": "user"}]  # type: ignore[operator]
    sources = model.sources(body, joined(model.render(body)))
    assert [span.field.path for span in sources.spans] == [f"messages[{i}].content" for i in range(3)]
    assert sources.not_shown == ()
