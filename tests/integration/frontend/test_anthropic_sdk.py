"""The official client, which is strict: what it makes of a stream equals the answer in one piece."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from kvbus_wire.errors import ErrorCode, ErrorReply

TOOLS: Any = [
    {
        "name": "f",
        "description": "does f",
        "input_schema": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    }
]
TAGS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def client_of(cluster: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The worker plays the output that the request brings along, a few bytes a step."""

    async def play(output: Any) -> None:
        script = output.message.mock
        data = script.output.encode()
        await output.started(cached=4)
        for start in range(0, len(data), 5):
            await output.say(data[start : start + 5])
        await output.end(script.finish)

    await cluster.start(card=TAGS)
    cluster.worker.play = play
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="any", max_retries=0) as client:
        yield client


def request(output: str, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    mock = {"output": output, "finish": finish}
    return {
        "model": "m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "go"}],
        "tools": TOOLS,
        "extra_body": {"kvbus": {"mock": mock}},
        **fields,
    }


def comparable(message: anthropic.types.Message) -> dict[str, Any]:
    """Ids are new in every answer."""
    plain = message.model_dump(exclude={"id"})
    for block in plain["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return plain


@pytest.mark.parametrize(
    ("output", "finish", "kinds", "stop_reason"),
    [
        ("Plain wörds ☃ 🎉.", "stop", ["text"], "end_turn"),
        ("<think>why</think>Because.", "stop", ["thinking", "text"], "end_turn"),
        (call('{"a": "x", "n": 1}'), "stop", ["tool_use"], "tool_use"),
        ("Two: " + call('{"a": "x"}') + call("{}"), "stop", ["text", "tool_use", "tool_use"], "tool_use"),
        (
            "<think>a</think>" + call('{"n": 1}') + "<think>b</think>" + call('{"n": 2}') + "Done.",
            "stop",
            ["thinking", "tool_use", "thinking", "tool_use", "text"],
            "tool_use",
        ),
        ("Cut in the mid", "length", ["text"], "max_tokens"),
        ("<think>cut in a th", "length", ["thinking"], "max_tokens"),
        (
            'Now <tool_call>\n{"name": "f", "arguments": {"n": 12, "a": "unfin',
            "length",
            ["text", "tool_use"],
            "max_tokens",
        ),
        (call('{"a": "x"}') + '<tool_call>\n{"name": "f", "argum', "length", ["tool_use"], "max_tokens"),
        ("", "stop", [], "end_turn"),
    ],
)
async def test_a_stream_adds_up_to_the_answer_in_one_piece(
    cluster: Any, output: str, finish: str, kinds: list[str], stop_reason: str
) -> None:
    async with client_of(cluster) as client:
        whole = await client.messages.create(**request(output, finish))
        async with client.messages.stream(**request(output, finish)) as stream:
            streamed = await stream.get_final_message()
        async with client.beta.messages.stream(**request(output, finish)) as beta_stream:
            beta = await beta_stream.get_final_message()
    assert comparable(streamed) == comparable(whole)
    assert [block.type for block in beta.content] == [block.type for block in whole.content] == kinds
    assert whole.stop_reason == stop_reason
    assert all(block.signature for block in whole.content if block.type == "thinking")
    assert whole.usage.output_tokens == len(output.encode())
    assert whole.usage.cache_read_input_tokens == 4


async def test_extra_fields_that_were_asked_for_do_not_disturb_the_client(cluster: Any) -> None:
    extra = {"kvbus": {"mock": {"output": "Hi.", "finish": "stop"}}, "nvext": {"extra_fields": ["worker_id"]}}
    async with client_of(cluster) as client:
        whole = await client.messages.create(**request("", extra_body=extra))
        async with client.messages.stream(**request("", extra_body=extra)) as stream:
            deltas = [event async for event in stream if event.type == "message_delta"]
            streamed = await stream.get_final_message()
    told: Any = whole.model_extra
    assert told["nvext"]["worker_id"]["decode_worker_id"] == "w1"
    assert deltas[0].model_extra == told
    assert comparable(streamed)["content"] == comparable(whole)["content"]


async def test_text_comes_as_it_is_written(cluster: Any) -> None:
    seen = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("one ")
        await seen.wait()
        await output.say("two")
        await output.end()

    pieces = []
    async with client_of(cluster) as client:
        cluster.worker.play = play
        async with client.messages.stream(**request("")) as stream:
            async for piece in stream.text_stream:
                pieces.append(piece)
                seen.set()
    assert pieces == ["one", " two"]


async def test_a_tool_loop_goes_round_with_what_the_client_sends_back(cluster: Any) -> None:
    async with client_of(cluster) as client:
        messages: Any = [{"role": "user", "content": "go"}]
        answer = await client.messages.create(**request("<think>a</think>" + call('{"n": 1}'), messages=messages))
        (used,) = [block for block in answer.content if block.type == "tool_use"]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "ok"}]},
        ]
        final = await client.messages.create(**request("Done.", messages=messages))
        counted = await client.messages.count_tokens(model="m", messages=messages, tools=TOOLS)
    usage = final.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_an_engine_that_fails_raises_the_same_error_from_both_kinds_of_answer(cluster: Any) -> None:
    async def fail(output: Any) -> None:
        await output.started()
        await output.say("partial")
        reply = ErrorReply(code=ErrorCode.INTERNAL, message="the engine has failed", retryable=False)
        await output.end("error", error=reply)

    async with client_of(cluster) as client:
        cluster.worker.play = fail
        with pytest.raises(anthropic.APIStatusError) as whole:
            await client.messages.create(**request(""))
        with pytest.raises(anthropic.APIStatusError) as streamed:
            async with client.messages.stream(**request("")) as stream:
                await stream.get_final_message()
    bodies: list[Any] = [whole.value.body, streamed.value.body]
    assert (
        bodies[0]["error"]
        == bodies[1]["error"]
        == {"type": "api_error", "message": "Internal server error: the engine has failed"}
    )


async def test_refusals_are_the_errors_that_the_client_knows(cluster: Any) -> None:
    async with client_of(cluster) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**request("", model="other"))
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 512 maximum"):
            await client.messages.create(**request("", messages=[{"role": "user", "content": "x" * 600}]))


async def test_models_are_paged_by_the_client(cluster: Any) -> None:
    async with client_of(cluster) as client:
        await cluster.add_worker("w2", name="m2")
        await cluster.add_worker("w3", name="org/m3")
        found: list[str] = []
        while len(found) < 3:
            found = [model.id async for model in client.models.list(limit=1)]
        assert found == ["m", "m2", "org/m3"]
        assert (await client.models.retrieve("m2")).max_input_tokens == 512


async def test_structured_output_is_asked_for_in_the_clients_own_way(cluster: Any) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    async with client_of(cluster) as client:
        answer = await client.messages.create(
            **request('{"title": "x"}', tools=[], output_config={"format": {"type": "json_schema", "schema": schema}})
        )
    (block,) = answer.content
    assert block.type == "text"
    assert json.loads(block.text) == {"title": "x"}
