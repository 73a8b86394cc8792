"""Agents that speak the Responses API: Codex, and OpenClaw, opencode and pi in that mode. Used as those of ``openai``."""

import copy
import json
import random
from collections.abc import Mapping
from typing import Any, Literal

from kvbus_testkit.agent_requests.openai import (
    Body,
    Request,
    chat_requests,
    internal_context,
    plain,
    rewritten,
    session_id,
)
from kvbus_testkit.agent_requests.prose import prose, schema

Kind = Literal["turn", "prewarm", "compaction"]

LARK = 'start: "*** Begin Patch\\n" line+ "*** End Patch"\nline: /[^*\\n][^\\n]*/ "\\n"\n'
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}

_CODEX_TOOLS = {"exec_command": 3000, "write_stdin": 800, "request_user_input": 900, "view_image": 300}
_CODEX_GOALS = {"get_goal": 300, "create_goal": 1000, "update_goal": 1300}
_CODEX_AGENTS = {"spawn_agent": 2600, "send_input": 500, "wait_agent": 600, "resume_agent": 300, "close_agent": 300}


def function(name: str, description_chars: int = 300, **fields: Any) -> Body:
    parameters = schema(name, 3)
    parameters["properties"] |= {"command": {"type": "string", "description": prose(name, 40)}}
    described = {"description": prose(f"{name} tool", description_chars), "strict": False, "parameters": parameters}
    return {"type": "function", "name": name, **described, **fields}


def namespace(name: str, *tools: Body) -> Body:
    return {"type": "namespace", "name": name, "description": prose(f"{name} tools", 200), "tools": list(tools)}


def message(role: str, text: str) -> Body:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


