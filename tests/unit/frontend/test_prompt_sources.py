"""From which field of a request each piece of its prompt comes: what texts do that do not survive their marks, and what is told."""

from typing import Any

import msgspec
import pytest

from kvbus_frontend.core.field_marks import Marking
from kvbus_frontend.core.message_style import MessageStyle
from kvbus_frontend.core.prompt_rules import changed_texts, conversation_rules, stability_rules
from kvbus_frontend.core.prompt_sources import RENDERINGS, Sources, marked_finder, sources_of
from kvbus_frontend.core.prompt_view import segments_of
from kvbus_frontend.core.requests import PromptForm, render_conversation
from kvbus_frontend.core.stability import Change, Stability
from kvbus_frontend.core.template_limits import TemplateLimits
from kvbus_frontend.core.written_calls import WrittenCall
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.chat_turns import chat_conversation
from kvbus_protocols.conversation import Conversation, TextPart, ToolSpec, Turn
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import Segment, byte_level_bundle, load_template, load_tokenizer

TOKENIZER = load_tokenizer(byte_level_bundle())


def body(*contents: Any, tools: list[Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": content} for content in contents]}
    return made if tools is None else {**made, "tools": tools}


def found(
    template: str, body: dict[str, Any], written: WrittenCall | None = None, changed: dict[str, str] | None = None
) -> tuple[list[tuple[str, str | None]], Sources, int]:
    """Pieces with their sources, and how often the request was rendered."""
    form = PromptForm(
        load_template(byte_level_bundle(chat_template=template), TOKENIZER), TemplateLimits(), MessageStyle()
    )
    rendered = 0

    def find(_id: str, _name: str, _arguments: str) -> WrittenCall | None:
        return written

    def segments(body: dict[str, Any], marking: Marking | None = None) -> list[Segment]:
        conversation = chat_conversation(msgspec.convert(body, ChatRequest))
        finder = find if marking is None else marked_finder(find, marking, lambda *_found: None)
        return render_conversation(conversation, form, finder)

    def render(document: dict[str, Any], marking: Marking) -> str:
        nonlocal rendered
        rendered += 1
        return "".join(segment.text for segment in segments({**body, **document}, marking))

    plain = segments(body)
    text = "".join(segment.text for segment in plain)
    document: dict[str, Any] = {name: value for name, value in body.items() if name != "model"}
    sources = sources_of(document, text, render, changed=changed or {}, reseal=lambda sealed, _item, _mark: sealed)
    pieces, _ = segments_of(plain, sources.spans, TOKENIZER)
    return [(piece.text, piece.source) for piece in pieces], sources, rendered


ALL = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_a_text_is_found_without_the_white_space_at_its_ends() -> None:
    pieces, sources, rendered = found(ALL, body("  a\n", "  "))
    assert pieces == [("[  ", None), ("a", "messages[0].content"), ("\n][  ]", None)]
    assert (sources.not_shown, rendered) == ((), 1)


def test_equal_texts_are_told_apart() -> None:
    pieces, _, _ = found("{% for m in messages|reverse %}a{{ m.content }}{% endfor %}", body("a", "a"))
    assert pieces == [("a", None), ("a", "messages[1].content"), ("a", None), ("a", "messages[0].content")]


def test_a_text_that_the_template_compares_is_left_alone_and_the_others_are_found() -> None:
    template = "{% for m in messages %}{{ '!' if m.content.startswith('go') }}{{ m.content }}.{% endfor %}"
    pieces, sources, rendered = found(template, body("so", "go", "no"))
    assert pieces == [
        ("so", "messages[0].content"),
        (".!go.", None),
        ("no", "messages[2].content"),
        (".", None),
    ]
    assert sources.not_shown == ()
    assert rendered == 2


def test_what_changes_with_the_length_of_a_text_ends_what_is_known() -> None:
    template = "{% for m in messages %}{{ m.content }}/{% endfor %}{{ messages|map(attribute='content')|join|length }}"
    pieces, sources, rendered = found(f"{template}{{{{ messages[0].content }}}}", body(*"abcdefghijklmnop"))
    assert rendered == RENDERINGS
    assert sources.not_shown is None
    assert pieces[-1][1] is None
    assert pieces[0] == ("a", "messages[0].content")


def test_a_template_that_looks_at_types_keeps_the_descriptions() -> None:
    template = (
        "{% for t in tools %}{{ t.function.parameters.type if t.function.parameters.type == 'object' "
        "else raise_exception('type') }} {{ t.function.description }}{% endfor %}"
    )
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "description": "p"}}
    pieces, sources, _ = found(template, body("a", tools=[{"type": "function", "function": tool}]))
    assert pieces == [("object ", None), ("d", "tools[0].function.description")]
    assert sources.not_shown == ("messages[0].content",)


def test_tools_of_one_name_share_it_and_it_tells_nothing() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": text}} for text in ("one", "two")]
    pieces, sources, _ = found(
        "{% for t in tools %}<{{ t.function.name }}:{{ t.function.description }}>{% endfor %}", body("a", tools=tools)
    )
    assert pieces == [
        ("<f:", None),
        ("one", "tools[0].function.description"),
        ("><f:", None),
        ("two", "tools[1].function.description"),
        (">", None),
    ]
    assert sources.not_shown == ("messages[0].content",)


def test_characters_of_the_private_planes_in_a_request_are_text() -> None:
    text = "\U000f0000a\U000f0001\U0010fffd"
    assert found(ALL, body(text, "b"))[0][1] == (text, "messages[0].content")


