"""Chat Completions as the official SDK and strict readers of the stream see it."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from kvbus_testkit.chat_schemas import check_schema
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode, ErrorReply

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"port": {}}}}}
    for name in ("tide", "ports")
]
CALL_A = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call>'
CALL_B = '<tool_call>\n{"name": "ports", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "text": "The tide is low.",
    "thinking": "<think>\nLet me see.\n</think>\n\nIt is low.",
    "thinking only": "<think>\nLet me see.\n</think>",
    "a call": CALL_A,
    "text and a call": f"I look it up.\n{CALL_A}",
    "parallel calls": f"{CALL_A}\n{CALL_B}",
    "thinking and parallel calls": f"<think>\nBoth.\n</think>\n\n{CALL_A}\n{CALL_B}\n{CALL_A}",
    "interleaved": f"<think>\na\n</think>\n\nfirst\n{CALL_A}<think>\nb\n</think>then\n{CALL_B}",
    "broken markup": 'so <tool_call>\n{"name": 1}\n</tool_call> <tool_ca',
    "nothing": "",
}
TRUNCATED = {
    "text": "The tide is",
    "in a thought": "<think>\nLet me",
    "in a call": CALL_A[:-25],
    "in the second call": f"{CALL_A}\n{CALL_B[:-22]}",
    "in a marker": "so <tool_",
}

SIZES = (1, 5, 1000)
"""Tokens, which are bytes, per step of the engine."""


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    await cluster.start(card=PARSERS)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "When is low water?"}], "tools": TOOLS, **fields}


def seen(completion: Any) -> list[dict[str, Any]]:
    """What a client does with an answer: everything but ids, and how the SDK shows absent fields."""
    choices = []
    for choice in sorted(completion.choices, key=lambda choice: choice.index):
        message = choice.message
        calls = message.tool_calls or []
        assert len({call.id for call in calls}) == len(calls)
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        choices.append(
            {
                "role": message.role,
                "content": message.content or None,
                "reasoning": getattr(message, "reasoning_content", None),
                "calls": [(call.type, call.function.name, call.function.arguments) for call in calls],
                "finish": choice.finish_reason,
                "logprobs": [(entry.token, entry.logprob, entry.bytes) for entry in logprobs or ()],
            }
        )
    return choices


async def both(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Any, Any]:
    """The whole answer, and what the SDK's accumulator makes of the stream."""
    whole = await client.chat.completions.create(**request(**fields))
    async with client.chat.completions.stream(**request(**fields), stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        try:
            return whole, await stream.get_final_completion()
        except openai.LengthFinishReasonError as cut_off:  # the SDK's way to say so
            return whole, cut_off.completion


@pytest.mark.parametrize("size", SIZES)
async def test_the_accumulated_stream_is_the_whole_answer(cluster: Any, client: openai.AsyncOpenAI, size: int) -> None:
    for text in ANSWERS.values():
        cluster.says(text, size=size)
        whole, streamed = await both(client)
        assert seen(streamed) == seen(whole)
        assert streamed.usage == whole.usage
        assert whole.usage.completion_tokens == len(text.encode())
        assert whole.usage.prompt_tokens_details.cached_tokens == 4
        [choice] = seen(whole)
        assert choice["finish"] == ("tool_calls" if choice["calls"] else "stop")


async def test_what_an_answer_holds(cluster: Any, client: openai.AsyncOpenAI) -> None:
    cluster.says(ANSWERS["interleaved"])
    whole, _ = await both(client)
    [choice] = seen(whole)
    assert choice["content"] == "firstthen"
    assert choice["reasoning"] == "ab"
    assert choice["calls"] == [("function", "tide", '{"port": "Brest"}'), ("function", "ports", "{}")]
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * len(">\na\n</think>"), "a token is a byte"


@pytest.mark.parametrize("size", SIZES)
async def test_a_truncated_answer_is_the_same_both_ways(cluster: Any, client: openai.AsyncOpenAI, size: int) -> None:
    for text in TRUNCATED.values():
        cluster.says(text, size=size, finish="length")
        whole, streamed = await both(client)
        assert seen(streamed) == seen(whole)
        [choice] = seen(whole)
        assert choice["finish"] == "length"
        assert not any("tool_call" in text for text in (choice["content"], choice["reasoning"]) if text)


async def test_an_engine_that_fails_on_the_way_is_an_error_both_ways(cluster: Any, client: openai.AsyncOpenAI) -> None:
    error = ErrorReply(code=ErrorCode.INTERNAL, message="the engine has failed", retryable=False)
    cluster.says(f"Some text {CALL_A[:40]}", error=error)
    with pytest.raises(openai.InternalServerError) as whole:
        await client.chat.completions.create(**request())
    stream = await client.chat.completions.create(**request(), stream=True)
    text: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            text.append(chunk.choices[0].delta.content or "")  # noqa: PERF401  (kept when the stream fails)

    with pytest.raises(openai.APIError) as streamed:
        await read()
    assert "".join(text) == "Some text"
    assert streamed.value.body == whole.value.body
    assert streamed.value.code == whole.value.code == "internal"


async def test_a_worker_that_dies_within_a_thought_or_a_call_leaves_no_trace(
    cluster: Any, client: openai.AsyncOpenAI
) -> None:
    text = ANSWERS["thinking and parallel calls"]
    data = text.encode()
    cluster.says(text)
    undisturbed, _ = await both(client)
    other = await cluster.add_worker("w2", **PARSERS)

    def dies_after(count: int) -> Any:
        gone = ErrorReply(code=ErrorCode.UNAVAILABLE, message="the worker goes away", retryable=True)
        return cluster.plays(data[:count].decode(), size=1000, error=gone)

    async def goes_on(output: Any) -> None:
        await output.started()
        await output.say(data[output.message.resumed :])
        await output.end()

    other.play = goes_on
    for cut in (3, 12, text.index("tide") + 2, text.index("}}") + 1, text.index("</tool_call>") + 3, len(data) - 1):
        cluster.worker.play = dies_after(cut)
        whole, streamed = await both(client)
        assert seen(streamed) == seen(whole) == seen(undisturbed)
        assert whole.usage.completion_tokens == undisturbed.usage.completion_tokens
        assert whole.usage.completion_tokens_details == undisturbed.usage.completion_tokens_details
    assert {message.resumed for message in other.requests} >= {3, len(data) - 1}


async def test_answers_chunks_and_errors_have_the_shape_of_the_schemas(cluster: Any) -> None:
    await cluster.start(card=PARSERS)
    for text, finish in ((ANSWERS["thinking and parallel calls"], "stop"), (TRUNCATED["in the second call"], "length")):
        cluster.says(text, logprobs=True, finish=finish)
        fields = request(n=2, logprobs=True, top_logprobs=2)
        check_schema("CreateChatCompletionResponse", (await cluster.post("/v1/chat/completions", fields))[1])
        events = await cluster.stream("/v1/chat/completions", {**fields, "stream_options": {"include_usage": True}})
        for event in events[:-1]:
            check_schema("CreateChatCompletionStreamResponse", event)
    completion = {"model": "m", "prompt": "a", "logprobs": 2, "n": 2}
    check_schema("CreateCompletionResponse", (await cluster.post("/v1/completions", completion))[1])
    check_schema("ErrorResponse", (await cluster.post("/v1/chat/completions", {}))[1])


async def test_a_conversation_goes_on_with_what_the_sdk_gives_back(cluster: Any, client: openai.AsyncOpenAI) -> None:
    cluster.says(ANSWERS["thinking and parallel calls"])
    first, _ = await both(client)
    message = first.choices[0].message
    messages = [
        *request()["messages"],
        message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "06:41"} for call in message.tool_calls),
    ]
    cluster.says(ANSWERS["thinking"])
    whole, streamed = await both(client, messages=messages)
    assert seen(streamed) == seen(whole)
    assert whole.choices[0].message.content == "It is low."


