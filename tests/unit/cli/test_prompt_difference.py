"""Where two prompts part, why, and how that is told."""

from typing import Any

import pytest

from kvbus_cli.prompt.difference import Difference, difference
from kvbus_cli.prompt.hints import Compared, hints, value_at
from kvbus_cli.prompt.report import difference_report, prompt_report, visible
from kvbus_cli.prompt.request_file import api_of
from kvbus_cli.prompt.tool_changes import named_tools, tool_changes
from kvbus_protocols.prompt_view import PromptBlock, PromptRule, PromptSegment, PromptView

BLOCK = 4
Piece = tuple[str, str | None]
IM_START, IM_END = ("<|im_start|>", "special"), ("<|im_end|>", "special")


def view(*pieces: Piece, domain: str = "d", **fields: Any) -> PromptView:
    """One token per character, but for control tokens. A piece is its text and its source; ``special``: a control token."""
    segments, tokens = [], list[int]()
    for text, source in pieces:
        special = source == "special"
        ids = [1000 + len(text)] if special else [ord(char) for char in text]
        segments.append(
            PromptSegment(
                text=text,
                start=len(tokens),
                tokens=len(ids),
                special=special,
                source=None if special else source,
                offset=None if special or source is None else 0,
            )
        )
        tokens += ids
    keys = [PromptBlock(f"{domain}{hash(tuple(tokens[:end])):x}", end) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
    given: dict[str, Any] = {
        "api": "chat",
        "model": "m",
        "served_model": "m",
        "harness": "",
        "salted": False,
        "rules": [],
    }
    given |= {"not_shown": [], "max_model_len": 100, "block_size": BLOCK, **fields}
    return PromptView(count=len(tokens), tokens=tokens, segments=segments, blocks=keys, domain=domain, **given)


def compared(a: PromptView, b: PromptView, fields_a: Any = None, fields_b: Any = None) -> Compared:
    return Compared(fields_a or {}, fields_b or {}, a, b, difference(a, b))


def prompt(system: str, user: str = "hi", **fields: Any) -> PromptView:
    return view(
        IM_START, ("system\n", None), (system, "messages[0].content"), IM_END, ("\n", None),
        IM_START, ("user\n", None), (user, "messages[1].content"), IM_END, **fields,
    )  # fmt: skip


def places(found: Difference) -> tuple[str, str]:
    return found.a.place, found.b.place


def test_prompts_part_within_a_field() -> None:
    found = difference(prompt("It is 2026-11-29."), prompt("It is 2026-11-30.", "ho"))
    assert places(found) == ("messages[0].content at char 14", "messages[0].content at char 14")
    assert (found.common_tokens, found.common_blocks) == (22, 5)
    assert (found.char, found.line) == (33, 2)
    assert found.common.endswith("It is 2026-11-")
    assert (found.a.text[:3], found.b.text[:3]) == ("29.", "30.")
    assert found.a.share == 22 / found.a.tokens


def test_template_text_is_said_to_be_that_with_the_fields_around_it() -> None:
    found = difference(prompt("a"), prompt("a", "h"))
    assert places(found) == ("messages[1].content at char 1", "template text after messages[1].content")
    tool = view(("a", "messages[0].content"), ("[", None), ("x", "tools[0].name"))
    other = view(("a", "messages[0].content"), ("(", None), ("x", "tools[0].name"))
    assert difference(tool, other).a.place == "template text after messages[0].content, before tools[0].name"


def test_control_tokens_differ_as_wholes_and_from_text_that_spells_them() -> None:
    found = difference(view(("a", None), IM_START), view(("a", None), IM_END))
    assert (found.char, found.common_tokens) == (1, 1)
    spelled = difference(
        view(("a", None), IM_END, ("b", None)), view(("a", None), ("<|im_end|>b", "messages[0].content"))
    )
    assert (spelled.char, spelled.common_tokens) == (1, 1)
    assert spelled.b.place == "messages[0].content at char 0"


def test_a_prompt_may_be_the_beginning_of_the_other() -> None:
    a, b = view(("ab", "input")), view(("ab", "input"), ("c", None))
    assert places(difference(a, b)) == ("the end, after input", "template text after input")
    assert hints(compared(a, b)) == ["A is the beginning of B"]
    assert hints(compared(b, a)) == ["B is the beginning of A"]
    same = compared(a, a)
    assert same.difference.is_none
    assert hints(same) == ["the prompts are the same"]
    assert same.difference.a.share == 1.0


def test_a_place_in_escaped_text_is_told_in_characters_of_the_field() -> None:
    def escaped(text: str) -> PromptView:
        segment = PromptSegment(text=text, start=0, tokens=1, source="tools[0].description", offset=2, escaped=True)
        return _with(view((text, None)), segment)

    found = difference(escaped('say \\"a'), escaped('say \\"b'))
    assert found.a.at == 2 + len('say "')
    assert difference(escaped("\\u00e9"), escaped("\\u00e8")).a.at == 2


def _with(plain: PromptView, segment: PromptSegment) -> PromptView:
    plain.segments[0] = segment
    return plain


# hints


def test_a_line_that_differs_in_ids_dates_or_numbers_only_is_volatile() -> None:
    told = hints(compared(prompt("It is Mon 2026-11-30.\nGo"), prompt("It is Tue 2026-12-01.\nGo")))
    assert told == [
        'a volatile line: "It is Mon 2026-11-30." and "It is Tue 2026-12-01." differ in ids, dates or numbers only'
    ]
    assert hints(compared(prompt("You are one."), prompt("You are two."))) == ["messages[0].content has changed"]


def test_without_a_reason_it_is_told_what_stands_in_either_prompt() -> None:
    longer = compared(prompt("You are one."), prompt("You are one. Two."))
    assert hints(longer) == ["A goes on with template text after messages[0].content, before messages[1].content, "
                             "B with messages[0].content at char 12"]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"domain": "e", "salted": True}, "cache_salt differs"),
        ({"domain": "e", "served_model": "n"}, "the models differ (m, n)"),
        ({"domain": "e"}, "the caches are separate"),
        ({"api": "messages"}, "the requests are of two APIs"),
        ({"harness": "codex"}, "the requests are of two programs (unknown, codex)"),
    ],
)
def test_what_separates_requests_of_one_text_is_told(fields: dict[str, Any], hint: str) -> None:
    assert any(told.startswith(hint) for told in hints(compared(prompt("a"), prompt("a", **fields))))


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", **more}}