def test_a_call_as_the_model_wrote_it_comes_from_its_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a:b":"x: y","n":1,"deep":["z"]}'}}
    request = body("go")
    request["messages"].append({"role": "assistant", "tool_calls": [call]})
    written = WrittenCall("c", "f", '{"a:b":  "x: y", "n": 1.0, "deep": ["z"]}')
    template = (
        "{% for c in messages[1].tool_calls %}{{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}"
    )
    pieces, sources, rendered = found(template, request, written)
    path = "messages[1].tool_calls[0]"
    assert pieces == [
        ("f", f"{path}.function.name"),
        (' {"a:b":  "', path),
        ("x: y", f"{path}.function.arguments"),
        ('", "n": 1.0, "deep": ["', f"{path}.function.arguments"),
        ("z", f"{path}.function.arguments"),
        ('"]}', None),
    ]
    assert (sources.not_shown, rendered) == (("messages[0].content",), 1)


# rules


def conversation(*turns: Turn, harness: str = "", tools: tuple[ToolSpec, ...] = ()) -> Conversation:
    return Conversation(generation=GenerationRequest(model="m"), turns=turns, harness=harness, tools=tools)


def turn(role: Any, *texts: str) -> Turn:
    return Turn(role, tuple(map(TextPart, texts)))


BILLING = "x-anthropic-billing-header: cc_version=2.1.140.9ea; cch=0865d;"
RUNTIME = "Go. \nRuntime: agent=main | session=a | sessionId=b | host=h"


def test_what_prompt_stability_does_is_told_with_the_field_and_the_text_that_went() -> None:
    stability = Stability.of(FrontendSettings())
    changes = stability.changes(conversation(turn("system", BILLING, "Be brief."), turn("user", RUNTIME)))
    assert changes == [
        Change("anthropic-preamble", BILLING, ""),
        Change("openclaw-session", RUNTIME, "Go. \nRuntime: agent=main | host=h"),
    ]
    document = {"system": [{"text": BILLING}, {"text": "Be brief."}], "messages": [{"content": RUNTIME}]}
    assert [(rule.rule, rule.source, rule.text) for rule in stability_rules(document, changes)] == [
        ("anthropic-preamble", "system[0].text", BILLING),
        ("openclaw-session", "messages[0].content", "session=a | sessionId=b |"),
    ]
    twice = {"system": BILLING, "instructions": BILLING}
    assert [rule.source for rule in stability_rules(twice, changes[:1])] == [None]


def test_an_environment_that_is_moved_is_no_text_that_is_changed() -> None:
    given = conversation(turn("user", "Go."), turn("system", "# Environment"), harness="claude-code")
    changes = Stability.of(FrontendSettings()).changes(given)
    assert changes == [Change("claude-environment", "# Environment", "# Environment")]
    assert changed_texts(changes) == {}
    assert [rule.source for rule in stability_rules({"messages": [{"content": "# Environment"}]}, changes)] == [
        "messages[0].content"
    ]


def test_texts_that_two_rules_change_are_followed_from_the_first_to_the_last() -> None:
    assert changed_texts([Change("a", "one", "two"), Change("b", "two", "three"), Change("c", "x", "")]) == {
        "one": "three",
        "x": "",
    }


@pytest.mark.parametrize(
    ("shown", "limits", "rules"),
    [
        ((turn("user", "a"), turn("user", "b")), TemplateLimits(), []),
        ((turn("user", "a"), turn("user", "b")), TemplateLimits(users=False), ["template-limits"]),
        ((turn("user", "b"),), TemplateLimits(), ["truncation"]),
    ],
)
def test_rearranged_and_dropped_turns_are_told(
    shown: tuple[Turn, ...], limits: TemplateLimits, rules: list[str]
) -> None:
    given = conversation(turn("user", "a"), turn("user", "b"))
    assert [rule.rule for rule in conversation_rules({}, given, conversation(*shown), limits)] == rules


def test_deferred_tools_are_found_in_namespaces_and_items() -> None:
    tools = (ToolSpec(name="read", deferred=True), ToolSpec(name="now", deferred=True), ToolSpec(name="top"))
    document = {
        "tools": [{"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}],
        "input": [{"type": "additional_tools", "tools": [{"type": "function", "name": "now"}]}],
    }
    shown = conversation(turn("user", "a"), tools=tools)
    rules = list(conversation_rules(document, shown, shown, TemplateLimits()))
    assert [rule.source for rule in rules] == ["tools[0].tools[0]", "input[0].tools[0]"]


def test_thousands_of_changed_texts_are_told_without_a_walk_for_each() -> None:
    count = 20_000
    changes = [Change("a", f"{i} x", f"{i}") for i in range(count)] + [Change("b", f"{i}", "") for i in range(count)]
    document = {"system": [{"text": f"{i} x"} for i in range(count)]}
    assert changed_texts(changes) == {f"{i} x": "" for i in range(count)}
    rules = list(stability_rules(document, changes))
    assert [rule.source for rule in rules[:count]] == [f"system[{i}].text" for i in range(count)]


def test_of_what_is_too_deep_to_be_walked_no_source_is_told() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    sources = sources_of(
        {"tools": tools},
        "text",
        lambda _document, _marking: "text",
        changed={},
        reseal=lambda sealed, _item, _mark: sealed,
    )
    assert sources == Sources()