class ResponsesAgent:
    """``first``: the items before the conversation; ``fields``: of the body."""

    def __init__(self, first: list[Body], tools: list[Body], **fields: Any) -> None:
        self.headers: dict[str, str] = {"User-Agent": "OpenAI/JS 6.1.0"}
        self.items = list(first)
        self.tools = tools
        self._fields = fields
        self._open: list[Body] = []

    def ask(self, question: str) -> None:
        self.items.append(message("user", question))

    def take(self, answer: Body) -> None:
        """A response in one piece."""
        items = [self._kept(item) for item in answer["output"]]
        self._open = [item for item in items if item["type"].endswith("_call")]
        self.items += items

    def give(self, *outputs: Any) -> None:
        """The results of the calls of the last answer. Of a search: the tools it has found."""
        for call, output in zip(self._open, outputs, strict=True):
            result: Body = {"type": f"{call['type']}_output", "output": output}
            if call["type"] == "tool_search_call":
                result = {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": output}
            self.items.append({**result, "call_id": call["call_id"]})

    def request(self) -> Request:
        fields: Body = {"stream": True, "store": False, "include": ["reasoning.encrypted_content"], **self._fields}
        body = {"model": "local-model", "input": copy.deepcopy(self.shown()), "tools": self.tools, **fields}
        return Request("/v1/responses", self.headers, body)

    def shown(self) -> list[Body]:
        return self.items

    def _kept(self, item: Body) -> Body:
        """An item of the answer as the next request has it."""
        if item["type"] == "function_call":
            return {**item, "arguments": rewritten(item["arguments"])}
        return item


class Codex(ResponsesAgent):
    """Invents an id for every item, and keeps those it was given; arguments come back as they were."""

    def __init__(self, session: int = 1, *, tools: list[Body] | None = None, first: tuple[Body, ...] = ()) -> None:
        start = [
            *first,
            message("developer", prose("codex", 17_400)),
            message("developer", "<skills_instructions>\n" + prose("codex skills", 2500)),
            message("user", "# AGENTS.md instructions for /srv/dev/project\n\n" + prose("codex agents", 700)),
            message("user", "<environment_context>\n  <cwd>/srv/dev/project</cwd>\n" + prose("codex cwd", 300)),
        ]
        shown = codex_tools() if tools is None else tools
        super().__init__(start, shown, tool_choice="auto", parallel_tool_calls=True, reasoning={"summary": "auto"})
        self._first = len(start)
        self._session = session_id(session)
        self._ids = random.Random(session)
        self._window = 0

    def request(self, kind: Kind = "turn") -> Request:
        sent = super().request()
        ids = {"session_id": self._session, "thread_id": self._session, "window_id": f"{self._session}:{self._window}"}
        metadata = json.dumps({**ids, "request_kind": kind, "thread_source": "user", "sandbox": "seccomp"})
        headers = {
            "User-Agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.171.0)",
            "originator": "codex_exec",
            "session-id": self._session,
            "thread-id": self._session,
            "x-client-request-id": self._session,
            "x-codex-window-id": ids["window_id"],
            "x-codex-turn-metadata": metadata,
            "x-codex-beta-features": "remote_compaction_v2",
        }
        client_metadata = {"session_id": self._session, "x-codex-turn-metadata": metadata}
        return Request(
            sent.path, headers, {**sent.body, "prompt_cache_key": self._session, "client_metadata": client_metadata}
        )

    def shown(self) -> list[Body]:
        return [
            item if "id" in item else {**item, "id": f"{item['type'][:3]}_{self._ids.getrandbits(64):016x}"}
            for item in self.items
        ]

    def compaction(self) -> Request:
        """The same input and one message more, but no tools."""
        sent = self.request("compaction")
        body = {**sent.body, "tools": [], "parallel_tool_calls": False}
        return Request(
            sent.path, sent.headers, {**body, "input": [*body["input"], message("user", prose("codex summary", 500))]}
        )

    def compacted(self, summary: str) -> None:
        """The history is what the user has said, and a summary."""
        first, later = self.items[: self._first], self.items[self._first :]
        asked = [item for item in later if item.get("role") == "user"]
        self.items = [*first, *asked, message("user", f"Another model has begun and left this summary:\n{summary}")]
        self._window += 1

    def _kept(self, item: Body) -> Body:
        if item["type"] == "reasoning":
            return {**item, "content": None}
        return {name: value for name, value in item.items() if name != "status"}


class OpenClawResponses(ResponsesAgent):
    """Of thoughts of earlier turns only what is sealed comes back. The internal context stands behind the newest question."""

    def __init__(self) -> None:
        names = ("exec", "process", "read", "write", "edit", "tool_search", "tool_describe", "tool_call")
        system = message("developer", prose("openclaw stable", 44_000) + prose("openclaw dynamic", 3800))
        reasoning = {"effort": "medium", "summary": "auto"}
        super().__init__([system], [function(name, 900) for name in names], max_output_tokens=8192, reasoning=reasoning)

    def shown(self) -> list[Body]:
        newest = max(i for i, item in enumerate(self.items) if item.get("role") == "user")
        earlier = [{**item, "summary": []} if item["type"] == "reasoning" else item for item in self.items[:newest]]
        context = message("user", internal_context(newest))
        return [*earlier, self.items[newest], context, *self.items[newest + 1 :]]

    def _kept(self, item: Body) -> Body:
        kept = super()._kept(item)
        return {**kept, "call_id": plain(kept["call_id"])} if "call_id" in kept else kept


def opencode_responses() -> ResponsesAgent:
    names = ("bash", "edit", "glob", "grep", "list", "read", "skill", "task", "todowrite", "write")
    system = message("system", prose("opencode", 9600))
    agent = ResponsesAgent(
        [system], [function(name, 1600) for name in names], max_output_tokens=8192, prompt_cache_key="ses_1"
    )
    agent.headers = {"User-Agent": "opencode/1.18.33", "x-session-affinity": "ses_1", "x-session-id": "ses_1"}
    return agent


def pi_responses() -> ResponsesAgent:
    reasoning = {"effort": "medium", "summary": "auto"}
    tools = [function(name, 200) for name in ("read", "bash", "edit", "write")]
    agent = ResponsesAgent([message("developer", prose("pi", 2700))], tools, prompt_cache_key="s1", reasoning=reasoning)
    agent.headers = {"User-Agent": "OpenAI/JS 6.1.0", "session_id": "s1", "x-client-request-id": "s1"}
    return agent


def codex_tools() -> list[Body]:
    return [
        *(function(name, size) for name, size in _CODEX_TOOLS.items()),
        namespace("multi_agent_v1", *(function(name, size) for name, size in _CODEX_AGENTS.items())),
        *(function(name, size) for name, size in _CODEX_GOALS.items()),
        {"type": "web_search", "external_web_access": False},
    ]


def apply_patch() -> Body:
    form = {"type": "grammar", "syntax": "lark", "definition": LARK}
    return {"type": "custom", "name": "apply_patch", "description": prose("apply_patch", 300), "format": form}


def tool_search() -> Body:
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "number"}},
        "required": ["query"],
    }
    described = {"description": prose("tool_search", 900), "parameters": parameters}
    return {"type": "tool_search", "execution": "client", **described}