@pytest.mark.parametrize("size", SIZES)
async def test_choices_with_calls_are_kept_apart(cluster: Any, client: openai.AsyncOpenAI, size: int) -> None:
    answers = [ANSWERS["parallel calls"], ANSWERS["text"], ANSWERS["thinking and parallel calls"]]

    async def play(output: Any) -> None:
        await cluster.plays(answers[int(output.message.request_id[-1])], size=size)(output)

    cluster.worker.play = play
    whole, streamed = await both(client, n=3)
    assert seen(streamed) == seen(whole)
    assert [(choice["finish"], len(choice["calls"])) for choice in seen(whole)] == [
        ("tool_calls", 2),
        ("stop", 0),
        ("tool_calls", 3),
    ]
    assert streamed.usage == whole.usage


@pytest.mark.parametrize("size", SIZES)
async def test_stop_strings_that_straddle_tokens_end_text_thoughts_and_calls(
    cluster: Any, client: openai.AsyncOpenAI, size: int
) -> None:
    for text, stop, content, reasoning, calls in (
        ("One. Two. Three.", ["Two. Th", "xyz"], "One. ", None, []),
        ("<think>\nFirst this, then that.</think>No.", ["then", "No"], None, "First this,", []),
        (CALL_A, '"Brest"', None, None, [("function", "tide", '{"port": ')]),
        (f"{CALL_A}\n\nSTOP{CALL_B}", "STOP", None, None, [("function", "tide", '{"port": "Brest"}')]),
    ):
        cluster.says(text, size=size)
        whole, streamed = await both(client, stop=stop)
        assert seen(streamed) == seen(whole)
        [choice] = seen(whole)
        assert (choice["content"], choice["reasoning"], choice["calls"]) == (content, reasoning, calls)
        assert choice["finish"] == "stop"
        assert whole.choices[0].stop_reason == (stop if isinstance(stop, str) else stop[0])


