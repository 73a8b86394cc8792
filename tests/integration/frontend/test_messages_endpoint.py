"""POST /v1/messages over a real bus."""

import asyncio
import json
from typing import Any

import pytest

from kvbus_testkit.timing import eventually
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.request import AgentHints, SessionRef

TOOL = {
    "name": "f",
    "description": "does f",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TAGS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
SHOWN = byte_level_bundle(
    chat_template="{{ {'messages': messages, 'tools': tools or [], 'effort': reasoning_effort or ''} | tojson }}"
)


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 100,
        "messages": list(messages) or [{"role": "user", "content": "hi"}],
        **fields,
    }


def says(*pieces: str, reason: str = "stop", cached: int = 0) -> Any:
    async def play(output: Any) -> None:
        await output.started(cached=cached)
        for piece in pieces:
            await output.say(piece)
        await output.end(reason)

    return play


def prompt_of(cluster: Any, index: int = -1) -> str:
    return bytes(unpack_tokens(cluster.worker.requests[index].tokens)).decode()


async def events_of(cluster: Any, **fields: Any) -> list[dict[str, Any]]:
    async with cluster.session.post("/v1/messages", json=body(stream=True, **fields)) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        lines = (await response.text()).splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def test_a_whole_answer_has_exactly_the_fields_of_the_api(cluster: Any) -> None:
    await cluster.start()
    cluster.worker.play = says("Hello", " world", cached=8)
    async with cluster.session.post("/v1/messages?beta=true", json=body()) as response:
        found = await response.json()
        assert response.status == 200
        assert response.headers["request-id"] == found["id"]
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 13, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 11,
        },
    }  # fmt: skip


async def test_the_prompt_is_counted_and_not_guessed(cluster: Any) -> None:
    await cluster.start(bundle=SHOWN, card={"context_length": 5000})
    request = body(system=[{"type": "text", "text": "Größe ☃"}], tools=[TOOL])
    status, _ = await cluster.post("/v1/messages", request)
    assert status == 200
    sent = len(cluster.worker.requests[0].tokens) // 4
    del request["max_tokens"]
    assert await cluster.post("/v1/messages/count_tokens?beta=true", request) == (200, {"input_tokens": sent})
    assert len(cluster.worker.requests) == 1, "counting generates nothing"
    usage = (await events_of(cluster, system=[{"type": "text", "text": "Größe ☃"}], tools=[TOOL]))[0]["message"][
        "usage"
    ]
    assert usage["input_tokens"] == sent


async def test_the_template_sees_the_conversation_in_its_own_terms(cluster: Any) -> None:
    await cluster.start(bundle=SHOWN, card={"context_length": 5000})
    deferred = {**TOOL, "name": "g", "defer_loading": True}
    cluster.worker.play = says("")
    status, _ = await cluster.post(
        "/v1/messages",
        body(
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "why", "signature": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "x"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "g"}]},
                {"type": "text", "text": "and?"},
            ]},
            {"role": "system", "content": "Be quick."},
            tools=[TOOL, deferred],
            output_config={"effort": "high"},
        ),
    )  # fmt: skip
    assert status == 200
    shown = json.loads(prompt_of(cluster))
    assert [tool["function"]["name"] for tool in shown["tools"]] == ["f"]
    assert shown["effort"] == "high"
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant", "tool", "user", "system"]
    assert shown["messages"][2]["content"].startswith('<functions>\n<function>{"description":"does f","name":"g"')
    assert shown["messages"][1]["reasoning_content"] == "why"


async def test_breakpoints_are_kept_and_what_they_write_is_counted(cluster: Any) -> None:
    await cluster.start(head_priority=0)
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "You are an agent.", **kept}]
    cluster.worker.play = says("x", cached=8)
    _, found = await cluster.post("/v1/messages", body(system=system))
    (retention,) = cluster.worker.requests[0].retention
    assert (retention.start, retention.ttl_s, retention.kind) == (0, 3600.0, "pinned")
    tokens = unpack_tokens(cluster.worker.requests[0].tokens)
    whole, next_block = (
        bytes(t for t in tokens[:end] if t < 256).decode() for end in (retention.end, retention.end + 4)
    )
    assert whole.rstrip() in next_block
    assert "You are an agent." in next_block, "all of it but what is less than a block"
    usage, prompt_tokens = found["usage"], len(cluster.worker.requests[0].tokens) // 4
    assert usage["cache_creation_input_tokens"] == retention.end - 8
    assert usage["cache_read_input_tokens"] == 8
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": retention.end - 8,
    }
    assert sum(usage[kind] for kind in usage if kind.endswith("input_tokens")) == prompt_tokens


