"""Messages requests as conversations."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvbus_protocols.conversation import (
    CacheBreakpoint,
    Conversation,
    OutputFormat,
    Part,
    ToolChoice,
    ToolSpec,
    Turn,
)
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import KvbusExt, Session
from kvbus_protocols.messages import (
    BlockParam,
    CacheControl,
    ContentSource,
    CountTokensRequest,
    DocumentParam,
    MessageParam,
    MessagesRequest,
    TextParam,
    ToolParam,
    ToolResultParam,
)
from kvbus_protocols.messages_blocks import assistant_parts, result_parts, text_parts, user_parts
from kvbus_protocols.tool_listing import ToolListing

MAX_BREAKPOINTS = 4
MIN_THINKING_BUDGET = 1024
BILLING_MARK = "x-anthropic-billing-header:"
"""A block of Claude Code's system prompt begins so, whichever program carries the request."""

Role = Literal["system", "user", "assistant", "tool"]

_TTL_S = {"5m": 300.0, "1h": 3600.0}
_SERVER_TOOL = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+")
"""As web_search_20250305, tool_search_tool_bm25, mcp_toolset."""
_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,128})\Z")


def messages_conversation(request: MessagesRequest) -> Conversation:
    """Raise InvalidRequest for what the types alone cannot say."""
    _check(request)
    tools = _tools(request.tools or ())
    turns = _Turns(ToolListing(tools))
    turns.add_system(request.system)
    for i, message in enumerate(request.messages):
        turns.add(message, f"messages.{i}", last=i == len(request.messages) - 1)
    if not turns.count:
        raise InvalidRequest("messages: at least one message with content is required", param="messages")
    for tool in request.tools or ():
        turns.mark(-1, tool.cache_control)
    turns.mark(turns.count - 1, request.cache_control)
    choice = request.tool_choice
    return Conversation(
        generation=_with_session(request),
        turns=turns.all(),
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        output_format=_output_format(request),
        add_generation_prompt=not turns.continue_final,
        continue_final=turns.continue_final,
        template_variables=_template_variables(request),
        reasoning=_reasoning(request),
        breakpoints=turns.breakpoints(),
        harness="claude-code" if _has_billing_block(request.system) else "",
    )


