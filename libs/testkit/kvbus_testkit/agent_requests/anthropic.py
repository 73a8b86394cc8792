"""Requests of the Messages API: Claude Code in four versions, OpenClaw, pi and opencode."""

import copy
import json
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvbus_testkit.agent_requests.prose import prose, schema

Body = dict[str, Any]
Block = dict[str, Any]
Version = Literal["2.1.332", "2.1.197", "2.1.140", "2.1.42"]

KEPT: Mapping[str, Any] = {"type": "ephemeral"}
DEFERRED = ("EnterWorktree", "Monitor", "NotebookEdit", "WebFetch", "WebSearch")
"""Tools that Claude Code loads by a search."""

# Name and size of the description: about 31 thousand characters in all.
_CLAUDE_TOOLS = {
    "Agent": 5200, "Bash": 9800, "Edit": 1100, "ListAgents": 300, "Read": 1700, "ReportFindings": 800, "ScheduleWakeup": 2300,
    "Skill": 1300, "ToolSearch": 800, "Workflow": 2200, "Write": 700,
}  # fmt: skip


# Blocks and messages of a history


def text(words: str, **fields: Any) -> Block:
    return {"type": "text", "text": words, **fields}


def thinking(thought: str, signature: str = "c2lnbmVk") -> Block:
    return {"type": "thinking", "thinking": thought, "signature": signature}


def tool_use(call_id: str, name: str, **arguments: Any) -> Block:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result(call_id: str, content: Any, **fields: Any) -> Block:
    return {"tool_use_id": call_id, "type": "tool_result", "content": content, **fields}


def references(*names: str) -> list[Block]:
    """What a search for tools has found."""
    return [{"type": "tool_reference", "tool_name": name} for name in names]


def reminder(words: str) -> Block:
    return text(f"<system-reminder>\n{words}\n</system-reminder>\n")


def user(*content: Any) -> Body:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> Body:
    return {"role": "assistant", "content": list(content)}


# Claude Code


