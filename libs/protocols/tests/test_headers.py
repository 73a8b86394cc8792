"""Headers to request extensions."""

from typing import Any

import msgspec
import pytest

from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.extensions import AgentHints, KvbusExt, NvExt, Session
from kvbus_protocols.headers import HeaderExtensions, read_headers, with_headers


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def merged(headers: dict[str, str], **fields: Any) -> ChatRequest:
    return with_headers(chat(**fields), read_headers(headers))


def test_a_request_without_such_headers_stays_the_same_object() -> None:
    request = chat(nvext={"cache_salt": "s"})
    assert read_headers({"Host": "h", "Content-Type": "application/json"}) == HeaderExtensions()
    assert with_headers(request, HeaderExtensions()) is request
    assert chat().nvext is None
    assert merged({}).nvext is None


def test_a_header_wins_field_by_field_over_the_body() -> None:
    request = merged(
        {"X-Dynamo-Request-Priority": "7", "x-dynamo-worker-instance-id": "w2"},
        nvext={"agent_hints": {"priority": 1, "osl": 9}, "backend_instance_id": 4, "annotations": ["a"]},
    )
    assert request.nvext == NvExt(
        agent_hints=AgentHints(priority=7, osl=9),
        backend_instance_id="w2",
        decode_worker_id="w2",
        annotations=["a"],
    )
    assert request.nvext.pin == "w2"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-dynamo-request-priority", "high"),
        ("x-dynamo-request-priority", "1.5"),
        ("x-dynamo-request-priority", str(2**31)),
        ("x-dynamo-request-priority", "9" * 5000),
        ("x-dynamo-request-priority", "١"),  # a digit, but not one of ASCII
        ("x-dynamo-request-strict-priority", "-1"),
        ("x-dynamo-dp-rank", ""),
        ("x-dynamo-prefill-dp-rank", str(2**32 - 1)),
        ("x-tenant-id", "  "),
        ("x-tenant-id", "t" * 257),
        ("x-dynamo-session-id", "a\x7fb"),
        ("x-dynamo-session-id", "\udcff"),
        ("x-dynamo-session-final", "maybe"),
        ("x-codex-turn-metadata", "{"),
        ("x-codex-turn-metadata", "[]"),
        ("x-codex-turn-metadata", "\udcff"),
        ("x-codex-turn-metadata", "[" * 8000),
    ],
)
def test_a_malformed_header_leaves_the_body_as_it_is(header: str, value: str) -> None:
    request = chat(nvext={"agent_hints": {"priority": 3}}, kvbus={"session": {"id": "s"}})
    assert with_headers(request, read_headers({header: value})) is request


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-dynamo-request-strict-priority": "2"}, {"agent_hints": AgentHints(strict_priority=2)}),
        ({"x-dynamo-request-priority": "-5"}, {"agent_hints": AgentHints(priority=-5)}),
        ({"x-worker-instance-id": "12"}, {"backend_instance_id": "12", "decode_worker_id": "12"}),
        ({"x-prefill-instance-id": "p"}, {"prefill_worker_id": "p"}),
        ({"x-data-parallel-rank": "1"}, {"dp_rank": 1}),
        ({"x-dp-rank": "1", "x-dynamo-dp-rank": "2"}, {"dp_rank": 2}),
        ({"x-dp-rank": "1", "x-dynamo-dp-rank": "x"}, {"dp_rank": 1}),
        ({"x-dynamo-prefill-dp-rank": "3"}, {"prefill_dp_rank": 3}),
        ({"x-tenant-id": "acme"}, {"cache_salt": "acme"}),
    ],
)
def test_headers_and_their_aliases_have_the_meaning_that_dynamo_gives_them(
    headers: dict[str, str], fields: dict[str, Any]
) -> None:
    assert merged(headers).nvext == NvExt(**fields)


