from collections.abc import Callable

import pytest

from kvbus_parsers import CallArguments, CallEnded, open_parser

Read = Callable[..., list[object]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {"properties": {"body": {"type": "string"}, "count": {"type": "integer"}}},
        },
    }
]


def block(inner: str) -> str:
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def test_a_string_goes_out_as_it_comes() -> None:
    parser = open_parser(tool="minimax_m2", tools=TOOLS)
    parser.feed('<minimax:tool_call>\n<invoke name="write">\n<parameter name="body">')
    assert parser.feed("a\n</par") == [CallArguments(0, "a\\n")]
    assert parser.feed("k") == [CallArguments(0, "</park")]


def test_a_call_tells_what_the_model_wrote_per_argument() -> None:
    parser = open_parser(tool="minimax_m2", tools=TOOLS)
    ended = parser.feed(block('<invoke name="write"><parameter name="count"> 07</parameter></invoke>'))[-1]
    assert isinstance(ended, CallEnded)
    assert ended.arguments == '{"count": 7}'
    assert ended.written == {"count": " 07"}


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [
        pytest.param(
            "<invoke name='f'><parameter name='a'>1</parameter></invoke>", [("f", '{"a": "1"}')], id="single quotes"
        ),
        pytest.param("<invoke name=f><parameter name=a>1</parameter></invoke>", [("f", '{"a": "1"}')], id="no quotes"),
        pytest.param('<invoke name = "f" id="7" ></invoke>', [("f", "{}")], id="more attributes"),
        pytest.param('<invoke name="a>b"></invoke>', [("a>b", "{}")], id="a name with the end of a tag"),
        pytest.param('<invoke name="f"/><invoke name=g/>', [("f", "{}"), ("g", "{}")], id="tags that close themselves"),
        pytest.param('<invoke name="f"><parameter name="a"/></invoke>', [("f", '{"a": ""}')], id="an empty parameter"),
        pytest.param(
            '<invoke name="f"></invoke> and <invoke name="g"></invoke>',
            [("f", "{}"), "and", ("g", "{}")],
            id="text in between",
        ),
        pytest.param(
            '<invoke name="f"><parameter name="a">1</invoke>', [("f", '{"a": "1"}')], id="no end of the value"
        ),
        pytest.param(
            '<invoke name="f"><parameter name="a">1</parameter><invoke name="g"></invoke>',
            [("f", '{"a": "1"}'), ("g", "{}")],
            id="no end",
        ),
        pytest.param(
            '<invoke name="f"><parameter name="a">1</parameter>', [("f", '{"a": "1"}')], id="the block ends the call"
        ),
        pytest.param(
            '<invoke name="f"><parameter name="a">x</invoke> y</parameter></invoke>',
            [("f", '{"a": "x</invoke> y"}')],
            id="data",
        ),
        pytest.param('<invoke name="f">{"a": 1}</invoke>', [("f", '{"a": 1}')], id="JSON for parameters"),
        pytest.param(
            '<invoke name="f"><parameters>1</invoke>', [("f", "<parameters>1")], id="another tag for parameters"
        ),
        pytest.param(
            '<invoke name="f"><parameter>1</parameter></invoke>',
            [("f", "<parameter>1")],
            id="a parameter without a name",
        ),
        pytest.param('<invoke>1</invoke><invoke name="g"></invoke>', [">1", ("g", "{}")], id="a call without a name"),
    ],
)
def test_a_block_that_is_not_quite_the_template_s(read: Read, inner: str, wanted: list[object]) -> None:
    assert read(block(inner), "minimax_m2") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param("a <minimax:tool_call> b", ["a <minimax:tool_call> b"], id="the marker in prose"),
        pytest.param('a <invoke name="f"> b', ['a <invoke name="f"> b'], id="a call without a block"),
        pytest.param("a<minimax:tool_call>\n</minimax:tool_call>", ["a"], id="an empty block"),
        pytest.param('<minimax:tool_call><invoke name="f"></invoke>\nb', [("f", "{}"), "b"], id="no end of the block"),
        pytest.param("a</minimax:tool_call>", ["a"], id="a stray closer"),
    ],
)
def test_a_block_makes_calls_of_what_is_in_it(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "minimax_m2") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("a<minimax:tool_call>", ["a"]),
        ("a<minimax:tool_call>\n<inv", ["a"]),
        ('a<minimax:tool_call>\n<invoke name="wri', ["a"]),
        ('<minimax:tool_call><invoke name="write">\n<para', [("write", "…")]),
        ('<minimax:tool_call><invoke name="write"><parameter name="co', [("write", "…")]),
        ('<minimax:tool_call><invoke name="write"><parameter name="count">1', [("write", '{"count": 1…')]),
        ('<minimax:tool_call><invoke name="write"><parameter name="count">1</parameter>', [("write", '{"count": 1…')]),
        ('<minimax:tool_call><invoke name="write"></invoke>\n<invoke name="wr', [("write", "{}")]),
    ],
)
def test_a_cut_call_is_never_closed_up(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "minimax_m2", tools=TOOLS, finish="length") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param('<function name="f"><param name="a">1</param></function>', [("f", '{"a": "1"}')], id="a call"),
        pytest.param('<function name="f"/>', [("f", "{}")], id="a tag that closes itself"),
        pytest.param(
            '<function name="f"><param name="a">\n<![CDATA[x]]>]]>\n</param></function>',
            [("f", '{"a": "x]]>"}')],
            id="CDATA",
        ),
        pytest.param(
            '<function name="f"><param name="a"> <b> </param></function>', [("f", '{"a": " <b> "}')], id="no CDATA"
        ),
        pytest.param('<function name="f"><param name="a"><![CDATA[1', [("f", '{"a": "1…')], id="cut in CDATA"),
        pytest.param('the <function name="f"> tag', ['the <function name="f"> tag'], id="prose"),
        pytest.param("<functional", ["<functional"], id="another word"),
    ],
)
def test_minicpm_has_no_block_and_may_use_cdata(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "minicpm5") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"></steptml:invoke>a',
            [("f", "{}"), "a"],
            id="bare",
        ),
        pytest.param("a<｜tool_calls_begin｜><｜tool_calls_end｜>", ["a"], id="an empty section"),
        pytest.param(
            "<｜tool_calls_begin｜><steptml:invoke name='f'></steptml:invoke><｜tool_calls_end｜>",
            [("f", "{}")],
            id="no tokens",
        ),
        pytest.param(
            "<｜tool_calls_begin｜><｜tool_call_begin｜>what<｜tool_call_end｜><｜tool_calls_end｜>",
            ["what"],
            id="no call",
        ),
    ],
)
def test_step_3_has_special_tokens_around_its_calls(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "step3") == wanted
