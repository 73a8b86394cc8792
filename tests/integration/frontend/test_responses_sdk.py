"""The Responses API as the official SDK sees it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode, ErrorReply

PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "context_length": 4096}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"port": {}}}, "strict": False}
    for name in ("tide", "ports")
]
CUSTOM: list[Any] = [{"type": "custom", "name": "patch", "description": "d"}]
CALL_A = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call>'
CALL_B = '<tool_call>\n{"name": "ports", "arguments": {}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+ü\\n"}}\n</tool_call>'
ANSWERS = {
    "text": "The tide is low.",
    "thinking": "<think>\nLet me see.\n</think>\n\nIt is low.",
    "thinking only": "<think>\nLet me see.\n</think>",
    "a call": CALL_A,
    "text and a call": f"I look it up.\n{CALL_A}",
    "parallel calls": f"{CALL_A}\n{CALL_B}",
    "thinking and parallel calls": f"<think>\nBoth.\n</think>\n\n{CALL_A}\n{CALL_B}\n{CALL_A}",
    "interleaved": f"<think>\na\n</think>\n\nfirst\n{CALL_A}<think>\nb\n</think>then\n{CALL_B}",
    "a custom call": f"I patch.\n{PATCH}",
    "nothing": "",
}
TRUNCATED = {
    "text": "The tide is",
    "in a thought": "<think>\nLet me",
    "in a call": CALL_A[:-25],
    "in the second call": f"{CALL_A}\n{CALL_B[:-22]}",
    "in a custom call": PATCH[:-20],
}
SIZES = (1, 5, 1000)
"""Tokens, which are bytes, per step of the engine."""
ERROR = ErrorReply(code=ErrorCode.INTERNAL, message="engine died", retryable=False)


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    await cluster.start(card=PARSERS)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "When is low water?", "tools": [*TOOLS, *CUSTOM], **fields}


def plain(response: Any) -> dict[str, Any]:
    """Without what differs between two answers, and what the SDK adds."""
    found: dict[str, Any] = response.to_dict()
    root = found.pop("id").partition("_")[2]
    for name in ("created_at", "completed_at"):
        found.pop(name, None)
    text = json.dumps(found).replace(root, "ROOT")
    kept: dict[str, Any] = json.loads(text, object_hook=_without_parsed)
    calls = [item["call_id"] for item in kept["output"] if "call_id" in item]
    assert len({*calls}) == len(calls)
    for item in kept["output"]:
        item.pop("call_id", None)
    return kept


def _without_parsed(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in ("parsed", "parsed_arguments")}


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[list[Any], Any]:
    """All events, and the response that the SDK's accumulator ends with (None: it was not completed)."""
    async with client.responses.stream(**request(**fields)) as stream:
        events = [event async for event in stream]
        if events[-1].type != "response.completed":
            return events, None
        return events, await stream.get_final_response()


@pytest.mark.parametrize("size", SIZES)
async def test_the_accumulated_stream_is_the_whole_answer(cluster: Any, client: openai.AsyncOpenAI, size: int) -> None:
    for text in ANSWERS.values():
        cluster.says(text, size=size)
        whole = await client.responses.create(**request())
        events, final = await streamed(client)
        assert plain(final) == plain(whole)
        assert final.output_text == whole.output_text
        assert final.usage == whole.usage
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 4
        snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
        calls = [item.arguments for item in final.output if item.type == "function_call"]
        assert all(arguments in snapshots for arguments in calls)


async def test_extra_fields_that_were_asked_for_do_not_disturb_the_client(
    cluster: Any, client: openai.AsyncOpenAI
) -> None:
    cluster.says(ANSWERS["text"])
    asked = {"extra_body": {"nvext": {"extra_fields": ["worker_id"]}}}
    whole = await client.responses.create(**request(**asked))
    _, final = await streamed(client, **asked)
    assert whole.to_dict()["nvext"] == {"worker_id": {"prefill_worker_id": "w1", "decode_worker_id": "w1"}}
    assert plain(final) == plain(whole)
    assert (await client.responses.retrieve(whole.id)).to_dict() == whole.to_dict()


