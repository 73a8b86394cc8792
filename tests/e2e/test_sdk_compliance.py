"""The whole system as the official SDKs see it, on all three APIs: what they make of a stream equals the answer in one piece.

The SDKs are strict: a role, id or name that comes twice is joined to itself, an index with a gap is an error, a block without a
start is an error. The raw streams are checked against OpenAI's own schemas as well.
"""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvbus_testkit import chat_schemas, responses
from kvbus_testkit.timing import scaled
from kvbus_testkit.up import KvbusUp

QUESTION = [{"role": "user", "content": "When is low water?"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"port": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("tide", "ports")]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": n, "parameters": SCHEMA, "strict": False} for n in ("tide", "ports")
]
MESSAGES_TOOLS: Any = [{"name": n, "input_schema": SCHEMA} for n in ("tide", "ports")]

CALL_A = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call>'
CALL_B = '<tool_call>\n{"name": "ports", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "text": ("The tide is low.", "stop"),
    "thinking": ("<think>\nLet me see.\n</think>\n\nIt is low.", "stop"),
    "parallel calls": (f"I look both up.\n{CALL_A}\n{CALL_B}", "stop"),
    "interleaved": (f"<think>\na\n</think>\n\nfirst\n{CALL_A}<think>\nb\n</think>then\n{CALL_B}", "stop"),
    "truncated text": ("<think>\nLet me see.\n</think>\n\nIt is", "length"),
    "truncated call": (f"{CALL_A}\n{CALL_B[:-22]}", "length"),
}
EXPECTED: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    # text, thoughts, complete calls
    "text": ("The tide is low.", "", []),
    "thinking": ("It is low.", "Let me see.", []),
    "parallel calls": ("I look both up.", "", [("tide", {"port": "Brest"}), ("ports", {})]),
    "interleaved": ("firstthen", "ab", [("tide", {"port": "Brest"}), ("ports", {})]),
    "truncated text": ("It is", "Let me see.", []),
    "truncated call": ("", "", [("tide", {"port": "Brest"})]),
}


@pytest.fixture(scope="module")
def system(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvbusUp]:
    settings = ("frontend.migration_limit=0", "frontend.heartbeat_timeout_s=2", "worker.heartbeat_s=0.3")
    arguments = (
        *("--engine", "mock", "--model", str(tiny_model), "--mock-speedup", "10"),
        *("--tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3", "--enable-streaming-tool-dispatch"),
        *(word for setting in settings for word in ("--set", setting)),
    )
    with KvbusUp(tmp_path_factory.mktemp("up"), *arguments) as system:
        yield system.wait_ready(60)


def says(output: str, finish: str = "stop") -> dict[str, Any]:
    return {"extra_body": {"kvbus": {"mock": {"output": output, "finish": finish}}}}


@pytest.fixture
async def chatting(system: KvbusUp) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(system: KvbusUp) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=system.url, api_key="any", max_retries=0) as client:
        yield client


# Chat Completions


def chat_request(system: KvbusUp, **fields: Any) -> dict[str, Any]:
    return {"model": system.model, "messages": QUESTION, "tools": CHAT_TOOLS, **fields}


def plain_chat(completion: Any) -> dict[str, Any]:
    [choice] = completion.choices
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": [(call.function.name, call.function.arguments) for call in message.tool_calls or ()],
        "finish": choice.finish_reason,
        "role": message.role,
    }


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_chat_completion(system: KvbusUp, chatting: openai.AsyncOpenAI, answer: str) -> None:
    request = chat_request(system, **says(*ANSWERS[answer]))
    whole = await chatting.chat.completions.create(**request)
    async with chatting.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        try:
            streamed = await stream.get_final_completion()
        except openai.LengthFinishReasonError as cut_off:  # the SDK's way to say so
            streamed = cut_off.completion  # type: ignore[assignment]
    assert plain_chat(streamed) == plain_chat(whole)
    text, thoughts, calls = EXPECTED[answer]
    found = plain_chat(whole)
    assert (found["content"], found["reasoning"]) == (text, thoughts)
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"][: len(calls)]] == calls
    assert found["finish"] == ("length" if "truncated" in answer else "tool_calls" if calls else "stop")
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    raw = json.loads(system.post("/v1/chat/completions", {**body_of(request)}))
    chat_schemas.check_schema("CreateChatCompletionResponse", raw)
    stream_text = system.post("/v1/chat/completions", {**body_of(request), "stream": True})
    for block in stream_text.removesuffix("\n\n").split("\n\n"):
        if block.startswith("data: {"):  # without a name: a chunk
            chat_schemas.check_schema("CreateChatCompletionStreamResponse", json.loads(block.removeprefix("data: ")))


