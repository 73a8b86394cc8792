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
                "properties": {
                    "body": {"type": "string"},
                    "count": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "integer"}},
                    "grid": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                    "place": {
                        "type": "object",
                        "properties": {"spots": {"type": "array", "items": {"type": "string"}}},
                    },
                    "any": {},
                }
            },
        },
    }
]


def tags(text: str) -> str:
    """With the namespace token where a tag is meant."""
    return text.replace("‹", "]<]minimax[>[<").replace("›", ">")


def invoke(arguments: str, name: str = "write") -> str:
    return tags(f'‹tool_call›\n‹invoke name="{name}"›\n{arguments}\n‹/invoke›\n‹/tool_call›')


def test_a_string_goes_out_as_it_comes() -> None:
    parser = open_parser(tool="minimax_m3", tools=TOOLS)
    parser.feed(tags('‹tool_call›‹invoke name="write"›‹body›'))
    assert parser.feed("a\n]<]mini") == [CallArguments(0, "a\\n")]
    assert parser.feed("x") == [CallArguments(0, "]<]minix")]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("‹body›1‹/body›‹count›2‹/count›", '{"body": "1", "count": 2}'),
        ("‹tags›‹item›1‹/item›\n‹item›2‹/item›\n‹/tags›", '{"tags": [1, 2]}'),
        ("‹tags›[1, 2]‹/tags›", '{"tags": [1, 2]}'),
        ("‹tags›\n‹/tags›‹place›‹/place›", '{"tags": [], "place": {}}'),
        ("‹grid›‹item›‹item›1‹/item›‹/item›‹item›‹/item›‹/grid›", '{"grid": [[1], []]}'),
        (
            "‹place›‹spots›‹item›a‹/item›‹/spots›‹x› y ‹/x›‹/place›",
            '{"place": {"spots": ["a"], "x": " y "}}',
        ),
        ("‹place›in ‹x›1‹/x› out‹/place›", '{"place": {"x": "1", "$text": "in  out"}}'),
        ("‹any›‹item›1‹/item›‹item›2‹/item›‹/any›", '{"any": {"item": ["1", "2"]}}'),
        ("‹any›1 < 2‹/any›‹new›x‹/new›", '{"any": "1 < 2", "new": "x"}'),
        ("‹body›a‹item›b‹/item›‹/body›", '{"body": "a]<]minimax[>[<item>b]<]minimax[>[</item>"}'),
        ("‹body›a", '{"body": "a\\n"}'),
        ("what? ‹/x›", "what?"),
        ("", "{}"),
    ],
)
def test_elements_become_what_the_schema_says(read: Read, arguments: str, wanted: str) -> None:
    assert read(invoke(tags(arguments)), "minimax_m3", tools=TOOLS) == [("write", wanted)]


def test_a_call_tells_what_the_model_wrote_per_argument() -> None:
    arguments = tags("‹count› 7‹/count›‹tags›\n‹item›1‹/item›‹/tags›")
    ended = open_parser(tool="minimax_m3", tools=TOOLS).feed(invoke(arguments))[-1]
    assert isinstance(ended, CallEnded)
    assert ended.arguments == '{"count": 7, "tags": [1]}'
    assert ended.written == {"count": " 7", "tags": tags("\n‹item›1‹/item›")}


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        pytest.param("a" + invoke("") + "b", ["a", ("write", "{}"), "b"], id="text around"),
        pytest.param(invoke("", "f") + invoke("", "g"), [("f", "{}"), ("g", "{}")], id="two blocks"),
        pytest.param(tags('‹invoke name="f"›‹/invoke›'), [("f", "{}")], id="no block"),
        pytest.param(
            tags('‹invoke name="f"›‹invoke name="g"›‹/invoke›'), [("f", "{}"), ("g", "{}")], id="no end of a call"
        ),
        pytest.param("a ]<]minimax[>[ b", ["a ]<]minimax[>[ b"], id="the token in prose"),
        pytest.param("a]<]minimax[>[ \n<tool_call>b", ["ab"], id="space behind the token"),
    ],
)
def test_calls_and_what_stands_around_them(read: Read, output: str, wanted: list[object]) -> None:
    assert read(output, "minimax_m3") == wanted


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("a‹tool_call›\n‹inv", ["a"]),
        ('a‹tool_call›\n‹invoke name="wri', ["a"]),
        ('‹invoke name="write"›‹body›x', [("write", '{"body": "x…')]),
        ('‹invoke name="write"›‹count›12', [("write", '{"count": 12…')]),
        ('‹invoke name="write"›‹tags›‹item›1', [("write", '{"tags": ]<]minimax[>[<item>1…')]),
        ('‹invoke name="write"›‹count›12‹/count›', [("write", '{"count": 12…')]),
    ],
)
def test_a_cut_call_is_never_closed_up(read: Read, output: str, wanted: list[object]) -> None:
    assert read(tags(output), "minimax_m3", tools=TOOLS, finish="length") == wanted


def test_deep_nesting_ends_in_text_and_not_in_an_error(read: Read) -> None:
    output = invoke(tags("‹any›" + "‹a›" * 200 + "‹/a›" * 200 + "‹/any›"))
    [call] = read(output, "minimax_m3")
    assert isinstance(call, tuple)
    assert call[1].startswith('{"any": {"a": {"a": ')
