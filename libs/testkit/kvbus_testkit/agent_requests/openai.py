"""Agents that speak Chat Completions: OpenClaw, opencode, Qwen Code, pi, aider. Each keeps its history as that client does.

    agent.ask("run echo hello")
    agent.take(...)  # the answer to agent.request()
    agent.give("hello")  # the results of its calls, and agent.request() again

Those that speak the Responses API stand in ``openai_responses``; `all_requests` has both.
"""

import copy
import json
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbus_testkit.agent_requests.prose import prose, schema

Body = dict[str, Any]

INTERNAL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"


class Request(msgspec.Struct, frozen=True):
    path: str
    headers: Mapping[str, str]
    body: Body


def session_id(session: int) -> str:
    return str(uuid.UUID(int=random.Random(session).getrandbits(128), version=4))


def rewritten(arguments: str) -> str:
    """As clients that parse the arguments of a call write them."""
    return json.dumps(json.loads(arguments), separators=(",", ":"))


class ChatAgent:
    """``fields``: of the body beside model, messages and tools; ``sizes``: names of tools and the length of their descriptions."""

    def __init__(self, system: str, sizes: Mapping[str, int], *, role: str = "system", **fields: Any) -> None:
        self.headers: dict[str, str] = {"User-Agent": "made-up"}
        self.messages: list[Body] = [{"role": role, "content": system}]
        self._tools = [_function(name, size) for name, size in sizes.items()]
        self._fields = fields
        self._open: list[str] = []

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})

    def take(self, answer: Body) -> None:
        """An answer in one piece."""
        said = answer["choices"][0]["message"]
        calls = [self._call(call) for call in said.get("tool_calls") or ()]
        self._open = [call["id"] for call in calls]
        thought = {"reasoning_content": said["reasoning_content"]} if said.get("reasoning_content") else {}
        self.messages.append(
            {"role": "assistant", "content": said["content"], **thought, **({"tool_calls": calls} if calls else {})}
        )

    def give(self, *outputs: Any) -> None:
        """The results of the calls of the last answer."""
        for call_id, output in zip(self._open, outputs, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def request(self) -> Request:
        body = {"model": "local-model", "messages": copy.deepcopy(self.shown()), "stream": True, **self._fields}
        body["stream_options"] = {"include_usage": True}
        return Request("/v1/chat/completions", self.headers, {**body, "tools": self._tools} if self._tools else body)

    def shown(self) -> list[Body]:
        return self.messages

    def _call(self, call: Body) -> Body:
        function = {"name": call["function"]["name"], "arguments": rewritten(call["function"]["arguments"])}
        return {"id": call["id"], "type": "function", "function": function}


class OpenClaw(ChatAgent):
    """Ids lose all but letters and digits. A message of internal context ends each request, and is gone from there in the next."""

    def __init__(self, session: int = 1) -> None:
        names = ("exec", "process", "read", "write", "edit", "tool_search", "tool_describe", "tool_call")
        stable = "<!-- openclaw:attempt:STABLE -->\n" + prose("openclaw stable", 44_000)
        dynamic = "<!-- openclaw:attempt:DYNAMIC -->\n" + prose("openclaw dynamic", 3800)
        super().__init__(
            f"{stable}\n{dynamic}",
            dict.fromkeys(names, 900),
            tool_choice="auto",
            max_completion_tokens=8192,
            store=False,
        )
        self._session = session

    def ask(self, question: str) -> None:
        stamped = f"[Sun 2026-11-29 22:02 UTC] {question}"
        if len(self.messages) == 1:
            names = f"session=agent:main:s{self._session} | sessionId=s{self._session}"
            stamped += f"\n\nRuntime: agent=main | {names} | host=box | model=local-model"
        self.messages.append({"role": "user", "content": [{"type": "text", "text": stamped}]})

    def shown(self) -> list[Body]:
        """Content is a list in the newest question, and a string in older ones."""
        newest = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
        shown = [
            {**message, "content": message["content"][0]["text"]}
            if message["role"] == "user" and i < newest
            else message
            for i, message in enumerate(self.messages)
        ]
        return [*shown, {"role": "user", "content": internal_context(len(self.messages))}]

    def _call(self, call: Body) -> Body:
        made = super()._call(call)
        return {**made, "id": plain(made["id"])}


class OpenCode(ChatAgent):
    def __init__(self, session: int = 1) -> None:
        system = prose("opencode", 8200) + "\nToday's date: Sun Nov 29 2026\n" + prose("opencode skills", 1300)
        names = ("bash", "edit", "glob", "grep", "list", "read", "skill", "task", "todowrite", "write")
        super().__init__(system, dict.fromkeys(names, 1600), tool_choice="auto", max_tokens=8192)
        affinity = {"x-session-affinity": f"ses_{session}", "x-session-id": f"ses_{session}"}
        self.headers = {"User-Agent": "opencode/1.18.33 ai-sdk/provider-utils/3", **affinity}

    def ask(self, question: str) -> None:
        super().ask(f'"{question}"\n')


class QwenCode(ChatAgent):
    """``continued``: by a new process, which puts the reminder of the date into its newest question instead of the first one."""

    def __init__(self) -> None:
        names = (
            "agent",
            "skill",
            "list_directory",
            "read_file",
            "grep_search",
            "glob",
            "edit",
            "write_file",
            "run_shell_command",
        )
        system = (
            prose("qwen", 23_000) + "\n# Project\n" + prose("qwen project", 4000) + "\n" + prose("qwen skills", 2000)
        )
        super().__init__(system, dict.fromkeys(names, 3900), max_tokens=32_000)
        self.headers = {"User-Agent": "QwenCode/0.24.4 (linux; x64)", "X-Stainless-Lang": "js"}

    def ask(self, question: str) -> None:
        for message in self.messages:
            if message["role"] == "user":
                message["content"] = [part for part in message["content"] if not part["text"].startswith("<date>")]
        first = [] if len(self.messages) > 1 else [{"type": "text", "text": reminder(prose("qwen context", 9300))}]
        date = {"type": "text", "text": "<date>Sunday, November 29, 2026</date>"}
        self.messages.append({"role": "user", "content": [*first, date, {"type": "text", "text": question}]})


class Pi(ChatAgent):
    def __init__(self) -> None:
        sizes = dict.fromkeys(("read", "bash", "edit", "write"), 200)
        fields: Body = {"store": False, "reasoning_effort": "medium", "max_completion_tokens": 32_000}
        super().__init__(_pi_system(), sizes, role="developer", **fields)
        self.headers = {"User-Agent": "OpenAI/JS 6.1.0", "X-Stainless-Lang": "js"}


class Aider(ChatAgent):
    """No tools: two examples stand before the question."""

    def __init__(self) -> None:
        super().__init__(prose("aider", 5000), {}, temperature=0)
        self.headers = {"User-Agent": "litellm/1.80"}
        for words in ("Change the greeting.", "Move the function."):
            self.messages.append({"role": "user", "content": words})
            self.messages.append({"role": "assistant", "content": prose(words, 600)})


def opencode_title() -> Request:
    """Sent beside the first request of a session."""
    agent = OpenCode()
    agent.messages[0]["content"] = prose("opencode title", 1900)
    agent.ask("Generate a title for this conversation:\nrun echo hello")
    sent = agent.request()
    sent.body.pop("tools")
    sent.body.pop("tool_choice")
    return sent


def internal_context(number: int) -> str:
    return INTERNAL.format(f"Request {number}. " + prose("openclaw internal", 400))


def plain(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))


