import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_parsers import python_literals
from kvbus_parsers.coercion import Schema

schema = Schema.of


def of(*types: str) -> Schema:
    return schema({"type": list(types)})


@pytest.mark.parametrize(
    ("types", "text", "wanted"),
    [
        (["string"], "007", '"007"'),
        (["string"], "null", '"null"'),
        (["string"], '{"a": 1}', '"{\\"a\\": 1}"'),
        (["string"], "漢\t🧭", '"漢\\t🧭"'),
        (["integer"], "6", "6"),
        (["integer"], "+06", "6"),
        (["integer"], "-0", "0"),
        (["integer"], " 6\n", "6"),
        (["integer"], "6.0", '"6.0"'),
        (["integer"], "soon", '"soon"'),
        (["integer"], " soon ", '" soon "'),
        (["integer"], "", '""'),
        (["integer"], "٣", '"٣"'),
        (["number"], "12.50", "12.50"),
        (["number"], "5", "5"),
        (["number"], "1e3", "1e3"),
        (["number"], ".5", "0.5"),
        (["number"], "+1.5", "1.5"),
        (["number"], "00.5", "0.5"),
        (["number"], "inf", '"inf"'),
        (["number"], "NaN", '"NaN"'),
        (["number"], "1e400", '"1e400"'),
        (["number"], "1_000", '"1_000"'),
        (["boolean"], "TRUE", "true"),
        (["boolean"], "false", "false"),
        (["boolean"], "0", "false"),
        (["boolean"], "yes", '"yes"'),
        (["null", "string"], "NULL", "null"),
        (["null", "string"], "none yet", '"none yet"'),
        (["integer"], "null", '"null"'),
        (["string", "integer"], "5", "5"),
        (["string", "integer"], " 5", '" 5"'),
        (["integer", "boolean"], "1", "1"),
        (["object"], '{"a": [1, {"b": null}]}', '{"a": [1, {"b": null}]}'),
        (["object"], "[1]", '"[1]"'),
        (["object"], '{"a": ', '"{\\"a\\": "'),
        (["array"], "{}", '"{}"'),
        (["array", "object"], "{}", "{}"),
        (["array"], "[1, 2.50]", "[1, 2.50]"),
        (["array"], "[1e400]", '"[1e400]"'),
        (["array"], "[NaN]", '"[NaN]"'),
        (["str"], "1", '"1"'),
        (["int"], "1", "1"),
        (["any"], "1", '"1"'),
    ],
)
def test_the_first_type_that_fits_wins_and_text_that_fits_none_stays_a_string(
    types: list[str], text: str, wanted: str
) -> None:
    assert of(*types).to_json(text) == wanted


def test_big_integers_keep_their_digits() -> None:
    digits = "9" * 6000
    assert of("integer").to_json(digits) == digits
    assert of("number").to_json("-" + digits) == "-" + digits


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{'a': True, 'b': None, 'c': (1, -2)}", {"a": True, "b": None, "c": [1, -2]}),
        ('{\'it\\\'s\': "say \\"hi\\""}', {"it's": 'say "hi"'}),
        (
            "{'path': 'C:\\d', 'n': 'x\\ny', 'u': '\\u6f22', 'x': '\\x41'}",
            {"path": "C:\\d", "n": "x\ny", "u": "漢", "x": "A"},
        ),
        ("{'a': .5, 'b': +3,}", {"a": 0.5, "b": 3}),
        ("{\"a\": true, 'b': null}", {"a": True, "b": None}),
        ("{1: 1_0, True: {2, 3}}", {"1": 10, "true": [2, 3]}),
    ],
)
def test_a_python_literal_is_the_second_try(text: str, wanted: dict[str, Any]) -> None:
    assert json.loads(of("object").to_json(text)) == wanted


@pytest.mark.parametrize(
    "text", ["{'a': open('x')}", "{(1): [2}", "{'a': 1, 2}", "{'a'}", "{'a': '", "{'a': \\d}", "{'a': 1 + 0}"]
)
def test_what_is_no_literal_stays_a_string(text: str) -> None:
    assert of("object").to_json(text) == json.dumps(text)


def test_deep_nesting_stays_a_string() -> None:
    text = "[" * 100_000
    assert of("array").to_json(text) == json.dumps(text)
    text = "[" * 100_000 + "]" * 100_000
    assert of("array").to_json(text) == json.dumps(text)


def test_a_lone_surrogate_stays_the_escape_that_it_was() -> None:
    node = {"type": "object", "properties": {"days": {"type": "integer"}}}
    for text in (r'{"days": "3", "a": "\ud83d"}', r"{'days': '3', 'a': '\ud83d'}"):
        assert schema(node).to_json(text) == r'{"days": 3, "a": "\ud83d"}'


@pytest.mark.parametrize("value", ["1e400", "9" * 5000, f'"{"9" * 5000}"'])
def test_a_container_with_a_number_that_can_not_be_read_stays_a_string(value: str) -> None:
    text = f'{{"days": {value}}}'
    assert schema({"type": "object", "properties": {"days": {"type": "integer"}}}).to_json(text) == json.dumps(text)


