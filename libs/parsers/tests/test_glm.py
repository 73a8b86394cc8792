from collections.abc import Callable

import pytest

from kvbus_parsers import CallArguments, CallEnded, open_parser

Read = Callable[..., list[object]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {"properties": {"body": {"type": "string"}, "count": {"type": "integer"}, "any": {}}},
        },
    }
]


def arguments(**pairs: str) -> str:
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs.items())


def test_a_string_goes_out_as_it_comes() -> None:
    parser = open_parser(tool="glm47", tools=TOOLS)
    parser.feed("<tool_call>write<arg_key>body</arg_key><arg_value>")
    assert parser.feed("a\n </arg") == [CallArguments(0, "a\\n ")]
    assert parser.feed("s") == [CallArguments(0, "</args")]


def test_a_call_tells_what_the_model_wrote_per_argument() -> None:
    parser = open_parser(tool="glm45", tools=TOOLS)
    ended = parser.feed("<tool_call>write\n" + arguments(body="007", count=" 7") + "</tool_call>")[-1]
    assert isinstance(ended, CallEnded)
    assert ended.arguments == '{"body": "007", "count": 7}'
    assert ended.written == {"body": "007", "count": " 7"}


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param("<tool_call>\nf\n</tool_call>", [("f", "{}")], id="space around the name"),
        pytest.param("a<tool_call></tool_call>", ["a"], id="no name"),
        pytest.param("say <tool_call> first", ["say <tool_call> first"], id="the marker in prose"),
        pytest.param("say <tool_call>f first", ["say <tool_call>f first"], id="a name without arguments in prose"),
        pytest.param(
            "<tool_call>f</tool_call> a <tool_call>g</tool_call>", [("f", "{}"), "a", ("g", "{}")], id="text in between"
        ),
        pytest.param(
            "<tool_call>f\n" + arguments(a="1") + "<tool_call>g</tool_call>",
            [("f", '{"a": "1"}'), ("g", "{}")],
            id="no end",
        ),
        pytest.param(
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>\n<tool_call>g</tool_call>",
            [("f", '{"a": "1"}'), ("g", "{}")],
            id="no end of the value",
        ),
        pytest.param(
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call> is the end</arg_value></tool_call>",
            [("f", '{"a": "1</tool_call> is the end"}')],
            id="the end of a call in a value",
        ),
        pytest.param("<tool_call>f<arg_key>a</arg_key></tool_call>", [("f", "a")], id="no value"),
        pytest.param("<tool_call>f<arg_key>a</arg_key>: 1</tool_call>", [("f", "a: 1")], id="no tag around the value"),
        pytest.param('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", '{"a": 1}')], id="JSON"),
        pytest.param("a</tool_call>b", ["ab"], id="a stray closer"),
        pytest.param("<tool_call>f<arg_key>a</arg_key><arg_value>1", [("f", '{"a": "1…')], id="the end of the output"),
    ],
)
def test_a_form_that_is_not_quite_the_template_s(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "glm45") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("a<tool_call>", ["a"]),
        ("a<tool_call>wri", ["a"]),
        ("a<tool_call>write<arg_k", ["a"]),
        ("<tool_call>write<arg_key>bo", [("write", "…")]),
        ("<tool_call>write<arg_key>count</arg_key><arg_value>1", [("write", '{"count": 1…')]),
        ("<tool_call>write<arg_key>count</arg_key><arg_value>1</arg_value>", [("write", '{"count": 1…')]),
    ],
)
def test_a_cut_call_is_never_closed_up(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "glm47", tools=TOOLS, finish="length") == wanted


def test_what_k2_horizon_says_about_a_type_counts_where_the_tool_says_nothing(read: Read) -> None:
    def value(key: str, kind: str, text: str) -> str:
        tags = (("arg_key", key), ("arg_type", kind), ("arg_value", text))
        return "".join(f"<ifm|{tag}>{content}</ifm|{tag}>" for tag, content in tags)

    pairs = (
        value("any", "integer", "1")
        + value("count", "string", "2")
        + value("new", "array[integer]", "[3]")
        + value("x", "any", "4")
    )
    output = f"<ifm|tool_calls><ifm|tool_call>write{pairs}</ifm|tool_call></ifm|tool_calls>"
    assert read(output, "k2_horizon", tools=TOOLS) == [("write", '{"any": 1, "count": 2, "new": [3], "x": "4"}')]


def test_a_type_of_k2_horizon_that_is_not_closed_swallows_no_value(read: Read) -> None:
    key, value = "<ifm|arg_key>count</ifm|arg_key>", "<ifm|arg_value>1</ifm|arg_value>"
    call = f"<ifm|tool_call>write{key}<ifm|arg_type>integer{value}</ifm|tool_call>b"
    assert read(call, "k2_horizon", tools=TOOLS) == [("write", '{"count": 1}'), "b"]
    call = f"<ifm|tool_call>write{key}<ifm|arg_type>words</ifm|arg_type></ifm|tool_call>b"
    assert read(call, "k2_horizon", tools=TOOLS) == [("write", "count words"), "b"]


def test_a_call_with_types_tells_nothing_more_about_what_was_written() -> None:
    def ended(types: str) -> CallEnded:
        key, value = "<ifm|arg_key>a</ifm|arg_key>", "<ifm|arg_value>1</ifm|arg_value>"
        last = open_parser(tool="k2_horizon").feed(f"<ifm|tool_call>f{key}{types}{value}</ifm|tool_call>")[-1]
        assert isinstance(last, CallEnded)
        return last

    assert ended("<ifm|arg_type>integer</ifm|arg_type>").written is None
    assert ended("").written == {"a": "1"}


def test_hunyuan_3_and_k2_horizon_have_a_section_around_their_calls(read: Read) -> None:
    assert read("a<tool_calls>\n<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>b", "hy_v3") == [
        "a",
        ("f", "{}"),
        "b",
    ]
    assert read("a<ifm|tool_calls></ifm|tool_calls>", "k2_horizon") == ["a"]
    assert read("a <ifm|tool_calls> b", "k2_horizon") == ["a <ifm|tool_calls> b"]


def test_k2_horizon_has_reasoning_markers_of_its_own(read: Read) -> None:
    both = {"tool": "k2_horizon", "reasoning": "k2_horizon"}
    assert read("<ifm|think_fast>a</ifm|think_fast>\nb", both) == [["a"], "b"]