def claude_code(
    *history: Body,
    version: Version = "2.1.332",
    session: int = 1,
    request: int = 1,
    question: str = "run echo hello and tell me what it printed",
    directory: str = "/srv/dev/project",
    git: bool = True,
    date: str = "2026-11-29",
    loaded: Sequence[str] = (),
    model: str = "local-model",
) -> Body:
    """``history``: the messages after the first question. ``request``: its number in the session. ``loaded``: deferred tools that a
    search has found by now."""
    late_system = version in ("2.1.332", "2.1.197")
    messages = [_first_message(question, directory, git=git, model=model)]
    if late_system:
        messages.append({"role": "system", "content": [text(_environment(directory, git=git, model=model, date=date))]})
    else:
        words = _environment(directory, git=git, model=model, date=date)
        messages[0]["content"].insert(0, text(f"<system-reminder>\n{words}\n</system-reminder>\n"))
    messages += copy.deepcopy(list(history))
    _move_cache_point(messages)
    user_id = {"device_id": f"{7:064x}", "account_uuid": "", "session_id": session_id(session)}
    body: Body = {
        "model": model,
        "messages": messages,
        "system": [
            text(billing(version, question, session=session, request=request)),
            text("You are a made-up agent, built on a made-up kit for agents, in tests.", cache_control=KEPT),
            text(_claude_system(directory, model), cache_control=KEPT),
        ],
        "tools": _claude_tools(loaded),
        "metadata": {"user_id": json.dumps(user_id, separators=(",", ":"))},
        "max_tokens": 32_000,
        "stream": True,
    }
    if version == "2.1.42":
        return {**body, "temperature": 1}
    body |= {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    if version == "2.1.140":
        body["thinking"] = {"type": "enabled", "budget_tokens": 31_999}
    return body


def session_id(session: int) -> str:
    return str(uuid.UUID(int=random.Random(session).getrandbits(128), version=4))


def billing(version: Version, question: str, *, session: int = 1, request: int = 1, more: str = "") -> str:
    """The first block of a system prompt; its digits differ per question, in 2.1.140 the last ones per request."""
    digits = f"{random.Random(question).getrandbits(12):03x}"
    cch = {"2.1.140": f" cch={random.Random(f'{session}.{request}').getrandbits(20):05x};", "2.1.42": " cch=00000;"}
    return (
        f"x-anthropic-billing-header: cc_version={version}.{digits}; cc_entrypoint=sdk-cli;{cch.get(version, '')}{more}"
    )


def claude_headers(version: Version = "2.1.332", *, session: int = 1, agent: str | None = None) -> dict[str, str]:
    """``agent``: the id of a sub-agent."""
    headers = {
        "Authorization": "Bearer local-dev-token",
        "User-Agent": f"claude-cli/{version} (external, sdk-cli)",
        "X-Claude-Code-Session-Id": session_id(session),
        "X-Stainless-Retry-Count": "0",
        "X-Stainless-Timeout": "600",
        "anthropic-version": "2023-06-01",
        "anthropic-dangerous-direct-browser-access": "true",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,a-beta-that-nobody-knows-2031-01-01",
        "x-app": "cli",
    }
    return headers if agent is None else {**headers, "x-claude-code-agent-id": agent}


def claude_title() -> Body:
    """What the terminal asks for beside the first request: a title by a schema, without tools."""
    title = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    return {
        "model": "local-model",
        "messages": [user(text("<session>\nrun echo hello\n</session>"))],
        "system": [text(billing("2.1.332", "title")), text(prose("title", 900))],
        "tools": [],
        "max_tokens": 32_000,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": title}},
        "stream": True,
    }  # fmt: skip


def claude_count() -> Body:
    """One of the many counts that ``/context`` asks for."""
    return {"model": "local-model", "messages": [{"role": "user", "content": "foo"}], "tools": _claude_tools(())[:1]}


def compaction() -> Block:
    """The text that asks for a summary, behind what the last message holds already."""
    return text(prose("compaction", 5400))


def _first_message(question: str, directory: str, *, git: bool, model: str) -> Body:
    state = [reminder(f"gitStatus: branch main in {directory}\n" + prose("git", 470))] if git else []
    return user(*state, reminder(f"Commits are by {model}. " + prose("attribution", 500)), text(question))


def _environment(directory: str, *, git: bool, model: str, date: str) -> str:
    head = f"# Environment\nWorking directory: {directory}\nGit: {git}\nModel: {model}\n"
    return f"{head}Tools to search for: {', '.join(DEFERRED)}\n{prose('environment', 8900)}\nToday's date is {date}."


def _claude_system(directory: str, model: str) -> str:
    memory = f"\nMemory lies in /srv/dev/.made-up/projects/{directory.replace('/', '-')}/memory for {model}.\n"
    return prose("claude 1", 3400) + memory + prose("claude 2", 3300)


def _claude_tools(loaded: Sequence[str]) -> list[Body]:
    """In alphabetical order, the placeholder and what was loaded among them."""
    shown = {name: _tool(name, size) for name, size in _CLAUDE_TOOLS.items()}
    deferred = {name: {**_tool(name, 700), "defer_loading": True} for name in ("DeferredToolPlaceholder", *loaded)}
    return [tool for _, tool in sorted((shown | deferred).items())]


def _tool(name: str, description_chars: int) -> Body:
    properties = {"command": {"type": "string", "description": prose(name, 40)}, "timeout": {"type": "number"}}
    made = schema(name, 2)
    made["properties"] |= properties
    return {"name": name, "description": prose(f"{name} tool", description_chars), "input_schema": made}


def _move_cache_point(messages: list[Body]) -> None:
    """It is always in the last block of the last message; a system message that it has left is a plain string from then on."""
    for message in messages[:-1]:
        if message["role"] == "system" and isinstance(message["content"], list):
            message["content"] = message["content"][0]["text"]
    last = messages[-1]
    if isinstance(last["content"], str):
        last["content"] = [text(last["content"])]
    last["content"] = [*last["content"][:-1], {**last["content"][-1], "cache_control": KEPT}]


# Others


def openclaw(*history: Body, question: str = "run echo hello") -> Body:
    """Ends with a message of internal context that is gone from its place in the next request, so two messages of the user may
    follow each other. Ids lose all but letters and digits."""
    internal = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n" + prose("internal", 300) + "\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    tools = [
        _tool(name, 800)
        for name in ("exec", "process", "read", "write", "edit", "tool_search", "tool_describe", "tool_call")
    ]
    return {
        "model": "local-model",
        "max_tokens": 8192,
        "stream": True,
        "system": [text(prose("stable", 44_000), cache_control=KEPT), text(prose("dynamic", 3800))],
        "messages": [
            {"role": "user", "content": f"[Sun 2026-11-29 22:02 UTC] {question}"},
            *copy.deepcopy(list(history)),
            {"role": "user", "content": [text(internal, cache_control=KEPT)]},
        ],
        "tools": [*tools[:-1], {**tools[-1], "cache_control": KEPT}],
        "thinking": {"type": "enabled", "budget_tokens": 7168},
    }  # fmt: skip


def pi(*history: Body, question: str = "run echo hello") -> Body:
    return {
        "model": "local-model",
        "max_tokens": 10_666,
        "stream": True,
        "system": [
            text(prose("pi", 2600) + "\nCurrent date: 2026-11-29\nCurrent working directory: /d", cache_control=KEPT)
        ],
        "messages": [user(text(question, cache_control=KEPT)), *copy.deepcopy(list(history))],
        "tools": [_tool(name, 200) for name in ("read", "bash", "edit", "write")],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": None,
    }


def opencode(*history: Body, question: str = "run echo hello") -> Body:
    system = prose("opencode", 8200) + "\nToday's date: Sun Nov 29 2026\n" + prose("skills", 1300)
    return {
        "model": "local-model",
        "max_tokens": 32_000,
        "stream": True,
        "system": [text(system, cache_control=KEPT)],
        "messages": [user(text(f'"{question}"\n', cache_control=KEPT)), *copy.deepcopy(list(history))],
        "tools": [
            _tool(name, 1500) for name in ("bash", "edit", "glob", "grep", "list", "read", "task", "todowrite", "write")
        ],
        "tool_choice": {"type": "auto"},
    }


def tool_loop(name: str = "Bash") -> tuple[Body, Body]:
    """An answer with a thought, words and two calls, and the message with both results."""
    answer = assistant(
        thinking("The user wants a command to be run."),
        text("I run it."),
        tool_use("toolu_ab12", name, command="echo hello", timeout=5),
        tool_use("toolu_cd34", name, command="ls"),
    )
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    results = user(
        tool_result("toolu_ab12", "hello", is_error=False),
        tool_result("toolu_cd34", [text("a.png"), picture]),
    )
    return answer, results


def all_requests() -> dict[str, Body]:
    """One of each kind, with a history where the client would have one."""
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    search = (
        assistant(tool_use("toolu_ef56", "ToolSearch", query="select:WebFetch")),
        user(tool_result("toolu_ef56", references("WebFetch", "WebSearch"))),
    )
    late = {"role": "system", "content": "Be brief from now on.", "output_config": {"effort": "medium"}}
    more = (
        assistant(thinking("Done.", ""), text("It printed hello.")),
        user(tool_result("toolu_gone", [pdf]), reminder("A file has changed."), text("and now?")),
    )
    stripped = json.loads(json.dumps(tool_loop("exec")).replace("toolu_", "toolu"))
    web_search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    searching: Body = {"tools": [web_search], "tool_choice": {"type": "tool", "name": "web_search"}}
    longer = claude_code(*tool_loop(), *search, *more, late, loaded=("WebFetch", "WebSearch"))
    return {
        "claude-code 2.1.332": claude_code(*tool_loop(), late),
        "claude-code 2.1.332, longer": {**longer, "max_tokens": 128_000},
        "claude-code 2.1.332, web search": claude_code() | searching,
        "claude-code 2.1.332, title": claude_title(),
        "claude-code 2.1.197": claude_code(version="2.1.197"),
        "claude-code 2.1.140": claude_code(*tool_loop(), version="2.1.140"),
        "claude-code 2.1.42": claude_code(*tool_loop(), version="2.1.42"),
        "openclaw": openclaw(*stripped),
        "pi": pi(*tool_loop("bash")),
        "opencode": opencode(*tool_loop("bash")),
    }  # fmt: skip
