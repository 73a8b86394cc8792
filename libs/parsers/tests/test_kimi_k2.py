from collections.abc import Callable

import pytest

from kvbus_parsers import CallStarted, open_parser

Read = Callable[..., list[object]]


def tool(name: str, *keys: str, required: tuple[str, ...] = ()) -> dict[str, object]:
    parameters = {"type": "object", "properties": {key: {} for key in keys}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("exec", "command", "cwd", required=("command",)),
    tool("read", "path"),
    tool("web.get-page", "url", "cwd"),
]


def call(call_id: str, arguments: str = "{}", end: str = "<|tool_call_end|>") -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}{end}"


def section(*calls: str) -> str:
    return "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.exec:0", "exec"),
        ("\n functions.exec:12 \n", "exec"),
        ("exec:0", "exec"),
        ("exec", "exec"),
        ("functions.exec5", "exec"),
        ("functionsexec5", "exec"),
        ("functions.web.get-page:3", "web.get-page"),
        ("functions.not_offered:0", "not_offered"),
        ("not_offered:7", "not_offered"),
        ("functions.mcp:tool:7", "mcp:tool"),
    ],
)
def test_the_id_tells_the_name_and_stays_as_it_is(call_id: str, name: str) -> None:
    started = open_parser(tool="kimi_k2", tools=TOOLS).feed(section(call(call_id)))[0]
    assert started == CallStarted(0, call_id.strip(), name)


@pytest.mark.parametrize("call_id", ["3", "call_01", "functions.3", "", "the call"])
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"command": "ls", "cwd": "/"}', [("exec", '{"command": "ls", "cwd": "/"}')]),
        ('{"url": "x", "cwd": "/"}', [("web.get-page", '{"url": "x", "cwd": "/"}')]),
        ('{"cwd": "/"}', [("web.get-page", '{"cwd": "/"}')]),
        ('{"else": 1}', ['{"else": 1}']),
        ("{}", ["{}"]),
        ("[1]", ["[1]"]),
        ('precious words {"cwd": "/"}', ['precious words {"cwd": "/"}']),
        ('{"url": 1e400, "cwd": ' + "9" * 5000 + "}", [("web.get-page", '{"url": 1e400, "cwd": ' + "9" * 5000 + "}")]),
    ],
)
def test_without_a_name_the_arguments_tell_it_or_there_is_no_call(
    read: Read, call_id: str, arguments: str, wanted: list[object]
) -> None:
    assert read(section(call(call_id, arguments)), "kimi_k2", tools=TOOLS) == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param(
            "a " + section(call("f:0", '\n{"a": 1}\n')) + " b",
            ["a", ("f", '{"a": 1}'), "b"],
            id="text around a section",
        ),
        pytest.param(section(call("f:0", "")), [("f", "{}")], id="no arguments"),
        pytest.param(section("<|tool_call_begin|>f:0<|tool_call_end|>"), [("f", "{}")], id="no marker of arguments"),
        pytest.param(section(call("f:0", end=""), call("g:1", end="")), [("f", "{}"), ("g", "{}")], id="no ends"),
        pytest.param(section(call("f:0", "what?"), call("g:1")), [("f", "what?"), ("g", "{}")], id="no JSON"),
        pytest.param(
            section(call("f:0", '{"a": 1,}'), call("g:1")), [("f", '{"a": 1,}'), ("g", "{}")], id="broken JSON"
        ),
        pytest.param(section("<|tool_call_begin|>what", call("g:1")), ["what", ("g", "{}")], id="no call"),
        pytest.param(call("f:0") + "b", [("f", "{}"), "b"], id="no section"),
        pytest.param(
            "<|tool_calls_section_begin|>" + call("f:0") + "b", [("f", "{}"), "b"], id="no end of the section"
        ),
        pytest.param("say <|tool_calls_section_begin|> first", ["say <|tool_calls_section_begin|> first"], id="prose"),
        pytest.param("a<|tool_call_end|><|tool_calls_section_end|>b", ["ab"], id="stray closers"),
        pytest.param(
            section(call("f:0", '{"a": "<|tool_call_end|>"}')),
            [("f", '{"a": "<|tool_call_end|>"}')],
            id="a marker as data",
        ),
        pytest.param(section(call("f:0", '{"a": 1')), [("f", '{"a": 1')], id="JSON that ends early"),
    ],
)
def test_sections_and_what_is_in_them(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "kimi_k2") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("a<|tool_calls_section_begin|><|tool_call_be", ["a"]),
        ("a<|tool_calls_section_begin|><|tool_call_begin|>functions.ex", ["a"]),
        ("<|tool_calls_section_begin|>" + call("f:0", '{"a": [1', ""), [("f", '{"a": [1…')]),
        ("<|tool_calls_section_begin|>" + call("3", '{"command": "l', ""), []),
    ],
)
def test_a_cut_call_is_never_closed_up(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "kimi_k2", tools=TOOLS, finish="length") == wanted


def test_an_id_that_comes_twice_is_replaced() -> None:
    events = open_parser(tool="kimi_k2", new_id=lambda: "new").feed(section(call("f:0"), call("f:0")))
    assert [event.id for event in events if isinstance(event, CallStarted)] == ["f:0", "new"]


def test_a_section_ends_open_reasoning(read: Read) -> None:
    output = "<think>a <|tool_calls_section_begin|> b" + section(call("f:0")) + "c"
    assert read(output, {"tool": "kimi_k2", "reasoning": "kimi_k2"}) == [
        ["a <|tool_calls_section_begin|> b"],
        ("f", "{}"),
        "c",
    ]