async def test_what_an_answer_holds(cluster: Any, client: openai.AsyncOpenAI) -> None:
    cluster.says(ANSWERS["interleaved"])
    _, final = await streamed(client, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    assert [item.type for item in final.output] == [
        "reasoning", "message", "function_call", "reasoning", "message", "function_call",
    ]  # fmt: skip
    thought = final.output[0]
    assert (thought.content[0].text, thought.summary[0].text) == ("a", "a")
    assert thought.encrypted_content
    assert json.loads(final.output[2].arguments) == {"port": "Brest"}
    cluster.says(ANSWERS["a custom call"])
    _, final = await streamed(client)
    assert final.output[1].input == "*** Begin\n+ü\n"


async def test_an_agent_loop_keeps_its_thoughts_with_and_without_the_store(
    cluster: Any, client: openai.AsyncOpenAI
) -> None:
    cluster.says(ANSWERS["thinking and parallel calls"])
    first = await client.responses.create(**request())
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {i}"}
        for i, item in enumerate(first.output)
        if item.type == "function_call"
    ]
    cluster.says("done")
    stored = await client.responses.create(**request(input=outputs, previous_response_id=first.id))
    history: list[Any] = [{"role": "user", "content": "When is low water?"}]
    history += [item.to_dict() for item in first.output]
    stateless = await client.responses.create(**request(input=[*history, *outputs], store=False))
    assert stored.output_text == stateless.output_text == "done"
    assert stored.usage is not None
    assert stateless.usage is not None
    assert stored.usage.input_tokens == stateless.usage.input_tokens
    assert cluster.prompts()[1] == cluster.prompts()[2]


@pytest.mark.parametrize("size", SIZES)
async def test_a_truncated_answer_is_incomplete_both_ways(cluster: Any, client: openai.AsyncOpenAI, size: int) -> None:
    for where, text in TRUNCATED.items():
        cluster.says(text, size=size, finish="length")
        whole = await client.responses.create(**request(max_output_tokens=20))
        events, _ = await streamed(client, max_output_tokens=20)
        assert events[-1].type == "response.incomplete"
        assert plain(events[-1].response) == plain(whole)
        assert whole.status == "incomplete"
        last: Any = whole.output[-1]
        if where in ("text", "in a call", "in a custom call"):
            assert last.status == "incomplete"
        cut = last.type.endswith("_call") and last.status == "incomplete"
        done = [event.item.id for event in events if event.type == "response.output_item.done"]
        assert len(done) == len(whole.output) - cut


async def test_an_engine_error_is_an_error_both_ways(cluster: Any, client: openai.AsyncOpenAI) -> None:
    cluster.says("The tide is", error=ERROR)
    with pytest.raises(openai.InternalServerError, match="engine died"):
        await client.responses.create(**request())
    events, _ = await streamed(client)
    assert events[-1].type == "response.failed"
    assert (events[-1].response.error.code, events[-1].response.output_text) == ("server_error", "The tide is")


async def test_refusals_have_fields_that_the_sdk_reads(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.responses.create(**request(previous_response_id="resp_none"))
    assert (refusal.value.code, refusal.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_none")


async def test_the_sdk_walks_through_a_response_s_life(cluster: Any, client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(**request(input=[{"role": "user", "content": f"m{i}"} for i in range(3)]))
    assert plain(await client.responses.retrieve(made.id)) == plain(made)
    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    listed: list[Any] = [item async for item in pages]
    assert [item.content[0].text for item in listed] == ["m0", "m1", "m2"]
    counted = await client.responses.input_tokens.count(**request())
    assert counted.input_tokens > 0
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_the_sdk_follows_a_background_response(cluster: Any, client: openai.AsyncOpenAI) -> None:
    cluster.says("The tide is low.")
    stream = await client.responses.create(**request(background=True, stream=True))
    events = [event async for event in stream]
    response_id = events[0].response.id
    resumed = await client.responses.retrieve(response_id, stream=True, starting_after=3)
    assert [event.sequence_number async for event in resumed] == [event.sequence_number for event in events[4:]]
    assert (await client.responses.retrieve(response_id)).output_text == "The tide is low."
    queued = await client.responses.create(**request(background=True))
    ended = await client.responses.cancel(queued.id)
    assert ended.status in ("cancelled", "completed")
    await eventually(lambda: cluster.metric("requests_in_flight") == 0)


async def test_the_sdk_compacts(cluster: Any, client: openai.AsyncOpenAI) -> None:
    compacted = await client.responses.compact(model="m", input=[{"role": "user", "content": "x"}])
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    again: list[Any] = [
        item.to_dict(warnings=False) for item in compacted.output
    ]  # its types know no users' messages here
    assert (await client.responses.create(model="m", input=again)).status == "completed"
