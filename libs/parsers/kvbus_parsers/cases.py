"""Cases as JSON: an output, and how it is to be parsed. For conformance files and for trying a format at the command line.

A case is an object with ``parser`` (a name, or ``{"tool", "reasoning"}``), ``model_output``, and optionally ``id``, ``kind``
(``reasoning``: the one name is a reasoning format), ``finish``, ``tools``, ``request`` (``prompt_opens_reasoning``,
``prompt_closed_reasoning``, ``grammar_active_from_first_token``, ``tool_choice``, ``chat_template_kwargs``) and ``engine_mode``
(``guided_json_array``, ``guided_json_arguments``, ``guided_json_arguments_after_reasoning``).
"""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from kvbus_parsers import json_text
from kvbus_parsers.collect import CallSegment, Collected, ReasoningSegment, Segment, collect
from kvbus_parsers.parser import FinishReason, Parser, open_parser

JsonObject = dict[str, Any]


class BadCaseError(ValueError):
    """A case that can not be read."""


def run_case(case: Mapping[str, Any], chunks: Iterable[str]) -> Collected:
    """Parses the output of a case, fed in these pieces. Raises `BadCaseError`, `names.UnknownFormatError`."""
    finish: FinishReason = case.get("finish", "stop")
    if finish not in get_args(FinishReason):
        raise BadCaseError(f"finish is {finish!r}, not one of {', '.join(get_args(FinishReason))}")
    parser = case_parser(case)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return collect(events + parser.finish(finish), finish)


def case_parser(case: Mapping[str, Any]) -> Parser:
    """The parser that a case asks for."""
    request = _object(case, "request")
    named = case.get("parser")
    if isinstance(named, str):
        named = {"reasoning" if case.get("kind") == "reasoning" else "tool": named}
    if not isinstance(named, Mapping):
        raise BadCaseError("parser is neither a name nor an object")
    prompt_tells = request.get("prompt_opens_reasoning") or request.get("prompt_closed_reasoning")
    return open_parser(
        tool=_name(named, "tool"),
        reasoning=None if request.get("grammar_active_from_first_token") else _name(named, "reasoning"),
        tools=_tools(case, request),
        reasoning_open=bool(request.get("prompt_opens_reasoning")) if prompt_tells else None,
        calls=_calls(case, request),
        nonempty_content=bool(_object(request, "chat_template_kwargs").get("force_nonempty_content")),
    )


def result(collected: Collected) -> JsonObject:
    """The result as JSON: segments in order, and the flat fields. Arguments are parsed, or text where they are no JSON object, or
    one that a reader of JSON refuses: with numbers too large, or nested too deeply.
    """
    return {
        "segments": [_segment(segment) for segment in collected.segments],
        "content": collected.content,
        "reasoning": collected.reasoning,
        "tool_calls": [_call(call) for call in collected.tool_calls],
        "finish_reason": collected.finish_reason,
    }


def _segment(segment: Segment) -> JsonObject:
    if isinstance(segment, CallSegment):
        return {"type": "tool_call", **_call(segment)}
    return {"type": "reasoning" if isinstance(segment, ReasoningSegment) else "text", "text": segment.text}


def _call(call: CallSegment) -> JsonObject:
    try:
        arguments: object = json_text.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    parsed = arguments if isinstance(arguments, dict) else call.arguments
    return {"id": call.id, "name": call.name, "arguments": parsed, "raw": call.arguments}


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    if not isinstance(value, Mapping | None):
        raise BadCaseError(f"{key} is no object")
    return value or {}


def _name(named: Mapping[str, Any], key: str) -> str | None:
    value = named.get(key)
    if not isinstance(value, str | None):
        raise BadCaseError(f"the {key} parser is no name")
    return value


def _tools(case: Mapping[str, Any], request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = case.get("tools", request.get("tools"))
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadCaseError("tools is no list of objects")
    return tools


def _calls(case: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    mode = case.get("engine_mode")
    if mode == "guided_json_array":
        return "guided_array"
    if mode in ("guided_json_arguments", "guided_json_arguments_after_reasoning"):
        choice = request.get("tool_choice")
        offered = [tool.get("function", tool) for tool in _tools(case, request)]
        chosen = (
            choice.get("function", choice) if isinstance(choice, Mapping) else offered[0] if len(offered) == 1 else {}
        )
        if not isinstance(chosen, Mapping) or not isinstance(chosen.get("name"), str):
            raise BadCaseError("a guided mode of arguments needs a tool_choice that names the tool")
        return f"guided_arguments:{chosen['name']}"
    if mode is not None:
        raise BadCaseError(f"unknown engine_mode {mode!r}")
    return "drop" if request.get("tool_choice") == "none" else "auto"
