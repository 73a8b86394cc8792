"""A response before it has said anything: what it repeats of its request."""

from typing import Any

import msgspec
from msgspec import UNSET

from kvbus_protocols.responses.request import ResponsesRequest, TextFormat
from kvbus_protocols.responses.response import Reasoning, Response, Text
from kvbus_tokenizers import GenerationConfig

SERVICE_TIER = "default"
"""The only one there is."""


def blank_response(
    request: ResponsesRequest, response_id: str, defaults: GenerationConfig, *, created_at: int
) -> Response:
    """``defaults``: the model's own, for what the request leaves open."""
    reasoning = request.reasoning
    return Response(
        id=response_id,
        created_at=created_at,
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.token_limit,
        max_tool_calls=request.max_tool_calls,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=Reasoning(
            effort=reasoning.effort if reasoning is not None else None,
            summary=(reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        ),
        safety_identifier=request.safety_identifier,
        service_tier=SERVICE_TIER,
        store=request.wants_store,
        temperature=_first(request.temperature, defaults.temperature),
        text=_text(request),
        tool_choice=request.tool_choice or "auto",
        tools=[_tool(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=_first(request.top_p, defaults.top_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        truncation=request.truncation or "disabled",
        user=request.user if request.user is not None else UNSET,
        metadata=request.metadata or {},
    )


def _first(asked: float | None, configured: float | None) -> float:
    if asked is not None:
        return asked
    return configured if configured is not None else 1.0


def _text(request: ResponsesRequest) -> Text:
    wish = request.text
    given = wish.format if wish is not None else None
    plain: dict[str, Any] = msgspec.to_builtins(given or TextFormat(type="text"))
    return Text(
        format={name: value for name, value in plain.items() if value is not None},
        verbosity=wish.verbosity if wish is not None and wish.verbosity is not None else UNSET,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As it came; of a function, strict readers want every key."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