def additional_tools() -> Body:
    """What some model names get instead of ``tools``."""
    code = {"type": "custom", "name": "exec", "description": prose("code mode", 2000), "format": {"type": "text"}}
    groups = [
        namespace("functions", code, function("wait")),
        namespace("clock", function("now")),
        namespace("collaboration", function("ask")),
    ]
    return {"type": "additional_tools", "role": "developer", "tools": groups}


def codex_title() -> Request:
    """Sent beside the first request, in a session of its own."""
    agent = Codex(session=99, tools=[])
    title = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    agent.ask("Give this task a title: run echo hello")
    sent = agent.request()
    form = {"type": "json_schema", "name": "title", "schema": title, "strict": True}
    return Request(sent.path, sent.headers, {**sent.body, "text": {"format": form}})


def warm_up() -> Request:
    """Codex sends this to a server that it takes for LM Studio."""
    return Request("/v1/responses", {}, {"model": "local-model", "input": "", "max_output_tokens": 1})


def responses_answer(*calls: Body, thought: str = "The user wants a command to be run.") -> Body:
    """As a server gives it."""
    summary = [{"type": "summary_text", "text": thought}]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": summary, "content": None, "encrypted_content": "foreign"}
    said = {**message("assistant", "I run it."), "id": "msg_1", "status": "completed"}
    return {"output": [reasoning, said, *calls]}


def call(name: str, arguments: str = '{"command": "echo hello"}', number: int = 0, **fields: Any) -> Body:
    made = {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"call_{number:02x}ab",
        "name": name,
        "arguments": arguments,
    }
    return {**made, "status": "completed", **fields}


def responses_requests() -> dict[str, Request]:
    """One of each kind, with a history where the client would have one."""
    agents: Mapping[str, tuple[ResponsesAgent, str]] = {
        "codex": (Codex(), "exec_command"),
        "openclaw responses": (OpenClawResponses(), "exec"),
        "opencode responses": (opencode_responses(), "bash"),
        "pi responses": (pi_responses(), "bash"),
    }
    made = {
        "codex title": codex_title(),
        "codex warm-up": warm_up(),
        "codex, all kinds": _all_kinds(),
        "codex, late tools": _late_tools(),
    }
    for name, (agent, tool) in agents.items():
        agent.ask("run echo hello")
        agent.take(responses_answer(call(tool), call(tool, '{"command": "ls"}', 1)))
        agent.give("hello", [{"type": "input_text", "text": "a.png"}, IMAGE])
        agent.ask("and now?")
        made[name] = agent.request()
        if isinstance(agent, Codex):
            made["codex compaction"] = agent.compaction()
            agent.compacted("All is done.")
            made["codex, compacted"] = agent.request()
    return made


def _all_kinds() -> Request:
    """Calls of every kind that Codex knows, with their results."""
    agent = Codex(tools=[*codex_tools(), apply_patch(), tool_search()])
    patch = {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "call_c1",
        "name": "apply_patch",
        "input": "*** Begin Patch\n",
    }
    shell = {
        "type": "local_shell_call", "id": "lsh_1", "call_id": "call_l1", "status": "completed",
        "action": {"type": "exec", "command": ["echo", "hello"], "timeout_ms": 1000, "env": {}, "working_directory": None},
    }  # fmt: skip
    search = {
        "type": "tool_search_call",
        "id": "tsc_1",
        "call_id": "call_s1",
        "execution": "client",
        "arguments": {"query": "mail"},
    }
    web = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
    found = [namespace("mcp__mail", function("send", defer_loading=True), function("list", defer_loading=True))]
    agent.ask("do everything")
    agent.take({"output": [web]})
    agent.take(
        responses_answer(call("spawn_agent", namespace="multi_agent_v1"), patch, patch | {"call_id": "call_c2"}, search)
    )
    agent.give("started", "Done.", [{"type": "input_text", "text": "Done."}, IMAGE], found)
    agent.take({"output": [call("send", '{"command": "x"}', 7, namespace="mcp__mail")]})
    agent.give("sent")
    agent.items += [shell, {"type": "function_call_output", "call_id": "call_l1", "output": '{"output":"hello"}'}]
    agent.items.append({**message("assistant", "So."), "phase": "commentary"})
    return agent.request()


def _late_tools() -> Request:
    agent = Codex(tools=[], first=(additional_tools(),))
    agent.ask("go")
    agent.items.append({"type": "additional_tools", "role": "developer", "tools": [function("later")]})
    agent.take({"output": [call("later"), call("now", namespace="clock", number=1)]})
    agent.give("a", "b")
    return agent.request()


def all_requests() -> dict[str, Request]:
    """Of both APIs."""
    return {**chat_requests(), **responses_requests()}
