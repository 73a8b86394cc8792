"""POST /v1/responses over a real bus."""

import json
from typing import Any

import pytest

from kvbus_testkit.responses import check_schema, check_stream, parse_events

TOOL = {"type": "function", "name": "echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": content, **fields}


async def stream(cluster: Any, request: dict[str, Any], path: str = "/v1/responses") -> list[dict[str, Any]]:
    async with cluster.session.post(path, json={**request, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        data = await response.read()
    assert data.endswith(b"data: [DONE]\n\n")
    return parse_events(data)


async def test_a_whole_answer_has_exactly_the_fields_of_the_api(cluster: Any) -> None:
    await cluster.start()
    status, found = await cluster.post("/v1/responses", body(metadata={"k": "v"}, instructions="Be brief."))
    assert status == 200
    check_schema("Response", found)
    root = found["id"].removeprefix("resp_")
    assert found.pop("created_at") > 1_600_000_000
    assert found.pop("completed_at") > 1_600_000_000
    assert found == {
        "id": f"resp_{root}",
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "m",
        "output": [
            {
                "id": f"msg_{root}0000",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": found["usage"]["input_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 11,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["usage"]["input_tokens"] + 11,
        },
        "metadata": {"k": "v"},
    }


async def test_a_stream_follows_the_schemas_and_ends_in_the_whole_response(cluster: Any) -> None:
    await cluster.start()
    final = check_stream(await stream(cluster, body(tools=[TOOL, {"type": "web_search"}], tool_choice="auto")))
    assert final["status"] == "completed"
    assert final["tools"][0] == {**TOOL, "description": None, "strict": None}
    assert final["output"][0]["content"][0]["text"] == "Hello world"