def reminder(words: str) -> str:
    return f"<system-reminder>\n{words}\n</system-reminder>"


def _pi_system() -> str:
    return prose("pi", 2600) + "\nCurrent date: 2026-11-29\nCurrent working directory: /srv/dev/project"


def _function(name: str, description_chars: int) -> Body:
    parameters = schema(name, 3)
    parameters["properties"] |= {"command": {"type": "string", "description": prose(name, 40)}}
    function = {"name": name, "description": prose(f"{name} tool", description_chars), "parameters": parameters}
    return {"type": "function", "function": {**function, "strict": False}}


def chat_answer(*calls: tuple[str, str], thought: str = "The user wants a command to be run.") -> Body:
    """As a server gives it. ``calls``: names and arguments."""
    made = [
        {"id": f"call_{i:02x}ab", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "I run it.", "reasoning_content": thought, "tool_calls": made}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if made else "stop"}]}


def chat_requests() -> dict[str, Request]:
    """One of each kind, with a tool loop behind it and a second question."""
    agents: Mapping[str, tuple[ChatAgent, str]] = {
        "openclaw chat": (OpenClaw(), "exec"),
        "opencode chat": (OpenCode(), "bash"),
        "qwen chat": (QwenCode(), "run_shell_command"),
        "pi chat": (Pi(), "bash"),
        "aider": (Aider(), ""),
    }
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}}
    made: dict[str, Request] = {"opencode title": opencode_title()}
    for name, (agent, tool) in agents.items():
        agent.ask("run echo hello")
        calls: Sequence[tuple[str, str]] = (
            [(tool, '{"command": "echo hello"}'), (tool, '{"command": "ls"}')] if tool else []
        )
        agent.take(chat_answer(*calls))
        if calls:
            agent.give("hello", [{"type": "text", "text": "a.png"}, image] if name == "pi chat" else "a.png")
            agent.take(chat_answer(thought=""))
        agent.ask("and now?")
        made[name] = agent.request()
    return made