def body_of(request: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in request.items() if name != "extra_body"}, **request["extra_body"]}


async def test_a_chat_goes_on_with_what_the_sdk_gives_back(system: KvbusUp, chatting: openai.AsyncOpenAI) -> None:
    first = await chatting.chat.completions.create(**chat_request(system, **says(*ANSWERS["parallel calls"])))
    message = first.choices[0].message
    messages = [
        *QUESTION,
        message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "06:41"} for call in message.tool_calls or ()),
    ]
    second = await chatting.chat.completions.create(
        **chat_request(system, messages=messages, **says("At 06:41.", "stop"))
    )
    assert second.choices[0].message.content == "At 06:41."
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0


# Responses


def responses_request(system: KvbusUp, **fields: Any) -> dict[str, Any]:
    return {"model": system.model, "input": QUESTION, "tools": RESPONSES_TOOLS, **fields}


def plain_response(response: Any) -> list[dict[str, Any]]:
    items = []
    for item in response.output:
        match item.type:
            case "message":
                items.append({"text": "".join(part.text for part in item.content), "status": item.status})
            case "reasoning":
                items.append({"thought": "".join(part.text for part in item.content or ()), "status": item.status})
            case _:
                items.append({"name": item.name, "arguments": item.arguments, "status": item.status})
    return items


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_response(system: KvbusUp, chatting: openai.AsyncOpenAI, answer: str) -> None:
    request = responses_request(system, **says(*ANSWERS[answer]))
    whole = await chatting.responses.create(**request)
    async with chatting.responses.stream(**request) as stream:
        async for _ in stream:
            pass
        # The SDK keeps only what ended well; how a cut one ended stands in its last event.
        streamed = await stream.get_final_response() if "truncated" not in answer else None
    if streamed is not None:
        assert plain_response(streamed) == plain_response(whole)
        assert streamed.usage == whole.usage
    raw = system.post("/v1/responses", {**body_of(request), "stream": True})
    final = responses.check_stream(responses.parse_events(raw))
    assert final["status"] == whole.status == ("incomplete" if "truncated" in answer else "completed")
    assert [item["type"] for item in final["output"]] == [item.type for item in whole.output]
    text, thoughts, calls = EXPECTED[answer]
    items = plain_response(whole)
    assert "".join(item.get("text", "") for item in items) == text
    assert "".join(item.get("thought", "") for item in items) == thoughts
    complete = [item for item in items if "name" in item and item["status"] == "completed"]
    assert [(item["name"], json.loads(item["arguments"])) for item in complete] == calls


async def test_a_response_goes_on_from_the_one_before(system: KvbusUp, chatting: openai.AsyncOpenAI) -> None:
    first = await chatting.responses.create(**responses_request(system, **says(*ANSWERS["parallel calls"])))
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "06:41"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = await chatting.responses.create(
        **responses_request(system, input=results, previous_response_id=first.id, **says("At 06:41."))
    )
    assert second.output_text == "At 06:41."


# Messages


def messages_request(system: KvbusUp, **fields: Any) -> dict[str, Any]:
    return {"model": system.model, "max_tokens": 500, "messages": QUESTION, "tools": MESSAGES_TOOLS, **fields}