async def test_parallel_calls_can_be_switched_off(cluster: Any, client: openai.AsyncOpenAI) -> None:
    for size in (1, 1000):
        cluster.says(ANSWERS["parallel calls"], size=size)
        whole, streamed = await both(client, parallel_tool_calls=False)
        assert seen(streamed) == seen(whole)
        assert [call[1] for call in seen(whole)[0]["calls"]] == ["tide"]
        assert seen(whole)[0]["finish"] == "tool_calls"


@pytest.mark.parametrize("size", SIZES)
async def test_log_probabilities_of_all_tokens_come_with_parsers_on(
    cluster: Any, client: openai.AsyncOpenAI, size: int
) -> None:
    for text in ANSWERS.values():
        cluster.says(text, size=size, logprobs=True)
        whole, streamed = await both(client, logprobs=True, top_logprobs=2)
        assert seen(streamed) == seen(whole)
        assert [entry[0] for entry in seen(whole)[0]["logprobs"]] == list(text)


async def test_usage_comes_last_and_only_when_it_is_wanted(cluster: Any, client: openai.AsyncOpenAI) -> None:
    for answer in ("text", "thinking and parallel calls", "nothing"):
        cluster.says(ANSWERS[answer])
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **request(), stream=True, stream_options={"include_usage": True}
            )
        ]
        assert chunks[-1].choices == []
        assert chunks[-1].usage == (await client.chat.completions.create(**request())).usage
        assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks[:-1])
        for options in ({}, {"stream_options": {"include_usage": False}}):
            events = await cluster.stream("/v1/chat/completions", request(**options))
            assert all("usage" not in event for event in events[:-1])


async def raw(cluster: Any, **fields: Any) -> list[tuple[str | None, Any]]:
    """The events of a stream: name and data."""
    async with cluster.session.post("/v1/chat/completions", json=request(stream=True, **fields)) as response:
        return parsed(await response.text())


def parsed(text: str) -> list[tuple[str | None, Any]]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        [line] = lines
        data = line.removeprefix("data: ")
        events.append((name, data if data == "[DONE]" else json.loads(data)))
    return events


@pytest.mark.parametrize("size", SIZES)
async def test_a_stream_keeps_the_rules_that_strict_clients_need(cluster: Any, size: int) -> None:
    await cluster.start(card=PARSERS)
    whole, cut = ((text, "stop") for text in ANSWERS.values()), ((text, "length") for text in TRUNCATED.values())
    for text, finish in (*whole, *cut):
        cluster.says(text, size=size, finish=finish)
        events = await raw(cluster, n=2)
        assert all(name is None for name, _ in events)
        assert [data for _, data in events].index("[DONE]") == len(events) - 1
        chunks = [data for _, data in events[:-1]]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        for index in (0, 1):
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            check_choice(choices)


def check_choice(choices: list[Any]) -> None:
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    assert deltas[-1] == {}
    assert all(len(delta) == 1 for delta in deltas[1:-1]), "text, thoughts and calls never share a delta"
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    known: set[int] = set()
    for piece in pieces:
        if piece["index"] in known:
            assert set(piece) == {"index", "function"}
            assert set(piece["function"]) == {"arguments"}
            assert piece["function"]["arguments"]
        else:
            assert piece["index"] == len(known)
            known.add(piece["index"])
            assert set(piece) == {"index", "id", "type", "function"}
            assert piece["function"].keys() == {"name", "arguments"}
            assert piece["function"]["arguments"] == ""
    assert all(later["index"] >= before["index"] for before, later in pairwise(pieces))


# events of their own for complete calls and thoughts

DISPATCH = {"enable_streaming_tool_dispatch": True, "enable_streaming_reasoning_dispatch": True}


