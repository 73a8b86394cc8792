"""Whom a request counts for, and what its client is told when that one has too much."""

from hashlib import sha256
from typing import Any

import pytest

from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.router import RouteRequest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def refuse(code: ErrorCode) -> Any:
    def answer(_message: RouteRequest) -> None:
        raise RequestFailed(ErrorReply(code=code, message="too many wait", retryable=True, retry_after_s=6.2))

    return answer


def bodies(cluster: Any) -> dict[str, dict[str, Any]]:
    chat = cluster.body()
    return {
        CHAT: chat,
        MESSAGES: {**chat, "max_tokens": 5},
        RESPONSES: {"model": chat["model"], "input": "hi", "store": False},
    }


@pytest.mark.parametrize(
    ("path", "code", "status", "kind"),
    [
        (CHAT, ErrorCode.RATE_LIMITED, 429, "rate_limit_error"),
        (RESPONSES, ErrorCode.RATE_LIMITED, 429, "rate_limit_error"),
        (MESSAGES, ErrorCode.RATE_LIMITED, 429, "rate_limit_error"),
        (CHAT, ErrorCode.OVERLOADED, 503, "service_unavailable_error"),
        (RESPONSES, ErrorCode.OVERLOADED, 503, "service_unavailable_error"),
        (MESSAGES, ErrorCode.OVERLOADED, 529, "overloaded_error"),
        (MESSAGES, ErrorCode.NO_WORKERS, 503, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_limits_are_told_in_the_shape_of_each_api_with_the_time_to_come_back(
    cluster: Any, path: str, code: ErrorCode, status: int, kind: str, stream: bool
) -> None:
    await cluster.start()
    cluster.router.answer = refuse(code)
    async with cluster.session.post(path, json={**bodies(cluster)[path], "stream": stream}) as response:
        told = await response.json()
    assert (response.status, response.headers["Retry-After"]) == (status, "7")
    assert told["error"]["type"] == kind
    if path != MESSAGES:
        assert told["error"]["code"] == code
    assert len(cluster.router.requests) == 1, "a limit is for the client to wait for, not for the frontend"


@pytest.mark.parametrize(
    ("source", "headers", "tenant"),
    [
        ("auto", {}, "key"),
        ("auto", {"x-tenant-id": "acme"}, "acme"),
        ("salt", {}, ""),
        ("key", {"x-tenant-id": "acme"}, "key"),
    ],
)
async def test_the_router_is_told_whom_a_request_counts_for(
    cluster: Any, source: str, headers: dict[str, str], tenant: str
) -> None:
    await cluster.start(api_key="one,two", tenant_source=source)
    headers = {**headers, "Authorization": "Bearer two"}
    async with cluster.session.post(CHAT, json=cluster.body(), headers=headers) as response:
        assert response.status == 200
    expected = "key-" + sha256(b"two").hexdigest()[:12] if tenant == "key" else tenant
    assert [asked.tenant for asked in cluster.router.requests] == [expected]
    # Who shares cached blocks is decided by the salt alone.
    assert [sent.cache_salt for sent in cluster.worker.requests] == [headers.get("x-tenant-id", "")]


async def test_the_router_is_told_whether_a_person_or_a_tool_has_the_word(cluster: Any) -> None:
    await cluster.start()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look around"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
    ]
    await cluster.chat(messages=messages[:1])
    await cluster.chat(messages=messages)
    assert [asked.hints.input_trigger for asked in cluster.router.requests] == ["user", "tool"]
    assert [sent.hints.input_trigger for sent in cluster.worker.requests] == ["user", "tool"]