class _Turns:
    """Turns in the making. What one side says in a row is one turn, as in the API: templates may insist on that.

    ``continue_final``: the last message is the assistant's, and the answer continues it.
    """

    def __init__(self, listing: ToolListing) -> None:
        self._listing = listing
        self._turns: list[tuple[Role, list[Part]]] = []
        self._kept_s: dict[tuple[int, int], float] = {}  # by the turn and how many of its parts are kept
        self.continue_final = False

    @property
    def count(self) -> int:
        return len(self._turns)

    def add_system(self, system: str | list[TextParam] | None) -> None:
        for block in _blocks(system or ""):
            self._say_text(block, "system", "system")

    def add(self, message: MessageParam, where: str, *, last: bool) -> None:
        """Raise InvalidRequest."""
        blocks = _blocks(message.content)
        if all(isinstance(block, TextParam) and not block.text for block in blocks):
            if message.role == "assistant" and last:
                return
            raise InvalidRequest(
                f"{where}: all messages must have non-empty content except for the optional final assistant message",
                param=where,
            )
        if message.role == "assistant":
            self._add_assistant(blocks, where, last=last)
        elif message.role == "system":
            for i, block in enumerate(blocks):
                self._say_text(block, "system", f"{where}.content.{i}")
        else:
            self._add_user(blocks, where)

    def _add_user(self, blocks: Sequence[BlockParam], where: str) -> None:
        """Results come first, wherever they stand: nothing may come between them and their calls."""
        for i, block in enumerate(blocks):
            if isinstance(block, ToolResultParam):
                self._say("tool", result_parts(block, f"{where}.content.{i}", self._listing), block)
        for i, block in enumerate(blocks):
            if not isinstance(block, ToolResultParam):
                self._say("user", user_parts(block, f"{where}.content.{i}"), block)

    def _add_assistant(self, blocks: Sequence[BlockParam], where: str, *, last: bool) -> None:
        for i, block in enumerate(blocks):
            self._say("assistant", assistant_parts(block, f"{where}.content.{i}"), block)
        if last and not isinstance(blocks[-1], TextParam):
            kind = type(blocks[-1]).__struct_config__.tag
            raise InvalidRequest(
                f"{where}: the final block of a final assistant message cannot be `{kind}`", param=where
            )
        self.continue_final = last

    def _say_text(self, block: BlockParam, role: Role, where: str) -> None:
        if not isinstance(block, TextParam):
            raise InvalidRequest(f"{where}: `{role}` messages can only have `text` blocks", param=where)
        self._say(role, text_parts(block.text), block)

    def _say(self, role: Role, parts: Sequence[Part], block: BlockParam) -> None:
        if parts and (not self._turns or self._turns[-1][0] != role):
            self._turns.append((role, []))
        if parts:
            self._turns[-1][1].extend(parts)
        for control in _controls(block):
            self.mark(self.count - 1, control)

    def mark(self, turn: int, control: CacheControl | None) -> None:
        """The prompt up to and including what this turn holds so far (-1: the tools) is worth keeping; the longest time asked for
        counts."""
        if control is not None:
            place = (turn, len(self._turns[turn][1]) if turn >= 0 else 0)
            self._kept_s[place] = max(self._kept_s.get(place, 0.0), _TTL_S[control.ttl or "5m"])

    def all(self) -> tuple[Turn, ...]:
        return tuple(Turn(role, tuple(parts)) for role, parts in self._turns)

    def breakpoints(self) -> tuple[CacheBreakpoint, ...]:
        return tuple(
            CacheBreakpoint(turn, ttl_s, len(self._turns[turn][1]) - parts if turn >= 0 else 0)
            for (turn, parts), ttl_s in sorted(self._kept_s.items())
        )


def _blocks(content: str | Sequence[BlockParam]) -> Sequence[BlockParam]:
    return [TextParam(text=content)] if isinstance(content, str) else content


def _controls(block: BlockParam) -> Iterator[CacheControl]:
    """Of the block and of what is in it."""
    if block.cache_control is not None:
        yield block.cache_control
    content: object = block.content if isinstance(block, ToolResultParam) else None
    if isinstance(block, DocumentParam) and isinstance(block.source, ContentSource):
        content = block.source.content
    for inner in content if isinstance(content, list) else ():
        if inner.cache_control is not None:
            yield inner.cache_control


# Checks


def _check(request: MessagesRequest) -> None:
    request.check_generation()
    if (request.n or 1) > 1:
        raise InvalidRequest("n: this API has one answer per request", param="n")
    _check_thinking(request)
    _check_breakpoints(request)


def _check_thinking(request: MessagesRequest) -> None:
    thinking = request.thinking
    if thinking is None or thinking.type != "enabled":
        return
    where = "thinking.enabled.budget_tokens"
    if thinking.budget_tokens is None:
        raise InvalidRequest(f"{where}: Field required", param=where)
    if thinking.budget_tokens < MIN_THINKING_BUDGET:
        raise InvalidRequest(f"{where}: Input should be greater than or equal to {MIN_THINKING_BUDGET}", param=where)
    # With tools thoughts may come between calls, and the budget is for all of them together.
    bounded = not request.tools and not isinstance(request, CountTokensRequest)
    if bounded and thinking.budget_tokens >= request.max_tokens:
        raise InvalidRequest("`max_tokens` must be greater than `thinking.budget_tokens`", param="max_tokens")


def _check_breakpoints(request: MessagesRequest) -> None:
    system = request.system if isinstance(request.system, list) else []
    said = [block for m in request.messages if isinstance(m.content, list) for block in m.content]
    found = sum(1 for block in (*system, *said) for _ in _controls(block))
    found += sum(1 for tool in request.tools or () if tool.cache_control is not None)
    found += request.cache_control is not None
    if found > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found {found}.",
            param="cache_control",
        )


# Tools