def plain_message(message: Any) -> dict[str, Any]:
    blocks = [block.to_dict() for block in message.content]
    for block in blocks:
        block.pop("id", None)
    return {"blocks": blocks, "stop": message.stop_reason, "role": message.role}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_message(system: KvbusUp, claude: anthropic.AsyncAnthropic, answer: str) -> None:
    request = messages_request(system, **says(*ANSWERS[answer]))
    whole = await claude.messages.create(**request)
    async with claude.messages.stream(**request) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_message()
    assert plain_message(streamed) == plain_message(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    text, thoughts, calls = EXPECTED[answer]
    blocks = plain_message(whole)["blocks"]
    assert "".join(block.get("text", "") for block in blocks) == text
    assert "".join(block.get("thinking", "") for block in blocks) == thoughts
    found = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert found[: len(calls)] == calls
    assert whole.stop_reason == ("max_tokens" if "truncated" in answer else "tool_use" if calls else "end_turn")


async def test_a_message_goes_on_with_what_the_sdk_gives_back(
    system: KvbusUp, claude: anthropic.AsyncAnthropic
) -> None:
    first = await claude.messages.create(**messages_request(system, **says(*ANSWERS["interleaved"])))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "06:41"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    request = messages_request(system, messages=messages, **says("At 06:41."))
    second = await claude.messages.create(**request)
    assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "At 06:41."}]
    usage = second.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    counted = await claude.messages.count_tokens(model=system.model, messages=request["messages"], tools=MESSAGES_TOOLS)
    assert counted.input_tokens == total


# All three


def get(url: str, headers: dict[str, str]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=scaled(10)) as response:  # noqa: S310
        return json.loads(response.read())


async def test_models_are_listed_to_both_sdks(
    system: KvbusUp, chatting: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    assert [model.id async for model in chatting.models.list()] == [system.model]
    assert [model.id async for model in claude.models.list()] == [system.model]
    assert (await chatting.models.retrieve(system.model)).id == system.model
    assert (await claude.models.retrieve(system.model)).id == system.model
    chat_schemas.check_schema("ListModelsResponse", get(f"{system.url}/v1/models", {}))


async def test_errors_are_those_of_each_sdk(
    system: KvbusUp, chatting: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await chatting.chat.completions.create(model="absent", messages=[{"role": "user", "content": "x"}])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await chatting.responses.create(model="absent", input="x")
    with pytest.raises(openai.BadRequestError) as bad:
        await chatting.chat.completions.create(**chat_request(system, temperature=9))
    assert bad.value.param == "temperature"
    with pytest.raises(anthropic.NotFoundError) as gone:
        await claude.messages.create(model="absent", max_tokens=9, messages=[{"role": "user", "content": "x"}])
    assert gone.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.create(**{**messages_request(system), "max_tokens": 0})


class ResponseFailed(Exception):
    """The response has ended with its code."""


async def test_an_engine_that_dies_on_the_way_is_an_error_to_each_sdk(
    system: KvbusUp, chatting: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    """The last test: it costs the system a worker."""
    endless = says("So " * 40_000)
    started: list[asyncio.Event] = [asyncio.Event() for _ in range(3)]

    async def chat() -> None:
        async for chunk in await chatting.chat.completions.create(**chat_request(system, stream=True, **endless)):
            if chunk.choices and chunk.choices[0].delta.content:
                started[0].set()

    async def respond() -> None:
        async with chatting.responses.stream(**responses_request(system, **endless)) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    started[1].set()
                assert event.type != "response.completed"
                if event.type == "response.failed":  # the SDK raises nothing for it
                    raise ResponseFailed(event.response.error and event.response.error.code)

    async def message() -> None:
        request = {**messages_request(system, **endless), "max_tokens": 100_000}
        async with claude.messages.stream(**request) as stream:
            async for event in stream:
                if event.type == "text":
                    started[2].set()

    calls: list[Callable[[], Coroutine[Any, Any, None]]] = [chat, respond, message]
    tasks = [asyncio.create_task(call()) for call in calls]
    for event in started:
        await asyncio.wait_for(event.wait(), scaled(20))
    for worker in system.processes("worker"):
        os.kill(worker.pid, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), scaled(30))
    assert isinstance(outcomes[0], openai.APIError), outcomes[0]
    assert isinstance(outcomes[1], ResponseFailed), outcomes[1]
    assert isinstance(outcomes[2], anthropic.APIError), outcomes[2]
