"""Arguments of Python calls as JSON: against Python's own reading, and where models leave Python's grammar."""

import ast
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus_parsers.python_calls import arguments
from kvbus_parsers.python_literals import json_text
from kvbus_parsers.source import Source, markers


def read(text: str, *, pieces: int = 0) -> tuple[str, str | None]:
    """The JSON text of what stands before the closing parenthesis, and what was left unread; None: the input ended first."""
    source, out = Source(), list[str]()
    step = arguments(source, out.append)
    for at in range(0, len(text), pieces or len(text) or 1):
        source.feed(text[at : at + (pieces or len(text))])
        try:
            next(step)
        except StopIteration as end:
            rest = source._buffer[source._at :]
            return "".join(out), rest + text[at + (pieces or len(text)) :] if end.value else None
    source.finish(cut=True)
    with pytest.raises(StopIteration) as stop:
        next(step)
    return "".join(out), "" if stop.value.value else None


def value(text: str) -> Any:
    out, rest = read(f"a={text}) tail", pieces=1)
    assert rest == " tail"
    return json.loads(out)["a"]


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.text(), min_size=1, max_size=3)
    ),
    max_leaves=12,
)


def as_json(python: object) -> Any:
    if isinstance(python, dict):
        return {key: as_json(member) for key, member in python.items()}
    if isinstance(python, list | tuple | set):
        return [as_json(member) for member in python]
    return python


@given(LITERALS, st.integers(1, 9))
@example(((1,),), 1)
@example({"a": ()}, 1)
def test_what_python_writes_is_read_with_the_same_value(python: object, pieces: int) -> None:
    out, rest = read(f"a={python!r}, b = {python!r} ,) tail", pieces=pieces)
    assert rest == " tail"
    assert json.loads(out) == {"a": as_json(python), "b": as_json(python)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("-33.9", -33.9),
        ("- 5", -5),
        ("--5", 5),
        ("+3", 3),
        ("007", 7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0b101", 5),
        ("-0o17", -15),
        (".5", 0.5),
        ("5.", 5.0),
        ("01.50e-3", 0.0015),
        ("1e5", 1e5),
        ("9" * 5000, None),
        ("True", True),
        ("true", True),
        ("None", None),
        ("null", None),
        ("()", []),
        ("(1)", 1),
        ("(1,)", [1]),
        ("(1, (2, 3))", [1, [2, 3]]),
        ("{1, 2}", [1, 2]),
        ("{'a', 'b'}", ["a", "b"]),
        ("{}", {}),
        ("{1: 2, None: 3, 'x': {'y': [4,],},}", {"1": 2, "null": 3, "x": {"y": [4]}}),
        ("('a' 'b')", "ab"),
        ("[1, # one\n 2]", [1, 2]),
    ],
)
def test_literals(text: str, wanted: object) -> None:
    out, rest = read(f"a={text})")
    assert rest == ""
    if len(text) > 4000:
        assert out == f'{{"a": {text}}}'
    else:
        assert json.loads(out) == {"a": wanted}
        assert type(json.loads(out)["a"]) is type(wanted)


@pytest.mark.parametrize(
    "text",
    [
        r"'it\'s'",
        r'"a\tb\n\x41\u00e9\U0001F600\101\0\\\\"',
        r"r'C:\new\'x'",
        "'''it's \"\"\" here'''",
        '"""a "quoted" \\""" line"""',
        r"'\N{BULLET}'",
        "''",
        '""""""',
        "'a' \"b\"  r'\\c'",
        "u'x'",
        r"'end\\'",
        "'brackets ])}, f(a=1)'",
    ],
)
@pytest.mark.parametrize("wrap", ["{}", "[{}]", "{{'k': {}}}"])
def test_string_literals_mean_what_they_mean_in_python(text: str, wrap: str) -> None:
    assert value(wrap.format(text)) == ast.literal_eval(wrap.format(text))


def test_a_backslash_that_begins_no_escape_stays() -> None:
    assert value(r"'C:\d\x4\u12\N{NO SUCH}\N'") == "C:\\d\\x4\\u12\\N{NO SUCH}\\N"
    assert value(r"['\U99999999']") == ["\\U99999999"]


def test_bytes_are_text() -> None:
    assert value(r"b'\xe9'") == "é"
    assert value("rb'\\x'") == "\\x"


def test_line_ends_and_control_characters_may_stand_in_any_string() -> None:
    assert value("'a\nb\x00\x1bc'") == "a\nb\x00\x1bc"
    assert value("['a\nb\tc']") == ["a\nb\tc"]