def _tools(tools: Sequence[ToolParam]) -> tuple[ToolSpec, ...]:
    """The client's own. Tools of the server's (web search and the like) are left out: the model answers without them."""
    specs: dict[str, ToolSpec] = {}
    for i, tool in enumerate(tools):
        if not tool.is_custom:
            _check_server_tool(i, tool.type or "")
            continue
        where = f"tools.{i}.custom"
        if not tool.name:
            raise InvalidRequest(f"{where}.name: Field required", param=f"{where}.name")
        if tool.input_schema is None:
            raise InvalidRequest(f"{where}.input_schema: Field required", param=f"{where}.input_schema")
        if tool.name in specs:
            raise InvalidRequest("tools: Tool names must be unique.", param=f"{where}.name")
        specs[tool.name] = ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=bool(tool.strict),
            deferred=bool(tool.defer_loading),
        )
    return tuple(specs.values())


def _check_server_tool(index: int, kind: str) -> None:
    """Raise InvalidRequest for what no tool of the server's is called, as a function of the OpenAI APIs: to leave it out would be
    to lose a tool that the client has."""
    if _SERVER_TOOL.fullmatch(kind) is None:
        message = f"tools.{index}: Input tag '{kind}' found using 'type' does not match any of the expected tags"
        raise InvalidRequest(f"{message}: 'custom', or one as 'web_search_20250305'", param=f"tools.{index}.type")


def _tool_choice(request: MessagesRequest, tools: Sequence[ToolSpec]) -> ToolChoice:
    """Where only the server's tools could be meant, there is nothing to be forced."""
    choice = request.tool_choice
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    if not request.tools:
        raise InvalidRequest("tool_choice may only be specified while providing tools.", param="tool_choice")
    if choice.type == "any":
        return ToolChoice("required") if tools else ToolChoice()
    if not choice.name:
        raise InvalidRequest("tool_choice.tool.name: Field required", param="tool_choice.name")
    if any(tool.name == choice.name for tool in tools):
        return ToolChoice("required", (choice.name,), named=True)
    if any(tool.name == choice.name for tool in request.tools):
        return ToolChoice()
    raise InvalidRequest(f"tool_choice: Tool '{choice.name}' not found in provided tools", param="tool_choice.name")


# The rest


def _output_format(request: MessagesRequest) -> OutputFormat | None:
    config = request.output_config
    wanted = config.format if config is not None and config.format is not None else request.output_format
    return None if wanted is None else OutputFormat(kind="json_schema", schema=wanted.schema, strict=True)


def _reasoning(request: MessagesRequest) -> bool | None:
    kind = request.thinking.type if request.thinking is not None else None
    return {"enabled": True, "adaptive": True, "disabled": False}.get(kind or "")


def _template_variables(request: MessagesRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.output_config is not None and request.output_config.effort is not None:
        variables.setdefault("reasoning_effort", request.output_config.effort)
    return variables


def _has_billing_block(system: str | list[TextParam] | None) -> bool:
    texts = (block.text for block in _blocks(system or "") if isinstance(block, TextParam))
    return any(text.lstrip().startswith(BILLING_MARK) for text in texts)


def _with_session(request: MessagesRequest) -> MessagesRequest:
    """With the session that ``metadata.user_id`` names, where nothing else names one."""
    known = request.kvbus.session if request.kvbus is not None else None
    user_id = request.metadata.user_id if request.metadata is not None else None
    session_id = _session_id(user_id or "") if known is None else None
    if session_id is None:
        return request
    kvbus = msgspec.structs.replace(request.kvbus or KvbusExt(), session=Session(session_id))
    return msgspec.structs.replace(request, kvbus=kvbus)


def _session_id(user_id: str) -> str | None:
    """Claude Code writes JSON with a ``session_id``; older versions end the id with ``_session_UUID``."""
    if (match := _SESSION.search(user_id)) is not None:
        return match[1]
    try:
        fields = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, RecursionError):
        return None
    found = fields.get("session_id") if isinstance(fields, dict) else None
    return found if isinstance(found, str) and 0 < len(found) <= 256 and found.isprintable() else None