async def test_a_billing_line_that_changes_does_not_change_the_prompt(cluster: Any) -> None:
    await cluster.start()
    for mark in ("0865d", "bfdf1"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.140.9ea; cch={mark};"}
        await cluster.post("/v1/messages", body(system=[billing, {"type": "text", "text": "You are an agent."}]))
    first, second = (message.tokens for message in cluster.worker.requests)
    assert first == second


async def test_a_last_answer_is_continued_and_not_repeated(cluster: Any) -> None:
    await cluster.start()
    cluster.worker.play = says("B)")
    messages = [{"role": "user", "content": "A or B?"}, {"role": "assistant", "content": "The answer is ("}]
    status, found = await cluster.post("/v1/messages", body(*messages))
    assert (status, found["content"]) == (200, [{"type": "text", "text": "B)"}])
    tokens = unpack_tokens(cluster.worker.requests[0].tokens)
    assert bytes(t for t in tokens if t < 256).decode().endswith("The answer is (")


async def test_a_stop_sequence_is_named_and_ends_the_work(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("one EN")
        await output.say("D two")
        await cluster.worker.cancelled()

    cluster.worker.play = play
    status, found = await cluster.post("/v1/messages", body(stop_sequences=["never", "END"]))
    assert status == 200
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    assert found["content"] == [{"type": "text", "text": "one "}]


async def test_without_parallel_calls_the_first_one_ends_the_answer(cluster: Any) -> None:
    await cluster.start(card=TAGS)
    cluster.worker.play = says(CALL, CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    _, found = await cluster.post("/v1/messages", body(tools=[TOOL], tool_choice=choice))
    assert [block["type"] for block in found["content"]] == ["tool_use"]
    assert found["stop_reason"] == "tool_use"
    _, found = await cluster.post("/v1/messages", body(tools=[TOOL]))
    assert [block["type"] for block in found["content"]] == ["tool_use", "tool_use"]


async def test_a_call_is_announced_as_complete_before_the_next_token(cluster: Any) -> None:
    await cluster.start(card=TAGS)
    seen = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say(CALL)
        await seen.wait()
        await output.end()

    cluster.worker.play = play
    async with cluster.session.post("/v1/messages", json=body(stream=True, tools=[TOOL])) as response:
        while b"content_block_stop" not in await response.content.readline():
            assert not response.content.at_eof()
        seen.set()
        assert b"message_stop" in await response.content.read()


async def test_silence_is_filled_with_pings(cluster: Any) -> None:
    await cluster.start(keep_alive_s=0.02)
    seen = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await seen.wait()
        await output.say("x")
        await output.end()

    cluster.worker.play = play
    async with cluster.session.post("/v1/messages", json=body(stream=True)) as response:
        while b"event: ping" not in await response.content.readline():
            assert not response.content.at_eof()
        seen.set()
        assert b"message_stop" in await response.content.read()


async def test_an_error_in_the_stream_is_its_last_event(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("partial")
        reply = ErrorReply(code=ErrorCode.INTERNAL, message="the engine has failed", retryable=False)
        await output.end("error", error=reply)

    cluster.worker.play = play
    events = await events_of(cluster)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "Internal server error: the engine has failed"}
    assert "message_stop" not in {event["type"] for event in events}
    status, found = await cluster.post("/v1/messages", body())
    assert (status, found["type"], found["error"]["type"]) == (500, "error", "api_error")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("request_body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b"{}", 400, "invalid_request_error"),
        (json.dumps(body(model="other")).encode(), 404, "not_found_error"),
        (json.dumps(body(messages=[])).encode(), 400, "invalid_request_error"),
        (json.dumps(body(system="x" * 5000)).encode(), 413, "request_too_large"),
    ],
)
async def test_refusals_have_the_shape_of_the_api(
    cluster: Any, path: str, request_body: bytes, status: int, kind: str
) -> None:
    await cluster.start(max_body_bytes=2000)
    async with cluster.session.post(path, data=request_body) as response:
        found = await response.json()
    assert (response.status, found["type"], found["error"]["type"]) == (status, "error", kind)
    assert found["error"]["message"]


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_claude_code_reads(cluster: Any) -> None:
    await cluster.start()
    status, found = await cluster.post("/v1/messages", body({"role": "user", "content": "x" * 600}))
    assert status == 400
    assert found["error"]["message"] == "prompt is too long: 619 tokens > 512 maximum"
    status, _ = await cluster.post("/v1/messages", body(max_tokens=128_000))
    assert status == 200, "more tokens than the context has are no mistake"


async def test_a_key_is_taken_from_either_header(cluster: Any) -> None:
    await cluster.start(api_key="secret")
    for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert (await cluster.post("/v1/messages", body(), headers=headers))[0] == 200
    status, found = await cluster.post("/v1/messages", body(), headers={"x-api-key": "wrong"})
    assert (status, found["error"]["type"]) == (401, "authentication_error")
    for path in ("/", "/api/hello"):
        async with cluster.session.head(path) as response:
            assert response.status == 200, "a greeting needs no key"


async def test_a_path_that_is_not_there_is_refused_in_the_shape_of_the_client(cluster: Any) -> None:
    await cluster.start()
    for headers, kind in ((ANTHROPIC, "not_found_error"), ({}, "invalid_request_error")):
        status, found = await cluster.post("/v1/files", {}, headers=headers)
        assert (status, found["error"]["type"], found.get("type")) == (404, kind, "error" if headers else None)


async def test_an_api_that_is_off_is_not_there(cluster: Any) -> None:
    await cluster.start(enable_anthropic_api=False)
    status, found = await cluster.post("/v1/messages", body())
    assert (status, found["error"]["type"]) == (404, "not_found_error")


async def test_headers_and_extensions_reach_the_router_and_the_worker(cluster: Any) -> None:
    await cluster.start()
    headers = {
        "x-claude-code-session-id": "root",
        "x-claude-code-agent-id": "a1",
        "x-dynamo-request-priority": "4",
        "x-dynamo-worker-instance-id": "w1",
        "x-tenant-id": "acme",
    }
    fields = {
        "nvext": {"agent_hints": {"priority": 1, "osl": 9}},
        "kvbus": {"mock": {"output": "x"}},
        "metadata": {"user_id": '{"session_id":"root"}'},
    }
    status, _ = await cluster.post("/v1/messages", body(**fields), headers=headers)
    assert status == 200
    message, routed = cluster.worker.requests[0], cluster.router.requests[0]
    assert message.hints == routed.hints == AgentHints(priority=4, osl=9, input_trigger="user")
    assert message.session == routed.session == SessionRef(id="a1", parent="root")
    assert (message.cache_salt, routed.tenant, routed.pinned) == ("acme", "acme", "w1")
    assert message.mock.output == "x"
    await cluster.post("/v1/messages", body(**fields))
    assert cluster.worker.requests[1].session == SessionRef(id="root")


async def test_thoughts_and_ids_come_back_as_the_model_wrote_them(cluster: Any) -> None:
    await cluster.start(
        bundle=SHOWN, card={"context_length": 5000, "reasoning_parser": "qwen3", "tool_call_parser": "kimi_k2"}
    )
    written = (
        "<think>because</think>Looking.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    cluster.worker.play = says(written)
    _, answer = await cluster.post("/v1/messages", body(tools=[TOOL]))
    content = [{**block, "thinking": ""} if "thinking" in block else block for block in answer["content"]]
    call = content[-1]
    assert call["id"].startswith("toolu_")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "1"}]}
    await cluster.post("/v1/messages", body({"role": "assistant", "content": content}, result, tools=[TOOL]))
    assistant, tool = json.loads(prompt_of(cluster))["messages"]
    assert assistant["reasoning_content"] == "because", "the signature holds it"
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "functions.f:0"