def test_values_inside_are_coerced_by_their_schemas() -> None:
    node = {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "port": {"type": "string"},
            "stops": {"type": "array", "items": {"type": "object", "properties": {"lat": {"type": "number"}}}},
            "pair": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "boolean"}},
        },
        "additionalProperties": {"type": "boolean"},
    }
    value = {
        "days": "3",
        "port": "10",
        "stops": [{"lat": "1.5"}, {"lat": 2}],
        "pair": ["1", "true"],
        "wet": "false",
        "deep": {"a": "1"},
    }
    assert json.loads(schema(node).to_json(json.dumps(value))) == {
        "days": 3,
        "port": "10",
        "stops": [{"lat": 1.5}, {"lat": 2}],
        "pair": [1, True],
        "wet": False,
        "deep": {"a": "1"},
    }


def test_json_that_needs_no_change_stays_as_the_model_wrote_it() -> None:
    text = '{"b":1.10,  "a":100000000000000000000000}'
    assert schema({"type": "object", "properties": {"b": {"type": "number"}}}).to_json(text) == text


def test_types_are_the_union_of_all_that_the_schema_says() -> None:
    root = {
        "$defs": {"Days": {"type": "integer"}, "a/b": {"enum": [None, 1.5]}},
        "anyOf": [
            {"$ref": "#/$defs/Days"},
            {"oneOf": [{"type": "boolean"}, {"allOf": [{"type": "array"}]}]},
            {"$ref": "#/$defs/a~1b"},
        ],
        "enum": ["x", {}],
    }
    assert schema(root).types == {"integer", "boolean", "array", "null", "number", "string", "object"}
    assert schema({"const": True}).types == {"boolean"}
    assert schema({"properties": {}}).types == {"object"}
    assert schema({"items": {}}).types == {"array"}


def test_cyclic_refs_end() -> None:
    root: dict[str, Any] = {
        "$defs": {
            "Node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"$ref": "#/$defs/Leaf"}]},
            "Leaf": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "n": {"type": "integer"}}},
        },
        "$ref": "#/$defs/Node",
    }
    assert json.loads(schema(root).to_json('{"next": {"next": {"n": "1"}, "n": "2"}}')) == {
        "next": {"next": {"n": 1}, "n": 2}
    }
    assert schema({"$ref": "#"}).to_json("1") == '"1"'


@pytest.mark.parametrize(
    "node",
    [
        None,
        True,
        [],
        "string",
        {"type": 5, "enum": 3, "anyOf": {}, "$ref": 4, "properties": [], "items": 7, "prefixItems": 1},
        {"$ref": "#/nowhere/at/all"},
        {"$ref": "https://example.org/schema.json"},
        {"type": {"not": "a type"}},
    ],
)
def test_a_broken_schema_knows_nothing(node: object) -> None:
    assert schema(node).to_json("1") == '"1"'
    assert schema(node).member("a").item(0).to_json("1") == '"1"'
    assert not schema(node).declares("a")


def test_without_a_schema_an_argument_is_a_string() -> None:
    tool = schema({"properties": {"n": {"type": "integer"}}})
    assert tool.member("n").to_json("1") == "1"
    assert tool.member("other").to_json("1") == '"1"'
    assert Schema().member("n").to_json("1") == '"1"'
    assert tool.declares("n")
    assert not tool.declares("other")


@pytest.mark.parametrize(
    ("types", "start", "is_text"),
    [
        (["string"], "", True),
        ([], "", True),
        (["integer"], "x", False),
        (["string", "null"], "", False),
        (["string", "null"], "nul", False),
        (["string", "null"], "nulls", True),
        (["string", "integer"], "-4", False),
        (["string", "integer"], "a", True),
        (["string", "boolean"], "Tr", False),
        (["string", "boolean"], "Try", True),
        (["string", "object"], "  ", False),
        (["string", "array"], " (", False),
        (["string", "array"], "no", True),
    ],
)
def test_a_string_is_known_as_soon_as_nothing_else_can_come_of_it(types: list[str], start: str, is_text: bool) -> None:
    assert of(*types).is_text(start) == is_text


TYPE_LISTS = st.lists(st.sampled_from(["null", "integer", "number", "boolean", "object", "array", "string"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEXTS = st.text() | st.text(alphabet="-+.e01a\"'\\{}[](),: nulltrueTFN\n") | VALUES.map(repr) | VALUES.map(json.dumps)


@given(TYPE_LISTS, TEXTS)
def test_the_result_is_strict_json_and_never_of_a_type_that_was_not_asked_for(types: list[str], text: str) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(word)

    value = json.loads(of(*types).to_json(text), parse_constant=refuse)
    if isinstance(value, str):
        assert value == text
    else:
        name = {type(None): "null", bool: "boolean", dict: "object", list: "array", int: "integer", float: "number"}[
            type(value)
        ]
        assert name in types or (name == "integer" and "number" in types)


@given(TYPE_LISTS, TEXTS, st.integers(min_value=0))
def test_a_string_that_is_known_early_stays_one(types: list[str], text: str, length: int) -> None:
    if of(*types).is_text(text[:length]):
        assert of(*types).to_json(text) == json.dumps(text, ensure_ascii=False)


@given(VALUES)
def test_a_python_literal_has_the_value_that_python_gives_it(value: object) -> None:
    assert json.loads(python_literals.json_text(repr(value))) == value
