"""From one request of a conversation to the next: calls come back as they were written, and known beginnings cost nothing."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_tokens

TEMPLATE = Path(__file__).parents[2] / "property" / "frontend" / "templates" / "qwen3.jinja"
BUNDLE = byte_level_bundle(chat_template=TEMPLATE.read_text())
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "number"}}}
RAW = (
    "<think>\nI look.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "read", "arguments": {"path":"a.txt",  "n": 1.0}}\n</tool_call>'
)


def prompts(cluster: Any) -> list[bytes]:
    return [
        b"".join(bytes([t]) if t < 256 else b"<%d>" % t for t in unpack_tokens(message.tokens))
        for message in cluster.worker.requests
    ]


async def plays(output: Any) -> None:
    await output.started()
    await output.say(RAW)
    await output.end()


async def chat(cluster: Any) -> None:
    tools = [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}]
    _, answer = await cluster.chat("go", tools=tools)
    message = answer["choices"][0]["message"]
    call = message["tool_calls"][0]
    back = {
        "role": "assistant",
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
        "tool_calls": [
            {
                **call,
                "id": call["id"].replace("_", ""),
                "function": {"name": "read", "arguments": '{"n":1,"path":"a.txt"}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "text"}
    body = cluster.body("go", tools=tools)
    await cluster.post("/v1/chat/completions", {**body, "messages": [*body["messages"], back, result]})


async def messages(cluster: Any) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "tools": [{"name": "read", "input_schema": PARAMETERS}],
        "messages": [{"role": "user", "content": "go"}],
    }
    _, answer = await cluster.post("/v1/messages", body)
    call = next(block for block in answer["content"] if block["type"] == "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "text"}]}
    back = {"role": "assistant", "content": answer["content"]}
    await cluster.post("/v1/messages", {**body, "messages": [*body["messages"], back, result]})


async def responses(cluster: Any) -> None:
    tools = [{"type": "function", "name": "read", "parameters": PARAMETERS}]
    _, answer = await cluster.respond("go", tools=tools, store=False, include=["reasoning.encrypted_content"])
    call = next(item for item in answer["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "text"}
    first = {"type": "message", "role": "user", "content": "go"}
    output: list[Any] = answer["output"]
    await cluster.respond([first, *output, result], tools=tools, store=False)


@pytest.mark.parametrize("turns", [chat, messages, responses])
async def test_what_was_generated_is_the_prefix_of_the_next_prompt(cluster: Any, turns: Any) -> None:
    await cluster.start(bundle=BUNDLE, card={**PARSERS, "context_length": 4096})
    cluster.worker.play = plays
    await turns(cluster)
    first, second = prompts(cluster)
    assert second.startswith(first + RAW.encode())
    assert cluster.metric("calls_replayed_total", text="as written") == 1


async def test_a_call_that_the_client_has_edited_stands_as_the_client_has_it(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card={**PARSERS, "context_length": 4096})
    cluster.worker.play = plays
    tools = [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}]
    _, answer = await cluster.chat("go", tools=tools)
    call = answer["choices"][0]["message"]["tool_calls"][0]
    call["function"]["arguments"] = '{"path":"b.txt"}'
    body = cluster.body("go", tools=tools)
    body["messages"].append({"role": "assistant", "tool_calls": [call]})
    await cluster.post("/v1/chat/completions", body)
    assert b'{"name": "read", "arguments": {"path": "b.txt"}}' in prompts(cluster)[-1]
    assert cluster.metric("calls_replayed_total", text="canonical") == 1


async def test_tokenize_counts_the_tools_and_calls_of_a_conversation(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card={**PARSERS, "context_length": 4096})
    cluster.worker.play = plays
    tools = [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}]
    _, answer = await cluster.chat("go", tools=tools)
    message = answer["choices"][0]["message"]
    body = cluster.body("go", tools=tools)
    body["messages"] += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "text"}]
    _, tokenised = await cluster.post("/v1/tokenize", body)
    await cluster.post("/v1/chat/completions", body)
    assert tokenised["tokens"] == unpack_tokens(cluster.worker.requests[-1].tokens)


async def test_a_repeated_prompt_comes_out_of_the_cache(cluster: Any) -> None:
    await cluster.start(card={"context_length": 100_000})
    system = [{"role": "system", "content": "You are an agent. " * 100}]

    async def ask(text: str) -> None:
        await cluster.post(
            "/v1/chat/completions", {"model": "m", "messages": [*system, {"role": "user", "content": text}]}
        )

    await ask("one")
    assert cluster.metric("prompt_cache_tokens_total", source="cache") == 0
    await ask("two")
    assert cluster.metric("prompt_cache_tokens_total", source="cache") > len(system[0]["content"])
    assert cluster.metric("prompt_cache_bytes") > 4 * len(system[0]["content"])
    first, second = cluster.router.requests
    shared = 16 * (len(system[0]["content"]) // 4)
    assert first.keys[:shared] == second.keys[:shared]
    assert first.keys != second.keys


LONG = "word " * 1_000_000


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    cluster: Any, path: str, prompt: dict[str, Any]
) -> None:
    await cluster.start(bundle=BUNDLE)
    body = io.BytesIO(json.dumps({"model": "m", **prompt}).encode())
    async with cluster.session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long:")
    else:
        assert error["code"] == "context_length_exceeded"
    assert cluster.metric("prompt_cache_tokens_total", source="tokenizer") == 0


async def test_template_variables_of_a_request_replace_nothing_that_counts(cluster: Any) -> None:
    shown = byte_level_bundle(
        chat_template="{{ messages[0].content }}|{{ eos_token }}|{{ flag }}|{{ raise_exception is string }}"
    )
    await cluster.start(bundle=shown)
    smuggled = {
        "flag": "on", "messages": [{"content": "other"}], "eos_token": "x", "raise_exception": "x",
        "chat_template": "mine", "tools": [1],
    }  # fmt: skip
    status, _ = await cluster.chat("hi", chat_template_kwargs=smuggled)
    assert status == 200
    assert prompts(cluster) == [b"hi|<258>|on|False"]