def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    assert value(r"'\ud83d\ude00'") == "😀"
    assert value(r"['\ud83d\ude00']") == ["😀"]


def test_argument_names_may_be_keywords_and_names_of_other_languages() -> None:
    out, _ = read("from='a', class=1, größe=2, x-y = 3)")
    assert json.loads(out) == {"from": "a", "class": 1, "größe": 2, "x-y": 3}


def test_a_string_goes_out_while_it_is_read() -> None:
    source, out = Source(), list[str]()
    step = arguments(source, out.append)
    source.feed("body='first half")
    next(step)
    assert "".join(out) == '{"body": "first half'


@pytest.mark.parametrize(
    "text",
    [
        "foo",
        "foo(1, 'x, y)')",
        "1 + 2",
        "'a' + 'b'",
        "'x'.upper()",
        "f'{x}'",
        "[1, x]",
        "[1 2]",
        "[1,, 2]",
        "{'a': 1, 'b'}",
        "{1, 2: 3}",
        "{[1]: 2}",
        "[1: 2]",
        "3j",
        "0777x",
        "...",
        "'it's'",
        "x for x in (1, 2)",
        "lambda: 1",
        "not True",
        "",
        "nan",
    ],
)
def test_what_is_no_literal_makes_no_json_and_its_neighbours_survive(text: str) -> None:
    out, rest = read(f"a={text}, b=2) tail", pieces=1)
    assert rest == " tail"
    assert out.endswith(', "b": 2}')
    with pytest.raises(ValueError, match=r"."):
        json.loads(out)
    for word in text.replace("'", " ").split():
        assert word in out


@pytest.mark.parametrize(
    "text", ["1, 2)", "'x')", "*args)", "a=1, **{'b': 2})", "a==1)", ",)", "a=1,,b=2)", "a=1 b=2)", "a=})"]
)
def test_other_arguments_than_named_ones_make_no_json(text: str) -> None:
    out, rest = read(text)
    assert rest == ""
    with pytest.raises(ValueError, match=r"."):
        json.loads(out)


def test_a_missing_parenthesis_ends_at_the_bracket_of_the_list_and_makes_no_json() -> None:
    assert read("a=1]") == ('{"a": 1', "]")
    assert read("a=[1), g(b=2)]") == ('{"a": [1}', ", g(b=2)]")


def test_a_marker_outside_a_string_ends_the_call_and_makes_no_json() -> None:
    for text in ("a=1<end> tail", "a=<end> tail", "a=[1, (2<end> tail", "a=1, <end> tail", "a<end> tail"):
        source, out = Source(), list[str]()
        source.feed(text)
        with pytest.raises(StopIteration) as stop:
            next(arguments(source, out.append, markers("<end>")))
        assert stop.value.value
        assert source._buffer[source._at :] == "<end> tail"
        with pytest.raises(ValueError, match=r"."):
            json.loads("".join(out))


@pytest.mark.parametrize("whole", ["a='text', b=[1, (2, {'x': 3})], c=True)", 'a="""x\\ny""", b=-1.5e3)'])
def test_a_cut_call_never_looks_complete(whole: str) -> None:
    for end in range(len(whole)):
        out, rest = read(whole[:end], pieces=2)
        assert rest is None
        with pytest.raises(ValueError, match=r"."):
            json.loads(out)


@given(st.text(alphabet="a1=,()[]{}'\"\\ \nr:-.#x", max_size=60), st.integers(1, 5))
def test_any_text_gives_the_same_in_any_pieces(text: str, pieces: int) -> None:
    assert read(text, pieces=pieces) == read(text)


@given(st.text(alphabet="1,()[]{}'\"\\ \nrb:-.#x_eE+", max_size=40))
def test_what_counts_as_a_literal_is_json(text: str) -> None:
    try:
        translated = json_text(text)
    except ValueError:
        return
    json.loads(translated)


@pytest.mark.parametrize(
    "text", ["(" * 5000 + ")" * 5000, "[" * 5000, "[{(" * 2000 + "]" * 5000, "'" * 20001, "\\" * 20000, "-" * 20000]
)
def test_nesting_has_no_limit_and_time_is_linear(text: str) -> None:
    source = Source()
    step = arguments(source, lambda piece: None)
    for character in "a=" + text:
        source.feed(character)
        try:
            next(step)
        except StopIteration:
            break
    assert source.scanned < 10 * len(text) + 100
