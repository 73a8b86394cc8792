from collections.abc import Callable

import pytest

from kvbus_parsers import CallArguments, CallEnded, open_parser

Read = Callable[..., list[object]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "properties": {"body": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"}}
            },
        },
    }
]


def invoke(*parameters: str, name: str = "write") -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "".join(parameters) + "</｜DSML｜invoke>"


def parameter(key: str, value: str, string: str = ' string="false"') -> str:
    return f'<｜DSML｜parameter name="{key}"{string}>{value}</｜DSML｜parameter>\n'


def block(inner: str, name: str = "tool_calls") -> str:
    return f"<｜DSML｜{name}>\n{inner}\n</｜DSML｜{name}>"


def test_a_string_goes_out_as_it_comes_whatever_the_tool_wants() -> None:
    parser = open_parser(tool="deepseek_v4", tools=TOOLS)
    parser.feed('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="count" string="true">')
    assert parser.feed("1</｜DS") == [CallArguments(0, "1")]
    assert parser.feed("x") == [CallArguments(0, "</｜DSx")]


def test_the_types_are_on_the_wire_so_a_call_tells_nothing_more() -> None:
    ended = open_parser(tool="deepseek_v4", tools=TOOLS).feed(block(invoke(parameter("count", "7"))))[-1]
    assert isinstance(ended, CallEnded)
    assert ended.written is None


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [
        pytest.param(invoke(parameter("body", "7")), '{"body": 7}', id="JSON, whatever the tool wants"),
        pytest.param(
            invoke(parameter("body", " [1.50, null]\n", "")), '{"body": [1.50, null]}', id="no word about strings"
        ),
        pytest.param(invoke(parameter("body", "a b")), '{"body": "a b"}', id="no JSON"),
        pytest.param(invoke(parameter("flag", "True")), '{"flag": true}', id="no JSON, but what the tool wants"),
        pytest.param(
            invoke(parameter("body", "9" * 5000)), '{"body": ' + "9" * 5000 + "}", id="more digits than Python reads"
        ),
        pytest.param(invoke(parameter("count", "NaN")), '{"count": "NaN"}', id="a number that JSON does not have"),
        pytest.param(
            invoke('{"a": "</｜DSML｜invoke>"}\n'), '{"a": "</｜DSML｜invoke>"}', id="an object for parameters"
        ),
        pytest.param(invoke('{"a": 1, b}'), '{"a": 1, b}', id="a broken object for parameters"),
        pytest.param(invoke("a"), "a", id="text for parameters"),
        pytest.param('<｜DSML｜invoke name="write"/>', "{}", id="a tag that closes itself"),
        pytest.param(invoke(parameter("arguments", '{"body": "a"}')), '{"body": "a"}', id="an object in one parameter"),
        pytest.param(invoke(parameter("input", '{"body": "a"}', ' string="true"')), '{"body": "a"}', id="as a string"),
        pytest.param(
            invoke(parameter("input", '{"other": 1}')), '{"input": {"other": 1}}', id="an object of other things"
        ),
        pytest.param(
            invoke(parameter("input", "[]"), parameter("count", "1")), '{"input": [], "count": 1}', id="no object"
        ),
        pytest.param(
            invoke(parameter("input", "{}"), parameter("count", "1")), '{"input": {}, "count": 1}', id="one of several"
        ),
    ],
)
def test_what_a_call_holds(read: Read, inner: str, wanted: str) -> None:
    assert read(block(inner), "deepseek_v4", tools=TOOLS) == [("write", wanted)]


def test_an_object_in_one_parameter_stays_there_where_the_tool_is_not_known_or_has_it(read: Read) -> None:
    output = block(invoke(parameter("input", "{}"), name="other"))
    assert read(output, "deepseek_v4", tools=TOOLS) == [("other", '{"input": {}}')]
    tool = {
        "type": "function",
        "function": {"name": "other", "parameters": {"properties": {"input": {"type": "object"}}}},
    }
    assert read(output, "deepseek_v4", tools=[tool]) == [("other", '{"input": {}}')]


@pytest.mark.parametrize("name", ["function_calls", "tool_calls", "toolcalls", "tool", "calls", " calls"])
def test_the_block_has_many_names(read: Read, name: str) -> None:
    assert read("a " + block(invoke(), name) + " b", "deepseek_v3_2") == ["a", ("write", "{}"), "b"]


def test_the_tags_of_v4_1_have_spaces(read: Read) -> None:
    output = block(invoke(parameter("body", "x", ' string="true"')), "calls").replace("｜DSML｜", "｜DSML｜ ")
    assert read(output, "deepseek_v41") == [("write", '{"body": "x"}')]


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param("a" + invoke() + "b", ["a", ("write", "{}"), "b"], id="no block"),
        pytest.param("a" + block("") + "b", ["ab"], id="an empty block"),
        pytest.param("<｜DSML｜tool_calls>\n" + invoke() + "\nb", [("write", "{}"), "b"], id="no end of the block"),
        pytest.param("say <｜DSML｜tool_calls> first", ["say <｜DSML｜tool_calls> first"], id="the marker in prose"),
        pytest.param("a < b, c <｜", ["a < b, c <｜"], id="half a marker"),
        pytest.param("a</｜DSML｜tool_calls>", ["a"], id="a stray closer"),
    ],
)
def test_blocks_and_what_stands_around_them(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "deepseek_v4") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("a<｜DSML｜tool_calls>\n<｜DSML｜inv", ["a"]),
        ('a<｜DSML｜tool_calls>\n<｜DSML｜invoke name="wr', ["a"]),
        (
            "<｜DSML｜tool_calls>\n" + invoke(parameter("count", "1")).removesuffix("</｜DSML｜invoke>"),
            [("write", '{"count": 1…')],
        ),
        ("<｜DSML｜tool_calls>\n" + invoke(parameter("count", "12")).partition("2<")[0], [("write", '{"count": 1…')]),
        ("<｜DSML｜tool_calls>\n" + invoke('{"a": [1').removesuffix("</｜DSML｜invoke>"), [("write", '{"a": [1…')]),
        (
            "<｜DSML｜tool_calls>\n" + invoke(parameter("input", '{"bo')).partition("bo")[0],
            [("write", '{"input": {"…')],
        ),
    ],
)
def test_a_cut_call_is_never_closed_up(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "deepseek_v4", tools=TOOLS, finish="length") == wanted
