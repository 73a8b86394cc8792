"""POST /v1/responses over a real bus."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvbus_testkit.responses import check_schema, check_stream, parse_events
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.errors import ErrorCode, ErrorReply

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "context_length": 8192}
TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %} {{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
ECHO = {
    "type": "function",
    "name": "echo",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>'


def says(*pieces: str, finish: str = "stop", error: ErrorReply | None = None) -> Callable[[Any], Any]:
    async def play(output: Any) -> None:
        await output.started()
        for piece in pieces:
            await output.say(piece)
        await output.end("error" if error is not None else finish, error=error)

    return play


async def start(cluster: Any, *pieces: str, **settings: Any) -> None:
    await cluster.start(bundle=byte_level_bundle(chat_template=TEMPLATE), card=PARSERS, **settings)
    if pieces:
        cluster.worker.play = says(*pieces)


async def test_a_whole_answer_has_exactly_the_fields_of_the_api(cluster: Any) -> None:
    await cluster.start()
    status, found = await cluster.respond(metadata={"k": "v"}, instructions="Be brief.")
    assert status == 200
    check_schema("Response", found)
    root = found["id"].removeprefix("resp_")
    assert found.pop("created_at") > 1_600_000_000
    assert found.pop("completed_at") > 1_600_000_000
    input_tokens = found["usage"]["input_tokens"]
    assert input_tokens > 0
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
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 11,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + 11,
        },
        "metadata": {"k": "v"},
    }


async def test_what_a_request_says_comes_back_in_the_response(cluster: Any) -> None:
    await cluster.start()
    asked = {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50, "max_tool_calls": 2, "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [{**ECHO, "description": None, "strict": None}, {"type": "web_search"}], "tool_choice": "none",
        "truncation": "auto", "store": False, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "presence_penalty": 0.5, "frequency_penalty": 0.25, "instructions": "i",
    }  # fmt: skip
    status, found = await cluster.respond(**asked)
    assert status == 200
    check_schema("Response", found)
    assert {name: found[name] for name in asked} == asked


async def test_a_stream_follows_the_schemas_and_names_its_request(cluster: Any) -> None:
    await cluster.start()
    async with cluster.session.post("/v1/responses", json={"model": "m", "input": "hi", "stream": True}) as response:
        events = parse_events(await response.read())
        final = check_stream(events)
        assert response.headers["X-Request-Id"] == final["id"]
    assert final["output"][0]["content"][0]["text"] == "Hello world"


async def test_thoughts_and_calls_become_items(cluster: Any) -> None:
    await start(cluster, "<think>\nwhy", "\n</think>\n\nSo. ", CALL, CALL)
    final = check_stream(await cluster.respond_stream(tools=[ECHO]))
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert final["output"][0]["content"][0]["text"] == "why"
    assert final["output"][0]["summary"] == []
    assert final["output"][2]["arguments"] == '{"text": "a"}'
    assert final["output"][2]["call_id"] != final["output"][3]["call_id"]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_call_is_announced_before_the_next_token(cluster: Any) -> None:
    """The engine says nothing more until the client has seen the call done."""
    await start(cluster)
    seen = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say(CALL)
        await seen.wait()
        await output.end()

    cluster.worker.play = play
    data = b""
    request = {"model": "m", "input": "hi", "stream": True, "tools": [ECHO]}
    async with cluster.session.post("/v1/responses", json=request) as response:
        async for chunk in response.content.iter_any():
            data += chunk
            if b"event: response.output_item.done" in data:
                assert b"event: response.function_call_arguments.done" in data
                seen.set()
    assert check_stream(parse_events(data))["output"][0]["name"] == "echo"


async def test_without_parallel_calls_there_is_one(cluster: Any) -> None:
    await start(cluster, CALL, CALL)
    status, found = await cluster.respond(tools=[ECHO], parallel_tool_calls=False)
    assert status == 200
    assert [item["type"] for item in found["output"]] == ["function_call"]


async def test_custom_tools_and_namespaces_are_undone(cluster: Any) -> None:
    custom = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>'
    spaced = '<tool_call>\n{"name": "spawn", "arguments": {}}\n</tool_call>'
    await start(cluster, custom, spaced)
    tools = [
        {"type": "custom", "name": "patch", "description": "d"},
        {"type": "namespace", "name": "agents", "description": "d", "tools": [{**ECHO, "name": "spawn"}]},
    ]
    events = await cluster.respond_stream(tools=tools)
    final = check_stream(events)
    assert final["output"][0]["input"] == "*** Begin\n"
    assert (final["output"][1]["name"], final["output"][1]["namespace"]) == ("spawn", "agents")
    assert cluster.prompts()[0].startswith("[tool patch]\n[tool spawn]\n")
    again = [{"role": "user", "content": "x"}, *final["output"]]
    await cluster.respond(again, tools=tools)
    assert '[assistant]  patch{"input": "*** Begin\\n"} spawn{}\n' in cluster.prompts()[1]


async def test_sealed_thoughts_come_back_into_the_prompt_and_foreign_ones_do_not_matter(cluster: Any) -> None:
    await start(cluster, "<think>\nwhy\n</think>\n\nSo.")
    status, found = await cluster.respond(store=False, include=["reasoning.encrypted_content"])
    assert status == 200
    thought, message = found["output"]
    sealed = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": thought["encrypted_content"]}
    foreign = {
        **sealed,
        "encrypted_content": "gAAAAABforeign",
        "summary": [{"type": "summary_text", "text": "readable"}],
    }
    for item in (sealed, foreign):
        status, _ = await cluster.respond([{"role": "user", "content": "hi"}, item, message])
        assert status == 200
    assert "[assistant] (why) So.\n" in cluster.prompts()[1]
    assert "[assistant] (readable) So.\n" in cluster.prompts()[2]


async def test_a_summary_is_shown_when_asked_for(cluster: Any) -> None:
    await start(cluster, "<think>\nwhy\n</think>\n\nSo.")
    final = check_stream(await cluster.respond_stream(reasoning={"summary": "auto"}))
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "why"}]
    assert "encrypted_content" not in final["output"][0]


async def test_the_token_limit_ends_a_response_incomplete(cluster: Any) -> None:
    await cluster.start()
    cluster.worker.play = says("Three, two", finish="length")
    final = check_stream(await cluster.respond_stream(max_output_tokens=3))
    assert cluster.worker.requests[0].stopping.max_tokens == 3
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_text_formats_reach_the_worker(cluster: Any) -> None:
    await cluster.start()
    form = {"type": "json_schema", "name": "o", "schema": {"type": "object"}, "strict": True}
    status, found = await cluster.respond(text={"format": form})
    assert (status, found["text"]) == (200, {"format": form})
    assert cluster.worker.requests[0].guidance.form == "json_schema"


async def test_log_probabilities_come_with_the_text(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("hi", logprobs=True)
        await output.end()

    cluster.worker.play = play
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    final = check_stream(await cluster.respond_stream(**fields))
    entries = final["output"][0]["content"][0]["logprobs"]
    assert [(entry["token"], len(entry["top_logprobs"])) for entry in entries] == [("h", 2), ("i", 2)]
    assert final["top_logprobs"] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"temperature": 3.0}, 400, "temperature", "invalid_value"),
        ({"input": []}, 400, "input", "empty_array"),
        ({"tools": [], "tool_choice": "required"}, 400, "tool_choice", None),
        ({"previous_response_id": "resp_missing"}, 400, "previous_response_id", "previous_response_not_found"),
        ({"previous_response_id": "resp_" + "0" * 48}, 400, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "msg_nowhere"}]}, 404, "input", "item_not_found"),
        ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 48}0000"}]}, 404, "input", "item_not_found"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, 400, "input", "unknown_call_id"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"input": "x" * 9000}, 400, "input", "context_length_exceeded"),
    ],
)
async def test_refusals_come_before_the_stream(
    cluster: Any, fields: dict[str, Any], status: int, param: str, code: str | None, stream: bool
) -> None:
    await start(cluster)
    found, body = await cluster.post("/v1/responses", {"model": "m", "input": "x", "stream": stream, **fields})
    assert (found, body["error"]["param"], body["error"]["code"]) == (status, param, code)
    assert body["error"]["type"] == "invalid_request_error"


async def test_an_engine_that_fails_in_the_middle_fails_the_response(cluster: Any) -> None:
    await cluster.start()
    error = ErrorReply(code=ErrorCode.INTERNAL, message="engine died", retryable=False)
    cluster.worker.play = says("half", error=error)
    final = check_stream(await cluster.respond_stream())
    assert (final["status"], final["error"]["code"]) == ("failed", "server_error")
    assert final["output"][0]["content"][0]["text"] == "half"
    status, body = await cluster.respond()
    assert (status, body["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("waits", ["for a place", "for its first token"])
async def test_a_silent_stream_is_kept_alive_by_events_that_count(cluster: Any, waits: str) -> None:
    await cluster.start(keep_alive_s=0.01)
    body = {"model": "m", "input": "hi"}
    data = await cluster.kept_waiting("/v1/responses", body, waits=waits, sign=b"event: response.in_progress")
    assert b"\n: " not in data
    assert check_stream(parse_events(data))["output"][0]["content"][0]["text"] == "late"


async def test_a_warm_up_computes_the_prompt_and_says_nothing(cluster: Any) -> None:
    await start(cluster)
    status, found = await cluster.respond(generate=False, instructions="i")
    assert (status, found["status"], found["output"]) == (200, "completed", [])
    assert found["usage"]["output_tokens"] == 0
    check_stream(await cluster.respond_stream(generate=False))
    assert cluster.worker.requests[0].stopping.max_tokens == 1
    _, after = await cluster.respond("next", previous_response_id=found["id"], instructions="i")
    assert after["status"] == "completed"
    assert cluster.prompts()[2] == "[system] i\n[user] hi\n[user] next\n[assistant] "
    assert cluster.prompts()[2].startswith(cluster.prompts()[0])


async def test_truncation_drops_the_oldest_turns_and_keeps_instructions_and_the_newest_question(cluster: Any) -> None:
    await start(cluster)
    items = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"<{i}>" + "x" * 1000} for i in range(13)]
    status, body = await cluster.respond(items, instructions="Be brief.")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, _ = await cluster.respond(items, instructions="Be brief.", truncation="auto", max_output_tokens=100)
    assert status == 200
    (prompt,) = cluster.prompts()
    assert prompt.startswith("[system] Be brief.\n")
    assert "<12>" in prompt
    assert "<0>" not in prompt
    assert 8192 - 100 - 1100 < len(prompt) <= 8192 - 100
    status, body = await cluster.respond("x" * 9000, truncation="auto")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_tokens_are_counted_as_they_would_be_sent(cluster: Any) -> None:
    await start(cluster)
    status, counted = await cluster.post("/v1/responses/input_tokens", {"model": "m", "input": "hi", "tools": [ECHO]})
    _, found = await cluster.respond(tools=[ECHO])
    assert (status, counted) == (
        200,
        {"object": "response.input_tokens", "input_tokens": found["usage"]["input_tokens"]},
    )


async def test_the_warm_up_of_a_local_client_works(cluster: Any) -> None:
    """Codex sends this to a server it takes for LM Studio."""
    await cluster.start()
    status, _ = await cluster.respond("", max_output_tokens=1)
    assert status == 200


async def test_keys_are_asked_for(cluster: Any) -> None:
    await cluster.start(api_key="secret")
    status, body = await cluster.respond()
    assert (status, body["error"]["code"]) == (401, "missing_api_key")
