"""What a stream of the Responses API must be, checked against OpenAI's own schemas and against itself.

``schemas/openai_responses.json`` is a part of github.com/openai/openai-openapi (MIT, see the licence beside it).
"""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

SCHEMAS = Path(__file__).parent / "schemas" / "openai_responses.json"
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
BEYOND = ("response.cancelled",)
"""Events that OpenAI's document does not have."""


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(SCHEMAS.read_text())
    return document


@cache
def _validator(name: str) -> Draft202012Validator:
    components = _document()["components"]
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def check_schema(name: str, document: Any) -> None:
    """``name``: Response, ResponseItemList, CompactResource, or a stream event's."""
    problem = best_match(_validator(name).iter_errors(_without_open_usage(document)))
    assert problem is None, f"{name}: {'/'.join(map(str, problem.absolute_path))}: {problem.message[:300]}"


def _without_open_usage(value: Any) -> Any:
    """``usage`` is null until the end, as the real API sends it, although its own document knows no null there."""
    if not isinstance(value, dict):
        return value
    return {key: _without_open_usage(item) for key, item in value.items() if key != "usage" or item is not None}


def parse_events(data: bytes | str) -> list[dict[str, Any]]:
    """The events of a whole stream; each has its name in ``event`` and one ``data`` line. Comments and the sentinel are skipped."""
    text = data.decode() if isinstance(data, bytes) else data
    events = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if not block or block.startswith(":") or lines == ["data: [DONE]"]:
            continue
        assert len(lines) == 2, block
        assert lines[0].startswith("event: "), block
        event = json.loads(lines[1].removeprefix("data: "))
        assert event["type"] == lines[0].removeprefix("event: ")
        events.append(event)
    return events


def check_stream(events: list[dict[str, Any]], *, first_number: int = 0) -> dict[str, Any]:
    """Check schemas, order, numbers, and that deltas, done events and the final response agree. Return the final response."""
    for event in events:
        if event["type"] not in BEYOND:
            check_schema(_document()["events"][event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(first_number, first_number + len(events)))
    assert events[-1]["type"] in TERMINAL
    assert sum(event["type"] in TERMINAL for event in events) == 1
    if first_number == 0:
        assert events[0]["type"] == "response.created"
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    final: dict[str, Any] = events[-1]["response"]
    for index, item in enumerate(final["output"]):
        _check_item([event for event in events if event.get("output_index") == index], item, whole=first_number == 0)
    assert len({item["id"] for item in final["output"]}) == len(final["output"])
    _check_one_at_a_time(events)
    return final


def _check_item(events: list[dict[str, Any]], item: dict[str, Any], *, whole: bool) -> None:
    if whole:
        assert events[0]["type"] == "response.output_item.added"
        assert events[0]["item"]["status"] == "in_progress"
    assert {event.get("item_id", item["id"]) for event in events} == {item["id"]}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done in ([item], []), item
    if not done:
        assert item["status"] == "incomplete"
    kinds = Counter(event["type"] for event in events)
    for name, text in _texts(item).items():
        deltas = "".join(event["delta"] for event in events if event["type"] == f"{name}.delta")
        assert not whole or deltas == text, name
        ends = [event for event in events if event["type"] == f"{name}.done"]
        assert [event.get("text", event.get("arguments", event.get("input"))) for event in ends] == [text] * len(ends)
        assert len(ends) == len(done)
    assert all(number == 1 for kind, number in kinds.items() if not kind.endswith(".delta")), kinds


def _texts(item: dict[str, Any]) -> dict[str, str]:
    match item["type"]:
        case "message":
            return {"response.output_text": item["content"][0]["text"]}
        case "reasoning":
            texts = {"response.reasoning_text": item["content"][0]["text"]}
            if item["summary"]:
                texts["response.reasoning_summary_text"] = item["summary"][0]["text"]
            return texts
        case "function_call":
            return {"response.function_call_arguments": item["arguments"]}
        case "custom_tool_call":
            return {"response.custom_tool_call_input": item["input"]}
        case _:
            return {}


def _check_one_at_a_time(events: list[dict[str, Any]]) -> None:
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == sorted(indexes)
