"""What request headers say besides the body: hints and pins as Dynamo takes them, the sessions of coding agents, and who speaks.

A header that makes no sense counts as absent: the body's value holds then, as in Dynamo.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from kvbus_protocols.extensions import AgentHints, KvbusExt, NvExt, Session
from kvbus_protocols.generation import GenerationRequest

R = TypeVar("R", bound=GenerationRequest)

MAX_CHARS = 256
UNSET_RANK = 2**32 - 1
"""A prefill rank that says "none"."""

TURN_METADATA = "x-codex-turn-metadata"
"""JSON about the request, in a header or in the body's ``client_metadata``."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}\Z")
_USER_AGENTS = (
    ("claude-cli/", "claude-code"),
    ("claude-code/", "claude-code"),
    ("codex", "codex"),
    ("openclaw", "openclaw"),
    ("opencode", "opencode"),
    ("qwencode", "qwen-code"),
    ("pi-coding-agent", "pi"),
    ("aider", "aider"),
)
_MARKS = (
    ("x-claude-code-session-id", "claude-code"),
    (TURN_METADATA, "codex"),
    ("x-codex-window-id", "codex"),
    ("x-session-affinity", "opencode"),
)


class HeaderExtensions(msgspec.Struct, frozen=True, kw_only=True):
    """``session``: named by the general header, ``harness_session``: by a header that an agent sends anyway.

    ``compaction``: whether the request condenses the session's history; None where the client does not say.
    ``request_id``: the client's own, for logs.
    ``harness``: the client program (claude-code, codex, opencode, qwen-code, openclaw, pi, aider), "" when nothing tells.
    """

    priority: int | None = None
    strict_priority: int | None = None
    instance_id: str | None = None
    prefill_instance_id: str | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    tenant: str | None = None
    session: Session | None = None
    harness_session: Session | None = None
    session_final: bool | None = None
    compaction: bool | None = None
    request_id: str | None = None
    harness: str = ""


def read_headers(headers: Mapping[str, str]) -> HeaderExtensions:
    """``headers``: by their names in any case."""
    given = {name.lower(): value for name, value in headers.items()}

    def text(*names: str) -> str | None:
        return next((value for name in names if (value := _text(given.get(name))) is not None), None)

    def number(low: int, high: int, *names: str) -> int | None:
        found = (_number(given.get(name), low, high) for name in names)
        return next((value for value in found if value is not None), None)

    return HeaderExtensions(
        priority=number(-(2**31), 2**31 - 1, "x-dynamo-request-priority"),
        strict_priority=number(0, 2**32 - 1, "x-dynamo-request-strict-priority"),
        instance_id=text("x-dynamo-worker-instance-id", "x-worker-instance-id"),
        prefill_instance_id=text("x-dynamo-prefill-instance-id", "x-prefill-instance-id"),
        dp_rank=number(0, 2**32 - 1, "x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank"),
        prefill_dp_rank=number(0, UNSET_RANK - 1, "x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"),
        tenant=text("x-tenant-id"),
        session=_session(text("x-dynamo-session-id"), text("x-dynamo-parent-session-id")),
        harness_session=_harness_session(text),
        session_final=_flag(given.get("x-dynamo-session-final")),
        compaction=condenses(given.get(TURN_METADATA)),
        request_id=text("x-request-id"),
        harness=_harness(given),
    )


def with_headers(request: R, headers: HeaderExtensions) -> R:
    """The request with what its headers add: hints, pins and the tenant win over the body; so does a session named by the general
    header, while one named by a harness's own header only counts where the body names none."""
    nvext, kvbus = _nvext(request.nvext, headers), _kvbus(request.kvbus, headers)
    if nvext is request.nvext and kvbus is request.kvbus:
        return request
    return msgspec.structs.replace(request, nvext=nvext, kvbus=kvbus)


def _nvext(body: NvExt | None, headers: HeaderExtensions) -> NvExt | None:
    hints = _given(priority=headers.priority, strict_priority=headers.strict_priority)
    fields = _given(
        backend_instance_id=headers.instance_id,
        decode_worker_id=headers.instance_id,
        prefill_worker_id=headers.prefill_instance_id,
        dp_rank=headers.dp_rank,
        prefill_dp_rank=headers.prefill_dp_rank,
        cache_salt=headers.tenant,
    )
    base = body or NvExt()
    if hints:
        fields["agent_hints"] = msgspec.structs.replace(base.agent_hints or AgentHints(), **hints)
    return msgspec.structs.replace(base, **fields) if fields else body


def _kvbus(body: KvbusExt | None, headers: HeaderExtensions) -> KvbusExt | None:
    base = body or KvbusExt()
    session = headers.session or base.session or headers.harness_session
    if session is not None and base.session is not None and session.id == base.session.id:
        session = msgspec.structs.replace(base.session, parent=session.parent or base.session.parent)
    if session is not None and headers.session_final is not None:
        session = msgspec.structs.replace(session, final=headers.session_final)
    return body if session == base.session else msgspec.structs.replace(base, session=session)


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _text(value: str | None) -> str | None:
    """Not empty, not long, and nothing in it that a log line or another service would choke on."""
    value = (value or "").strip()
    return value if 0 < len(value) <= MAX_CHARS and value.isprintable() else None


def _number(value: str | None, low: int, high: int) -> int | None:
    if value is None or not _INTEGER.match(value.strip()):
        return None
    number = int(value)
    return number if low <= number <= high else None


def _flag(value: str | None) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get((value or "").strip().lower())


def _session(session_id: str | None, parent: str | None) -> Session | None:
    """A session is no child of itself."""
    return None if session_id is None else Session(session_id, None if parent == session_id else parent)


def _harness_session(text: Callable[..., str | None]) -> Session | None:
    """Of Claude Code, Codex (its newer header first), OpenCode. Claude Code's sub-agents share its session id and have one of their
    own; the parent of one that is not nested is the session."""
    root, agent = text("x-claude-code-session-id"), text("x-claude-code-agent-id")
    if agent is not None:
        return _session(agent, text("x-claude-code-parent-agent-id") or root)
    if root is not None:
        return _session(root, None)
    codex = text("thread-id", "session-id", "session_id", "conversation_id")
    if codex is not None:
        return _session(codex, text("x-codex-parent-thread-id"))
    return _session(text("x-session-id", "x-session-affinity"), text("x-parent-session-id"))


def condenses(turn_metadata: str | None) -> bool | None:
    """Whether a request that Codex describes so condenses a history; None when it does not say."""
    try:
        metadata = msgspec.json.decode(turn_metadata or "null")
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):  # a header may hold bytes that are no UTF-8
        return None
    if not isinstance(metadata, dict) or "request_kind" not in metadata:
        return None
    return bool(metadata["request_kind"] == "compaction")


def _harness(given: Mapping[str, str]) -> str:
    for name in ("user-agent", "originator"):
        program = given.get(name, "").strip().lower()
        for prefix, harness in _USER_AGENTS:
            if program.startswith(prefix):
                return harness
    return next((harness for header, harness in _MARKS if header in given), "")
