"""Structured output from the whole system with the small real model."""

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from kvbus_testkit.up import KvbusUp

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)

QUESTION = [{"role": "user", "content": "Name a city in France and say how many people live there, as JSON."}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 1, "maximum": 20_000_000},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "people", "capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "tell_city", "description": "Tell a city.", "parameters": CITY}},
    {
        "type": "function",
        "function": {
            "name": "wait",
            "parameters": {
                "type": "object",
                "properties": {"seconds": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["seconds"],
                "additionalProperties": False,
            },
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]


in_every_form = pytest.mark.parametrize("system", ["hermes", "qwen3_coder", "none"], indirect=True)
in_one_form = pytest.mark.parametrize("system", ["hermes"], indirect=True)


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvbusUp]:
    folder = tmp_path_factory.mktemp("up")
    with KvbusUp(folder, "--engine", "torch", "--workers", "1", "--tool-call-parser", request.param) as system:
        yield system.wait_ready(400)


def ask(system: KvbusUp, **fields: Any) -> dict[str, Any]:
    return system.chat(QUESTION, **{"max_tokens": 150, "temperature": 0, **fields})


def checked(call: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
    return arguments


@in_one_form
def test_an_answer_follows_its_schema(system: KvbusUp) -> None:
    answer = ask(system, response_format=FORMAT)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    assert ask(system, response_format=FORMAT)["choices"] == answer["choices"]


@in_one_form
def test_streamed_and_whole_answers_are_equal(system: KvbusUp) -> None:
    whole = ask(system, response_format=FORMAT)
    stream = system.stream(QUESTION, max_tokens=150, temperature=0, response_format=FORMAT)
    assert stream.done
    assert stream.text == whole["choices"][0]["message"]["content"]


@in_one_form
def test_json_mode_gives_an_object(system: KvbusUp) -> None:
    (choice,) = ask(system, response_format={"type": "json_object"})["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")


@in_one_form
def test_each_of_several_choices_follows_the_schema(system: KvbusUp) -> None:
    answer = ask(system, n=3, temperature=1.0, seed=1, response_format=FORMAT)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)


@in_every_form
def test_a_required_call_is_made(system: KvbusUp) -> None:
    answer = ask(system, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    checked(call)


@in_every_form
@pytest.mark.parametrize("name", ["tell_city", "wait"])
def test_a_named_tool_is_called(system: KvbusUp, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    (answer,) = ask(system, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == name
    checked(call)


@in_every_form
def test_a_required_call_streams(system: KvbusUp) -> None:
    stream = system.stream(
        QUESTION, max_tokens=150, temperature=0, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    pieces = [
        call
        for chunk in stream.chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or []
    ]
    call = {
        "function": {
            "name": pieces[0]["function"]["name"],
            "arguments": "".join(piece["function"].get("arguments", "") for piece in pieces),
        }
    }
    checked(call)
    assert not stream.text.strip()


@in_one_form
@pytest.mark.parametrize(
    ("schema", "strict", "param"),
    [
        ({"type": "objct"}, False, "response_format"),
        ({"type": "object", "properties": []}, False, "response_format"),
        ({"type": "array", "uniqueItems": True}, True, "response_format"),
        ({"type": "string", "pattern": "(?=a)b"}, False, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_a_bad_request(
    system: KvbusUp, schema: dict[str, Any], strict: bool, param: str, stream: bool
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": strict}}
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(system, response_format=wanted, stream=stream)
    assert caught.value.code == 400
    error = json.loads(caught.value.read())["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
