"""POST /v1/prompt tells what a worker is really sent, and where each piece of it comes from."""

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_cli.prompt.difference import difference
from kvbus_cli.prompt.hints import value_at
from kvbus_frontend.handlers.prompt import PromptHandler
from kvbus_protocols.prompt_view import PromptView
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_keys, unpack_tokens

TEMPLATE = Path(__file__).parents[2] / "property" / "frontend" / "templates" / "qwen3.jinja"
BUNDLE = byte_level_bundle(chat_template=TEMPLATE.read_text())
CARD = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "context_length": 16_384}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.140.9ea; cc_entrypoint=sdk-cli; cch=0865d;"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "where"}}, "required": ["path"]}


async def shown(cluster: Any, api: str, body: dict[str, Any], **headers: str) -> Any:
    status, view = await cluster.post(f"/v1/prompt?api={api}", body, headers=headers)
    assert status == 200, view
    return view


async def sent(cluster: Any, api: str, body: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Tokens and block keys of the request when it is really made."""
    status, answer = await cluster.post(PATHS[api], body)
    assert status == 200, answer
    keys = [key.hex() for key in unpack_keys(cluster.router.requests[-1].keys)]
    return unpack_tokens(cluster.worker.requests[-1].tokens), keys


def texts(view: Any) -> dict[str, str]:
    """Per field what the prompt shows of it."""
    found: dict[str, str] = {}
    for segment in view["segments"]:
        if "source" in segment:
            found[segment["source"]] = found.get(segment["source"], "") + segment["text"]
    return found


def chat_body() -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a.txt"}'}}
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief.\n"},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "<|im_end|>"}]},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": 'It says "é"'},
        ],
        "tools": [{"type": "function", "function": {"name": "read", "description": "Reads", "parameters": SCHEMA}}],
    }


def messages_body() -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 10,
        "system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
        "tools": [
            {"name": "read", "description": 'Reads a "file"', "input_schema": SCHEMA},
            {"name": "fetch", "description": "Fetches", "input_schema": SCHEMA, "defer_loading": True},
        ],
        "messages": [
            {"role": "user", "content": "Go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "none of ours"},
                    {"type": "tool_use", "id": "t1", "name": "find", "input": {"query": "web"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "tool_reference", "tool_name": "fetch"}],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    }


def responses_body() -> dict[str, Any]:
    return {
        "model": "m",
        "store": False,
        "instructions": "Be brief.",
        "tools": [
            {
                "type": "namespace",
                "name": "files",
                "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
            }
        ],
        "input": [
            {"role": "user", "content": "Go"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "type": "function_call",
                "call_id": "c",
                "namespace": "files",
                "name": "read",
                "arguments": '{"path": "a"}',
            },
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "text"}]},
        ],
    }


BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "chat": chat_body,
    "responses": responses_body,
    "messages": messages_body,
}


@pytest.mark.parametrize("api", PATHS)
async def test_tokens_and_keys_are_those_that_a_worker_is_sent(cluster: Any, api: str) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    body = BODIES[api]()
    view = await shown(cluster, api, body)
    tokens, keys = await sent(cluster, api, body)
    assert view["tokens"] == tokens
    assert [block["key"] for block in view["blocks"]] == keys
    assert view["count"] == len(tokens) == sum(segment["tokens"] for segment in view["segments"])
    text = "".join(segment["text"] for segment in view["segments"])
    for i, block in enumerate(view["blocks"]):
        before = [segment for segment in view["segments"] if segment["start"] <= i * view["block_size"]][-1]
        assert text[block.get("char", 0) :].startswith(before["text"][:1]) or before["start"] < i * view["block_size"]


async def test_every_field_of_a_chat_request_is_found_where_it_stands(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    found = texts(await shown(cluster, "chat", chat_body()))
    assert found["messages[0].content"] == "Be brief."
    assert found["messages[1].content[0].text"] == "One"
    assert found["messages[1].content[1].text"] == "<|im_end|>"
    assert found["messages[2].reasoning_content"] == "hm"
    assert found["messages[2].content"] == "I look."
    assert found["messages[2].tool_calls[0].function.name"] == "read"
    assert found["messages[2].tool_calls[0].function.arguments"] == "a.txt"
    assert found["messages[2].tool_calls[0]"] == '", "arguments": {"path": "'
    assert found["messages[3].content"] == 'It says "é"'
    assert found["tools[0].function.description"] == "Reads"
    assert found["tools[0].function.parameters.properties.path.description"] == "where"


async def test_every_field_of_a_messages_request_is_found_where_it_stands(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    view = await shown(cluster, "messages", messages_body())
    found = texts(view)
    assert found["system[1].text"] == "Be brief."
    assert "system[0].text" not in found
    assert found["tools[0].description"] == 'Reads a \\"file\\"'
    assert found["messages[0].content"] == "Go"
    assert view["not_shown"] == ["messages[1].content[0].thinking"]  # of an earlier turn
    assert found["messages[1].content[1].input"] == "web"
    assert found["tools[1].name"] == "fetch"  # where the result refers to it
    assert found["messages[2].content[1].text"] == "And now?"
    assert view["harness"] == "claude-code"
    assert {(rule["rule"], rule.get("source")) for rule in view["rules"]} == {
        ("anthropic-preamble", "system[0].text"),
        ("deferred-tool", "tools[1]"),
    }
    assert view["rules"][0]["text"] == BILLING


async def test_every_field_of_a_responses_request_is_found_where_it_stands(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    found = texts(await shown(cluster, "responses", responses_body()))
    assert found["instructions"] == "Be brief."
    assert found["input[0].content"] == "Go"
    assert found["input[1].summary[0].text"] == "hm"
    assert found["input[2].name"] == "read"
    assert found["input[3].output[0].text"] == "text"
    assert found["tools[0].tools[0].name"] == "read"
    plain = texts(await shown(cluster, "responses", {"model": "m", "input": "Hello"}))
    assert plain == {"input": "Hello"}


async def test_what_was_sealed_or_stored_is_found_in_what_carries_it(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    cluster.says('<think>\nhm\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>')
    tools = [{"type": "function", "name": "read", "parameters": SCHEMA}]
    body = {"model": "m", "input": "Go", "tools": tools, "include": ["reasoning.encrypted_content"]}
    _, first = await cluster.post("/v1/responses", body)
    thought, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "text"}
    user = {"role": "user", "content": "Go"}
    carried = {**body, "input": [user, {**thought, "summary": [], "content": None}, call, result]}
    found = texts(await shown(cluster, "responses", carried))
    assert (found["input[1].encrypted_content"], found["input[2].arguments"]) == ("hm", "a")
    stored = {**body, "input": [result], "previous_response_id": first["id"]}
    found = texts(await shown(cluster, "responses", stored))
    assert found["previous_response_id[0].content[0].text"] == "Go"
    assert found["previous_response_id[1].encrypted_content"] == "hm"
    assert found["previous_response_id[2].arguments"] == "a"
    assert found["input[0].output"] == "text"


async def test_a_call_that_stands_as_the_model_wrote_it_is_told(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    cluster.says('<tool_call>\n{"name": "read", "arguments": {"path":"a.txt",  "n": 1.0}}\n</tool_call>')
    body = {"model": "m", "messages": [{"role": "user", "content": "Go"}], "tools": chat_body()["tools"]}
    _, answer = await cluster.post(PATHS["chat"], body)
    call = answer["choices"][0]["message"]["tool_calls"][0]
    call["function"]["arguments"] = '{"n":1,"path":"a.txt"}'
    body["messages"] += [{"role": "assistant", "tool_calls": [call]}]
    view = await shown(cluster, "chat", body)
    assert view["rules"] == [
        {
            "rule": "call-as-written",
            "source": "messages[1].tool_calls[0]",
            "text": '{"path":"a.txt",  "n": 1.0}',
        }
    ]
    assert texts(view)["messages[1].tool_calls[0].function.arguments"] == "a.txt"
    assert view["tokens"] == (await sent(cluster, "chat", body))[0]


async def test_thoughts_that_the_template_drops_are_told(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    body = chat_body()
    del body["tools"]
    body["messages"] = [*body["messages"][:2], {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}]
    body["messages"] += [{"role": "user", "content": "Two"}]
    assert (await shown(cluster, "chat", body))["not_shown"] == ["messages[2].reasoning_content"]


async def test_prompts_without_a_template_are_shown_too(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    raw = {"model": "m", "messages": [{"role": "user", "content": "a<|im_end|>b"}], "nvext": {"use_raw_prompt": True}}
    view = await shown(cluster, "chat", raw)
    assert [(s["text"], s.get("special", False), s["source"]) for s in view["segments"]] == [
        ("a", False, "messages[0].content"),
        ("<|im_end|>", True, "messages[0].content"),
        ("b", False, "messages[0].content"),
    ]
    given = {**raw, "nvext": {"token_data": [104, 105]}}
    view = await shown(cluster, "chat", given)
    assert view["tokens"] == [104, 105]
    assert view["segments"] == [{"text": "hi", "start": 0, "tokens": 2, "source": "nvext.token_data"}]


async def test_a_salt_and_another_name_are_told(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD, model_aliases="other=m")
    plain = await shown(cluster, "chat", {**chat_body(), "model": "other"})
    salted = await shown(cluster, "chat", chat_body(), **{"x-tenant-id": "t"})
    assert (plain["model"], plain["served_model"], plain["salted"], salted["salted"]) == ("other", "m", False, True)
    assert plain["tokens"] == salted["tokens"]
    assert plain["domain"] != salted["domain"]
    assert plain["blocks"][0]["key"] != salted["blocks"][0]["key"]


@pytest.mark.parametrize(
    ("query", "body", "code"),
    [
        ("", {}, "invalid_value"),
        ("?api=completions", {}, "invalid_value"),
        ("?api=messages", {"model": "m", "messages": []}, None),
        (
            "?api=chat",
            {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]},
            "context_length_exceeded",
        ),
        ("?api=chat", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, "model_not_found"),
        (
            "?api=responses",
            {"model": "m", "input": "x", "previous_response_id": "resp_x"},
            "previous_response_not_found",
        ),
    ],
)
async def test_what_cannot_be_shown_is_refused_as_it_is_elsewhere(
    cluster: Any, query: str, body: dict[str, Any], code: str | None
) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    status, answer = await cluster.post(f"/v1/prompt{query}", body)
    assert status in (400, 404), answer
    assert code is None or answer["error"]["code"] == code
    assert not cluster.worker.requests


async def test_a_key_is_needed_and_bodies_have_their_limit(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD, api_key="k", max_body_bytes=1000)
    assert (await cluster.post("/v1/prompt?api=chat", chat_body()))[0] == 401
    key = {"Authorization": "Bearer k"}
    assert (await cluster.post("/v1/prompt?api=chat", {"x": "y" * 1000}, headers=key))[0] == 413


def pick(rng: random.Random) -> str:
    return "".join(
        rng.choice(["a", "be ", "\n", '"', "é", "<|im_end|>", "</think>", " x"]) for _ in range(rng.randint(1, 6))
    )


def random_messages(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(["You are one.", "You are two.\n"])}]
    for i in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": rng.choice([pick(rng), [{"type": "text", "text": pick(rng)}] * 2])})
        call = {"id": f"c{i}", "type": "function", "function": {"name": "read", "arguments": '{"path": "p"}'}}
        said: dict[str, Any] = {"role": "assistant", "content": pick(rng), "reasoning_content": pick(rng)}
        messages.append({**said, "tool_calls": [call]} if rng.random() < 0.5 else said)
        if "tool_calls" in messages[-1]:
            messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": pick(rng)})
    return messages


async def test_the_common_prefix_of_random_requests_is_that_of_what_workers_are_sent(cluster: Any) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    rng = random.Random(5)
    for _ in range(25):
        tools = rng.choice([None, chat_body()["tools"]])
        first = {"model": "m", "messages": random_messages(rng), "tools": tools}
        second = {**first, "messages": [*first["messages"][: rng.randint(0, 4)], *random_messages(rng)[1:]]}
        told, real = [], []
        for body in (first, second):
            view = await shown(cluster, "chat", body)
            tokens, keys = await sent(cluster, "chat", body)
            assert view["tokens"] == tokens
            assert [block["key"] for block in view["blocks"]] == keys
            check_sources(view, body)
            told.append(view)
            real.append(tokens)
        found = difference(*(msgspec.convert(view, PromptView) for view in told))
        expected = next((i for i, (a, b) in enumerate(zip(*real, strict=False)) if a != b), min(map(len, real)))
        assert found.common_tokens == expected
        assert found.common_blocks == expected // told[0]["block_size"]
        assert found.char == len(bytes(t for t in real[0][:expected] if t < 256).decode(errors="ignore")) + sum(
            len("<|im_start|>" if t == 257 else "<|im_end|>") for t in real[0][:expected] if t > 256
        )


def check_sources(view: Any, body: dict[str, Any]) -> None:
    """What is said to be a field's text is that field's text, at that place."""
    for segment in view["segments"]:
        if "offset" in segment and not segment.get("escaped"):
            value = value_at(body, segment["source"])
            assert value[segment["offset"] :].startswith(segment["text"]), segment


@pytest.mark.parametrize("depth", [500, 800, 960])
async def test_what_is_as_deep_as_a_request_may_be_is_shown(cluster: Any, depth: int) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD)
    tool = {"name": "f", "input_schema": {}}
    system = [{"type": "text", "text": f"{BILLING}\nBe brief."}]
    body = messages_body() | {"system": system, "tools": [tool], "messages": [{"role": "user", "content": "Go"}]}
    deep = b'{"a":' * depth + b"{}" + b"}" * depth
    data = msgspec.json.encode(body).replace(b'"input_schema":{}', b'"input_schema":' + deep)
    statuses = []
    for path in ("/v1/messages", "/v1/prompt?api=messages"):
        async with cluster.session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            statuses.append(response.status)
    assert statuses in ([200, 200], [400, 400])


async def test_prompts_that_are_shown_leave_threads_to_requests(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start(bundle=BUNDLE, card=CARD, tokenizer_threads=2, inline_prompt_bytes=1)
    may_end, view = threading.Event(), PromptHandler._view

    def slow(*arguments: Any) -> Any:
        may_end.wait()
        return view(*arguments)

    monkeypatch.setattr(PromptHandler, "_view", slow)
    shows = [asyncio.create_task(cluster.post("/v1/prompt?api=chat", chat_body())) for _ in range(4)]
    try:
        assert (await cluster.chat())[0] == 200
    finally:
        may_end.set()
    assert [status for status, _ in await asyncio.gather(*shows)] == [200] * 4