READ, EDIT, FETCH = tool("Read"), tool("Edit"), tool("WebFetch")


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ([READ, EDIT], [READ, FETCH, EDIT], ['a tool "WebFetch" was inserted after "Read"']),
        ([READ, EDIT], [FETCH, READ, EDIT], ['a tool "WebFetch" was inserted before all others']),
        ([READ], [READ, FETCH, EDIT], ['a tool "WebFetch" was added at the end', 'a tool "Edit" was added at the end']),
        ([READ, EDIT], [EDIT], ['the tool "Read" is gone']),
        ([READ, EDIT], [EDIT, READ], ['the tools moved: their order is another one from "Edit" on']),
        ([READ], [tool("Read", parameters={"type": "object"})], ['the tool "Read" changed: parameters']),
        ([READ], [tool("Read", cache_control={})], []),
        ([tool("a", x=1, y=2)], [tool("a", y=2, x=1)], ["the tools are the same, with their members in another order"]),
    ],
)
def test_changes_of_tools_are_named(a: list[Any], b: list[Any], changes: list[str]) -> None:
    assert tool_changes(named_tools({"tools": a}), named_tools({"tools": b})) == changes


def test_tools_of_all_apis_are_found_by_name() -> None:
    namespace = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    assert list(named_tools({"tools": [namespace, {"name": "Bash", "input_schema": {}}, READ]})) == [
        "read",
        "Bash",
        "Read",
    ]
    assert list(named_tools({"tools": [READ, EDIT]}, frozenset({"tools[1]"}))) == ["Read"]
    assert not named_tools({"tools": "none"})


def test_an_inserted_tool_is_the_reason_when_the_prompts_part_at_the_tools() -> None:
    a = view(("<tools>", None), ("Edit", "tools[0].function.name"), ("</tools>", None))
    b = view(("<tools>", None), ("WebFetch", "tools[0].function.name"), ("Edit", "tools[1].function.name"))
    tools = {"tools": [EDIT]}, {"tools": [FETCH, EDIT]}
    assert hints(compared(a, b, *tools)) == ['tools: a tool "WebFetch" was inserted before all others']
    elsewhere = compared(prompt("a"), prompt("b"), *tools)
    assert hints(elsewhere) == ["messages[0].content has changed"]


def test_deferred_tools_are_not_counted_as_inserted() -> None:
    rule = PromptRule(rule="deferred-tool", source="tools[1]")
    a = view(("Edit", "tools[0].function.name"))
    b = view(("Read", "tools[0].function.name"), rules=[rule])
    told = hints(compared(a, b, {"tools": [EDIT]}, {"tools": [READ, FETCH]}))
    assert told == ['tools: a tool "Read" was added at the end', 'tools: the tool "Edit" is gone']


def test_thinking_that_the_template_drops_is_told() -> None:
    a = view(("hm", "messages[1].reasoning_content"), ("Yes", "messages[1].content"))
    b = view(("Yes", "messages[1].content"), not_shown=["messages[1].reasoning_content"])
    assert hints(compared(a, b)) == [
        "thinking: messages[1].reasoning_content is shown in A; in B the template drops it",
    ]


def test_a_call_that_the_frontend_knows_in_one_request_only_is_told() -> None:
    rule = PromptRule(rule="call-as-written", source="messages[1].tool_calls[0]", text='{"a":1}')
    source = "messages[1].tool_calls[0].function.arguments"
    told = hints(compared(view(('{"a":1}', source), rules=[rule]), view(('{"a": 1}', source))))
    assert told == [
        "the call stands in A as the model wrote it, and in B as its client has it",
    ]


