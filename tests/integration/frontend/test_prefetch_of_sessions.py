"""Blocks of waiting sessions are brought back: at once, when told to, and when a tool is expected to end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvbus_blocks.keys import KEY_BYTES
from kvbus_testkit.timing import eventually
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.worker import NeedTokens, Prefetch
from tests.integration.frontend.test_sessions_api import ask, chain, fetch, other_frontend

TEMPLATE = (Path(__file__).parents[2] / "property/frontend/templates/qwen3.jinja").read_text()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = {"role": "user", "content": "What do you see?"}
CALLING = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
NO_WAIT = {"prefetch_lead_s": 3600.0, "prefetch_min_wait_s": 0.0}


async def start(cluster: Any, **settings: Any) -> None:
    bundle = byte_level_bundle(chat_template=TEMPLATE, context_length=4096)
    await cluster.start(bundle=bundle, card={"context_length": 4096}, **settings)


async def talk(cluster: Any, messages: list[dict[str, Any]], *, says: str, **kvbus: Any) -> dict[str, Any]:
    cluster.says(says)
    body = {"model": "m", "messages": messages, "tools": TOOLS, "kvbus": {"session": {"id": "s1"}, **kvbus}}
    status, answer = await cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    said: dict[str, Any] = answer["choices"][0]["message"]
    return said


async def post(client: Any, path: str, body: dict[str, Any]) -> int:
    async with client.post(path, json=body) as response:
        return int(response.status)


def result(said: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a tree"}


def text(tokens: bytes) -> str:
    return bytes(token for token in unpack_tokens(tokens) if token < 256).decode()


async def test_a_session_is_brought_back_on_request_with_all_that_was_said(cluster: Any) -> None:
    await cluster.start()
    await ask(cluster, "What is one?", "s1", {"x-tenant-id": "acme"})
    status, done = await cluster.post("/v1/kv/prefetch", {"session_id": "s1"}, headers={"x-tenant-id": "acme"})
    assert status == 200
    (asked,) = cluster.worker.prefetches
    assert (asked.tenant, asked.cache_salt) == ("acme", "acme")
    assert "What is one?" in text(asked.tokens)
    assert text(asked.tokens).endswith("Hello worl"), "the last token has not been computed"
    route = cluster.router.requests[-1]
    assert (route.speculative, route.max_tokens, route.session.id) == (True, 1, "s1")
    await eventually(
        lambda: cluster.router.phases(route.request_id) == ["finished"], what="a reservation that is given up"
    )
    assert done == {
        "object": "kv.prefetch", "model": "m", "worker_id": "w1",
        "prompt_tokens": len(asked.tokens) // 4, "cached_tokens": len(asked.tokens) // 4, "onboarded_tokens": 8,
    }  # fmt: skip
    assert cluster.metric("prefetches_total", cause="session", outcome="brought") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_prompt_is_brought_back_as_a_request_of_any_api_makes_it(cluster: Any, path: str) -> None:
    await cluster.start()
    said = {"model": "m", "max_tokens": 9, "messages": [QUESTION]}
    others = {"/v1/responses": {"input": "What do you see?"}, "/v1/completions": {"prompt": "What do you see?"}}
    body = {"model": "m", **others[path]} if path in others else said
    headers = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
    await cluster.post(path, body, headers=headers)
    status, done = await cluster.post("/v1/kv/prefetch", {**body, "timeout_s": 5}, headers=headers)
    assert status == 200, done
    (request,), (asked,) = cluster.worker.requests, cluster.worker.prefetches
    assert asked.tokens == request.tokens
    assert len(cluster.worker.requests) == 1, "nothing is generated"


async def test_only_what_the_worker_may_lack_is_sent_and_all_of_it_when_it_asks(cluster: Any) -> None:
    await cluster.start()
    await ask(cluster, "What is one?", "s1")
    cluster.router.cached_tokens = 8
    bring = cluster.worker.bring

    def misses(message: Prefetch) -> Any:
        return NeedTokens(request_id=message.request_id) if message.prefix_tokens else bring(message)

    cluster.worker.bring = misses
    status, _ = await cluster.post("/v1/kv/prefetch", {"session_id": "s1"})
    assert status == 200
    assert [message.prefix_tokens for message in cluster.worker.prefetches] == [8, 0]
    keys = cluster.router.requests[-1].keys
    assert cluster.worker.prefetches[0].prefix_key == keys[KEY_BYTES : 2 * KEY_BYTES]


@pytest.mark.parametrize("body", [{}, {"model": "m"}, {"session_id": ""}, {"session": "s1"}])
async def test_a_prefetch_of_nothing_is_refused(cluster: Any, body: dict[str, Any]) -> None:
    await cluster.start()
    status, answer = await cluster.post("/v1/kv/prefetch", body)
    assert (status, answer["error"]["param"]) == (400, "session_id")


async def test_a_prefetch_says_what_it_does_not_take(cluster: Any) -> None:
    await cluster.start()
    status, answer = await cluster.post("/v1/kv/prefetch", {"session_id": "s1", "timeout": 5})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "timeout", "unknown_field")
    status, answer = await cluster.post("/v1/kv/prefetch", {"model": "m", "prompt": ["a", "b"]})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_a_prefetch_that_takes_too_long_and_one_too_many_are_told(cluster: Any) -> None:
    await cluster.start(max_prefetches=1)
    await ask(cluster, "hi", "s1")
    cluster.router.gate.clear()
    first = asyncio.create_task(cluster.post("/v1/kv/prefetch", {"session_id": "s1", "timeout_s": 0.3}))
    await eventually(lambda: len(cluster.router.requests) == 2, what="a prefetch that waits")
    status, answer = await cluster.post("/v1/kv/prefetch", {"session_id": "s1"})
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    status, answer = await first
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    cluster.router.gate.set()


async def test_a_session_of_another_frontend_is_brought_back_by_that_one(cluster: Any) -> None:
    await cluster.start()
    client = await other_frontend(cluster)
    await ask(cluster, "What is one?", "s1")
    async with client.post("/v1/kv/prefetch", json={"session_id": "s1"}) as response:
        assert response.status == 200
        assert (await response.json())["worker_id"] == "w1"
    async with client.post("/v1/kv/prefetch", json={"session_id": "s2"}) as response:
        assert response.status == 404


@pytest.mark.parametrize("by_another_frontend", [False, True])
async def test_what_is_brought_back_while_its_session_is_deleted_is_dropped_again(
    cluster: Any, by_another_frontend: bool
) -> None:
    await start(cluster)
    client = await other_frontend(cluster) if by_another_frontend else cluster.session
    await talk(cluster, [QUESTION], says="fine")
    held = set(chain(cluster.router.requests[-1]))
    cluster.router.gate.clear()
    asking = asyncio.create_task(post(client, "/v1/kv/prefetch", {"session_id": "s1"}))
    await eventually(lambda: len(cluster.router.requests) == 2, what="a prefetch that waits")
    status, _ = await fetch(cluster, "/v1/sessions/s1", "DELETE")
    assert status == 200
    assert held <= set(cluster.worker.dropped)
    cluster.worker.drops.clear()
    cluster.router.gate.set()
    assert await asking == 200
    await eventually(lambda: cluster.worker.drops, what="blocks that are dropped again")
    assert held <= set(cluster.worker.dropped)


async def test_a_hint_tells_when_the_next_request_comes(cluster: Any) -> None:
    await start(cluster, **NO_WAIT, prefetch="asked")
    await talk(cluster, [QUESTION], says=CALLING)
    await talk(cluster, [QUESTION], says=CALLING, prefetch={"after_s": 60})
    await eventually(lambda: cluster.worker.prefetches, what="a prefetch")
    (asked,) = cluster.worker.prefetches
    assert "look" in text(asked.tokens)
    await eventually(
        lambda: cluster.metric("prefetches_total", cause="planned", outcome="brought") == 1,
        what="a prefetch that is over",
    )


async def test_a_request_that_comes_first_makes_the_plan_void(cluster: Any) -> None:
    await start(cluster, prefetch_lead_s=0.0)
    await cluster.add_indexer()
    await talk(cluster, [QUESTION], says=CALLING, prefetch={"after_s": 3000})
    _, shown = await fetch(cluster, "/v1/sessions/s1")
    assert 2990 < shown["prefetch_at"] - shown["last_used_at"] <= 3000
    await talk(cluster, [QUESTION], says="fine")
    _, shown = await fetch(cluster, "/v1/sessions/s1")
    assert shown["prefetch_at"] is None
    assert cluster.metric("prefetches_due") == 0


async def test_how_long_a_tool_runs_is_learned_from_its_last_runs(cluster: Any) -> None:
    await start(cluster, **NO_WAIT)
    messages: list[dict[str, Any]] = [QUESTION]
    for _ in range(4):
        assert not cluster.worker.prefetches
        said = await talk(cluster, messages, says=CALLING)
        messages += [said, result(said)]
    await eventually(lambda: cluster.worker.prefetches, what="a prefetch")
    assert cluster.metric("prefetches_planned_total", cause="learned") == 1
    (asked,) = cluster.worker.prefetches
    assert asked.tokens.startswith(cluster.worker.requests[-1].tokens)


async def test_prefetch_that_is_off_plans_and_keeps_nothing(cluster: Any) -> None:
    await start(cluster, prefetch="never")
    await talk(cluster, [QUESTION], says=CALLING, prefetch={"after_s": 0})
    status, _ = await cluster.post("/v1/kv/prefetch", {"session_id": "s1"})
    assert status == 404
    assert not cluster.worker.prefetches
    assert cluster.metric("session_prompt_bytes") == 0


async def test_thoughts_about_a_question_that_is_answered_are_dropped(cluster: Any) -> None:
    await start(cluster)
    thought = "I have to look around me before I can answer that question."
    said = await talk(cluster, [QUESTION], says=f"<think>\n{thought}\n</think>\n\n{CALLING}")
    messages = [QUESTION, said, result(said)]
    said = await talk(cluster, messages, says=f"<think>\n{thought}\n</think>\n\nA tree on a hill.")
    assert not cluster.worker.drops
    body = {"model": "m", "messages": [*messages, said, {"role": "user", "content": "And now?"}], "tools": TOOLS}
    variables = {"preserve_thinking": False}
    await cluster.post(
        "/v1/chat/completions", {**body, "chat_template_kwargs": variables, "kvbus": {"session": {"id": "s1"}}}
    )
    *_, before, after = cluster.router.requests
    assert not set(chain(before)) <= set(chain(after)), "the template leaves them out"
    await eventually(lambda: cluster.worker.drops, what="thoughts that are dropped")
    assert set(chain(before)) - set(chain(after)) <= set(cluster.worker.dropped)
    assert not set(chain(after)) & set(cluster.worker.dropped)