async def test_a_call_is_announced_with_its_last_character(cluster: Any) -> None:
    await cluster.start(card=PARSERS, **DISPATCH)
    end = CALL_A.index("}}") + 1
    announced = asyncio.Event()

    async def play(output: Any) -> None:
        await output.started()
        await output.say(CALL_A[:end])
        await output.say("}")
        await announced.wait()  # the model goes on only after the client has been told
        await output.say(CALL_A[end + 1 :])
        await output.end()

    cluster.worker.play = play
    received = ""
    async with cluster.session.post("/v1/chat/completions", json=request(stream=True)) as response:
        async for piece, _ in response.content.iter_chunks():
            received += piece.decode()
            if "event: tool_call_dispatch" in received:
                announced.set()
    events = parsed(received)
    [(position, dispatch)] = [(i, data) for i, (name, data) in enumerate(events) if name == "tool_call_dispatch"]
    chunks = [data["choices"][0]["delta"] for name, data in events[:position] if name is None]
    [call_id] = [call["id"] for delta in chunks for call in delta.get("tool_calls", ()) if "id" in call]
    assert dispatch == {
        "choice_index": 0,
        "tool_call": {
            "index": 0,
            "id": call_id,
            "type": "function",
            "function": {"name": "tide", "arguments": '{"port": "Brest"}'},
        },
    }
    streamed = "".join(call["function"]["arguments"] for delta in chunks for call in delta.get("tool_calls", ()))
    assert streamed == '{"port": "Brest"}', "the arguments have streamed as well"


@pytest.mark.parametrize("size", SIZES)
async def test_each_complete_call_and_thought_is_announced_once(cluster: Any, size: int) -> None:
    await cluster.start(card=PARSERS, **DISPATCH)
    text = f"{ANSWERS['interleaved']}{CALL_A[:-20]}"
    cluster.says(text, size=size, finish="length")
    events = await raw(cluster, n=2)
    calls = [data for name, data in events if name == "tool_call_dispatch"]
    for choice in (0, 1):
        own = [data["tool_call"] for data in calls if data["choice_index"] == choice]
        assert [(call["index"], call["function"]) for call in own] == [
            (0, {"name": "tide", "arguments": '{"port": "Brest"}'}),
            (1, {"name": "ports", "arguments": "{}"}),
        ]
        thoughts = [data for name, data in events if name == "reasoning_dispatch" and data["index"] == choice]
        assert thoughts == [{"index": choice, "reasoning_content": text} for text in ("a", "b")]


async def test_a_client_that_ignores_unknown_events_sees_a_standard_stream(cluster: Any) -> None:
    texts = [*ANSWERS.values(), *TRUNCATED.values()]
    names: set[str | None] = set()
    streams = []
    await cluster.start(card=PARSERS)
    for settings in ({}, {"instance_id": "dispatching", **DISPATCH}):
        if settings:
            await cluster.add_frontend(**settings)
            await eventually(lambda: cluster.frontend.service.health.ready, what="a ready frontend")
        for text in texts:
            cluster.says(text)
            events = await raw(cluster)
            names |= {name for name, _ in events}
            streams.append(standard([data for name, data in events if name is None]))
    assert names == {None, "tool_call_dispatch", "reasoning_dispatch"}
    assert streams[: len(texts)] == streams[len(texts) :]


def standard(chunks: list[Any]) -> list[Any]:
    """What a stream says, however its text was cut into deltas."""
    assert chunks.pop() == "[DONE]"
    said: list[Any] = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        [call] = delta.pop("tool_calls", [{}])
        call.pop("id", None)
        function = call.pop("function", {})
        text = "".join(filter(None, (delta.get("content"), delta.get("reasoning_content"), function.get("arguments"))))
        kind = (*delta, *call.values(), function.get("name"), finish)
        if said and said[-1][0] == kind:
            said[-1][1] += text
        else:
            said.append([kind, text])
    return said


async def test_the_sdk_which_does_not_look_at_names_of_events_is_not_disturbed(cluster: Any) -> None:
    await cluster.start(card=PARSERS, **DISPATCH)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        for text in ANSWERS.values():
            cluster.says(text)
            whole, streamed = await both(client)
            assert seen(streamed) == seen(whole)
        async for chunk in await client.chat.completions.create(**request(), stream=True):
            assert len(chunk.choices) <= 1


async def test_whole_answers_know_no_dispatch(cluster: Any) -> None:
    await cluster.start(card=PARSERS, **DISPATCH)
    cluster.says(ANSWERS["parallel calls"])
    status, body = await cluster.post("/v1/chat/completions", request())
    assert status == 200
    assert "dispatch" not in json.dumps(body)