def test_the_tenant_goes_before_both_salts_of_the_body() -> None:
    request = merged({"x-tenant-id": "acme"}, nvext={"cache_salt": "inner"}, cache_salt="outer")
    assert request.nvext is not None
    assert request.nvext.cache_salt == "acme"


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, Session("s", "p")),
        ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "s"}, Session("s")),
        ({"x-dynamo-session-id": "s", "x-dynamo-session-final": "true"}, Session("s", final=True)),
        ({"X-Claude-Code-Session-Id": "root"}, Session("root")),
        ({"x-claude-code-session-id": "root", "x-claude-code-agent-id": "child"}, Session("child", "root")),
        (
            {
                "x-claude-code-session-id": "root",
                "x-claude-code-agent-id": "grandchild",
                "x-claude-code-parent-agent-id": "child",
            },
            Session("grandchild", "child"),
        ),
        ({"thread-id": "t", "session-id": "s", "x-codex-parent-thread-id": "p"}, Session("t", "p")),
        ({"session-id": "s"}, Session("s")),
        ({"session_id": "s", "conversation_id": "c"}, Session("s")),
        ({"conversation_id": "c"}, Session("c")),
        ({"x-session-affinity": "ses_1", "x-session-id": "ses_1", "x-parent-session-id": "ses_0"}, Session("ses_1", "ses_0")),
        ({"x-session-affinity": "ses_1"}, Session("ses_1")),
        ({"x-claude-code-session-id": "native", "x-dynamo-session-id": "s"}, Session("s")),
        ({"x-claude-code-session-id": "native", "x-dynamo-session-final": "1"}, Session("native", final=True)),
    ],
)  # fmt: skip
def test_each_harness_names_its_session_in_its_own_way(headers: dict[str, str], session: Session) -> None:
    assert merged(headers).kvbus == KvbusExt(session=session)


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-claude-code-session-id": "native"}, Session("body", ephemeral=True)),
        ({"x-dynamo-session-id": "s"}, Session("s")),
        ({"x-dynamo-session-id": "body", "x-dynamo-parent-session-id": "p"}, Session("body", "p", ephemeral=True)),
        ({"x-dynamo-session-final": "true"}, Session("body", final=True, ephemeral=True)),
    ],
)
def test_a_session_of_the_body_goes_before_a_harness_header_and_after_the_general_one(
    headers: dict[str, str], session: Session
) -> None:
    assert merged(headers, kvbus={"session": {"id": "body", "ephemeral": True}}).kvbus == KvbusExt(session=session)


@pytest.mark.parametrize(
    ("headers", "harness"),
    [
        ({"User-Agent": "claude-cli/2.1.332 (external, sdk-cli)"}, "claude-code"),
        ({"user-agent": "undici", "x-claude-code-session-id": "s"}, "claude-code"),
        ({"user-agent": "codex_exec/0.171.0 (Linux)"}, "codex"),
        ({"originator": "codex-tui"}, "codex"),
        ({"user-agent": "opencode/1.18.33"}, "opencode"),
        ({"x-session-affinity": "ses_1"}, "opencode"),
        ({"user-agent": "QwenCode/0.24.4 (linux; x64)"}, "qwen-code"),
        ({"user-agent": "python-httpx/0.28"}, ""),
    ],
)
def test_the_harness_is_known_by_its_headers(headers: dict[str, str], harness: str) -> None:
    assert read_headers(headers).harness == harness


def test_a_compaction_and_the_clients_own_request_id_are_read() -> None:
    headers = read_headers({"x-codex-turn-metadata": '{"request_kind":"compaction"}', "X-Request-Id": " r1 "})
    assert (headers.compaction, headers.request_id) == (True, "r1")
    assert read_headers({"x-codex-turn-metadata": '{"request_kind":"turn"}'}).compaction is False


@pytest.mark.parametrize("metadata", ["", "{", "[]", "{}", "null", '"compaction"'])
def test_metadata_that_name_no_kind_of_request_say_nothing(metadata: str) -> None:
    assert read_headers({"x-codex-turn-metadata": metadata}).compaction is None
    assert read_headers({}).compaction is None