# models


ANTHROPIC = {"anthropic-version": "2023-06-01"}


async def test_models_are_listed_in_the_dialect_of_the_client(cluster: Any) -> None:
    await cluster.start(card={"name": "org/m"}, model_aliases="claude-local=org/m,gone=other")
    await cluster.add_worker("w2", name="m2")
    await eventually(lambda: cluster.frontend.app._api.models.get("m2"))
    async with cluster.session.get("/v1/models?limit=1000") as response:
        listed = (await response.json())["data"]
    assert [(model["id"], model["root"]) for model in listed] == [
        ("m2", "m2"), ("org/m", "org/m"), ("claude-local", "org/m"),
    ]  # fmt: skip
    async with cluster.session.get("/v1/models?limit=2", headers=ANTHROPIC) as response:
        page = await response.json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("m2", "org/m", True)
    assert {name: value for name, value in page["data"][1].items() if name != "capabilities"} == {
        "type": "model", "id": "org/m", "display_name": "org/m", "created_at": "1970-01-01T00:00:01Z",
        "lifecycle": "active", "max_input_tokens": 512, "max_tokens": 512,
    }  # fmt: skip
    async with cluster.session.get("/v1/models/org/m", headers=ANTHROPIC) as response:
        assert await response.json() == page["data"][1]
    async with cluster.session.get("/v1/models/claude-local") as response:
        assert (await response.json())["root"] == "org/m"
    async with cluster.session.get("/v1/models/none", headers=ANTHROPIC) as response:
        assert (await response.json())["error"]["type"] == "not_found_error"
    async with cluster.session.get("/v1/models?limit=0", headers=ANTHROPIC) as response:
        assert (response.status, (await response.json())["type"]) == (400, "error")


async def test_an_alias_is_answered_by_its_model_under_the_name_that_was_asked_for(cluster: Any) -> None:
    await cluster.start(model_aliases="claude-haiku-4-5=m")
    _, found = await cluster.post("/v1/messages", body(model="claude-haiku-4-5"))
    assert found["model"] == "claude-haiku-4-5"
    assert cluster.worker.requests[0].model == "m"
    status, _ = await cluster.post("/v1/messages", body(model="claude-opus"))
    assert status == 404


async def test_one_alias_can_stand_for_every_name(cluster: Any) -> None:
    await cluster.start(model_aliases="*=m")
    status, _ = await cluster.post("/v1/messages", body(model="claude-whatever"))
    assert status == 200