def test_white_space_at_the_ends_of_fields_is_told() -> None:
    a, b = view(("x", "system[0].text"), ("\n.", None)), view(("x", "system[0].text"), (".", None))
    told = hints(compared(a, b, {"system": [{"text": "x\n"}]}, {"system": [{"text": "x"}]}))
    assert told == ["system[0].text and B's system[0].text differ in the white space at their ends only"]


def test_paths_lead_to_values() -> None:
    fields = {"messages": [{"content": [{"text": "a"}]}]}
    assert value_at(fields, "messages[0].content[0].text") == "a"
    assert value_at(fields, "messages[1].content") is None
    assert value_at(fields, "messages.content") is None
    assert value_at(fields, None) is None


# reports

GOLDEN_DIFF = """\
A  a.json · chat · m · 30 tokens, 7 blocks of 4
B  b.json · chat · m · 30 tokens, 7 blocks of 4 · salted

common prefix  18 tokens (60.0% of A, 60.0% of B)
               0 blocks (0.0% of A, 0.0% of B)
they part at   character 29, line 2 of the prompt
  A  messages[0].content at char 10
  B  messages[0].content at char 10

  A  …<|im_start|>system⏎2026-11-\\x1b[┃9<|im_end|>⏎<|im_start|>user⏎hi<|im_end|>…
  B  …<|im_start|>system⏎2026-11-\\x1b[┃8<|im_end|>⏎<|im_start|>user⏎hi<|im_end|>…

why
  · cache_salt differs: requests with different salts share no block, however equal their prompts are
  · a volatile line: "2026-11-\\x1b[9" and "2026-11-\\x1b[8" differ in ids, dates or numbers only

what the server changed in the requests
  B anthropic-preamble system[0].text: x-anthropic-billing-header: cch=1;"""


def test_a_difference_is_reported_like_this() -> None:
    rule = PromptRule(rule="anthropic-preamble", source="system[0].text", text="x-anthropic-billing-header: cch=1;")
    a, b = prompt("2026-11-\x1b[9"), prompt("2026-11-\x1b[8", domain="e", salted=True, rules=[rule])
    told = compared(a, b)
    lines = difference_report(told.difference, a, b, ("a.json", "b.json"), hints(told))
    assert "\n".join(line.plain for line in lines) == GOLDEN_DIFF


GOLDEN_PROMPT = """\
messages · alias (m) · 17 tokens, 4 blocks of 4 · claude-code
deferred-tool tools[2]
not in the prompt: messages[0].content[0].thinking

── template text · 3 tokens from 0 · block 0
<|im_start|>s
── tools[0] · 6 tokens from 3 · blocks 0-2
Re, ab
── template text · 1 token from 9 · block 2
<|im_end|>
── messages[0].content · 7 tokens from 10 · blocks 2-4
a
b\\x07c .

 block    token  key           begins with
     0        0  key0          <|im_start|>s⏎Re, ab<|im_end|>a⏎b\\x07c .
     1        4  key1
     2        8  key2          b<|im_end|>a⏎b\\x07c .
     3       12  key3          b\\x07c ."""


def test_a_prompt_is_reported_like_this() -> None:
    shown = view(
        IM_START, ("s\n", None), ("Re", "tools[0].name"), (", ", "tools[0]"), ("ab", "tools[0].description"), IM_END,
        ("a\nb\x07c .", "messages[0].content"), api="messages", model="alias", harness="claude-code",
        not_shown=["messages[0].content[0].thinking"], rules=[PromptRule(rule="deferred-tool", source="tools[2]")],
    )  # fmt: skip
    shown.blocks[:] = [PromptBlock("key0", 0), PromptBlock("key1"), PromptBlock("key2", 19), PromptBlock("key3", 32)]
    assert "\n".join(line.plain for line in prompt_report(shown, blocks=True)) == GOLDEN_PROMPT


def test_no_text_acts_on_the_terminal() -> None:
    assert visible("a\x1b[31m\r\n\tb\x9b\x7f") == "a\\x1b[31m\\x0d\n\tb\\x9b\\x7f"


# files


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "chat"),
        ({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, "chat"),
        ({"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]}, "chat"),
        ({"messages": [], "system": "s"}, "messages"),
        ({"messages": [], "thinking": {"type": "adaptive"}}, "messages"),
        ({"messages": [], "tools": [{"name": "f", "input_schema": {}}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}, "messages"),
        ({"model": "m", "input": "hi"}, "responses"),
        ({"previous_response_id": "resp_1"}, "responses"),
        ({"messages": "broken", "tools": [1]}, "chat"),
    ],
)
def test_the_api_is_told_from_the_body(body: dict[str, Any], api: str) -> None:
    assert api_of(body) == api
