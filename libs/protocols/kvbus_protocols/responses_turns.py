"""Responses requests as conversations: items, those of earlier responses first, become turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvbus_protocols.conversation import (
    Conversation,
    ImagePart,
    OutputFormat,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from kvbus_protocols.decoding import converted
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.responses.items import HOSTED, ROLES, Item, content_parts, joined_text, missing
from kvbus_protocols.responses.request import ConversationRequest, ResponsesRequest
from kvbus_protocols.responses.tools import SEARCH, Callee, Tool, Toolbox
from kvbus_protocols.tool_listing import ToolListing

SUMMARY_INTRODUCTION = (
    "This is a summary of the conversation so far; the conversation itself is no longer available.\n\n"
)
TOOLS_INTRODUCTION = "More tools are available from here on:\n"
NAMES: Mapping[str, str] = {"tool_search_call": SEARCH, "local_shell_call": "local_shell"}
"""What the model calls the tools whose calls have no name."""

NO_TOOLS_FOUND = "No tools found."

Role = Literal["system", "user", "assistant", "tool"]


class Unseal(msgspec.Struct, frozen=True):
    """Readers of what this server has sealed; each returns None for what it has not. ``reasoning``: of a thought's text;
    ``compaction``: of a conversation's summary."""

    reasoning: Callable[[str], str | None] = lambda _sealed: None
    compaction: Callable[[str], str | None] = lambda _sealed: None


class ResponsesConversation(msgspec.Struct, frozen=True):
    """``callees``: what the names that the model may call stand for."""

    conversation: Conversation
    callees: Mapping[str, Callee]


def responses_conversation(
    request: ConversationRequest, earlier: Sequence[Mapping[str, Any]] = (), unseal: Unseal | None = None
) -> ResponsesConversation:
    """``earlier``: the items before the request's own, item references in both resolved. Raise InvalidRequest.

    Instructions count for this request only: those of earlier responses are not among ``earlier``.
    """
    creating = request if isinstance(request, ResponsesRequest) else ResponsesRequest(model=request.model)
    toolbox = Toolbox()
    toolbox.add(request.typed_tools(), "tools")
    turns = _Turns(toolbox, unseal or Unseal())
    if request.instructions:
        turns.add("system", [TextPart(request.instructions)])
    for item in earlier:
        turns.item(item, "previous_response_id")
    for i, item in enumerate(request.items):
        turns.item(item, f"input[{i}]")
    variables = dict(request.chat_template_kwargs or {})
    effort = creating.reasoning.effort if creating.reasoning is not None else None
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    conversation = Conversation(
        generation=request,
        turns=turns.all(),
        tools=toolbox.specs,
        tool_choice=toolbox.choice(creating.selection()),
        parallel_tool_calls=creating.parallel_tool_calls is not False,
        output_format=_output_format(creating),
        template_variables=variables,
        reasoning=None if effort is None else effort != "none",
    )
    return ResponsesConversation(conversation, toolbox.callees)


def _output_format(request: ResponsesRequest) -> OutputFormat | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return OutputFormat(kind="json_object")
    return OutputFormat(kind="json_schema", schema=wanted.schema, name=wanted.name, strict=wanted.strict is True)


class _Turns:
    """Collects turns. What the assistant's side says in a row is one turn, and so are results in a row."""

    def __init__(self, toolbox: Toolbox, unseal: Unseal) -> None:
        self._said: list[tuple[Role, list[Part]]] = []
        self._begun = False
        self._toolbox = toolbox
        self._unseal = unseal
        self._listing = ToolListing()
        self._calls: set[str] = set()

    def add(self, role: Role, parts: Sequence[Part]) -> None:
        if not self._said or self._said[-1][0] != role or role not in ("assistant", "tool"):
            self._said.append((role, []))
        self._said[-1][1].extend(parts)
        self._begun = self._begun or role != "system"

    def all(self) -> tuple[Turn, ...]:
        return tuple(Turn(role, tuple(parts)) for role, parts in self._said)

    def item(self, given: Mapping[str, Any], where: str) -> None:
        """Raise InvalidRequest."""
        item = converted(given, Item, where)
        match item.kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item)
            case "function_call" | "custom_tool_call" | "tool_search_call" | "local_shell_call":
                self.add("assistant", [self._call(item, where)])
            case "function_call_output" | "custom_tool_call_output":
                self.add("tool", [self._result(item, content_parts(item.output, f"{where}.output"), where)])
            case "tool_search_output":
                found = self._listing.of(self._toolbox.add(_tools(item, where), f"{where}.tools", deferred=True))
                self.add("tool", [self._result(item, (TextPart(found or NO_TOOLS_FOUND),), where)])
            case "additional_tools":
                self._additional_tools(item, where)
            case "compaction":
                self._compaction(item, where)
            case kind:
                _refuse(kind, where)

    def _message(self, item: Item, where: str) -> None:
        parts = content_parts(item.content, f"{where}.content")
        match item.role:
            case "assistant" | "user" as role:
                self.add(role, parts)
            case "system" | "developer":
                self.add("system", parts)
            case None:
                raise missing(f"{where}.role")
            case _:
                known = ", ".join(f"'{role}'" for role in ROLES[:-1])
                raise InvalidRequest(
                    f"Invalid value: '{item.role}'. Supported values are: {known}, and '{ROLES[-1]}'.",
                    param=f"{where}.role",
                    code="invalid_value",
                )

    def _reasoning(self, item: Item) -> None:
        """The sealed text is what the model wrote; where another server sealed it, or nobody, what is readable counts."""
        text = self._unseal.reasoning(item.encrypted_content) if item.encrypted_content else None
        if text is None:
            content = item.content if isinstance(item.content, list) else []
            text = joined_text(content) or joined_text(item.summary, "\n\n")
        if text:
            self.add("assistant", [ReasoningPart(text)])

    def _call(self, item: Item, where: str) -> ToolCallPart:
        name = NAMES.get(item.kind) or item.name
        if not name:
            raise missing(f"{where}.name")
        if not item.call_id and item.kind != "tool_search_call":
            raise missing(f"{where}.call_id")
        call_id = item.call_id or ""
        self._calls.add(call_id)
        name = self._toolbox.name_of(item.namespace, name)
        if item.kind == "custom_tool_call":
            return ToolCallPart(call_id, name, item.input or "", custom=True)
        arguments = (item.action if item.kind == "local_shell_call" else item.arguments) or ""
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        return ToolCallPart(call_id, name, arguments)

    def _result(self, item: Item, parts: tuple[TextPart | ImagePart, ...], where: str) -> ToolResultPart:
        call_id = item.call_id or ""
        if not call_id and item.kind != "tool_search_output":
            raise missing(f"{where}.call_id")
        if call_id not in self._calls:
            what = item.kind.removesuffix("_output").replace("_", " ")
            raise InvalidRequest(
                f"No tool call found for {what} output with call_id {call_id}.", param="input", code="unknown_call_id"
            )
        return ToolResultPart(call_id, parts)

    def _additional_tools(self, item: Item, where: str) -> None:
        """Before anything is said they stand with the others; later ones are shown where they come up."""
        late = self._begun
        added = self._toolbox.add(_tools(item, where), f"{where}.tools", deferred=late)
        if late and added:
            self.add("system", [TextPart(TOOLS_INTRODUCTION + self._listing.of(added))])

    def _compaction(self, item: Item, where: str) -> None:
        if item.encrypted_content is None:
            raise missing(f"{where}.encrypted_content")
        summary = self._unseal.compaction(item.encrypted_content)
        if summary is None:
            raise InvalidRequest(
                "The encrypted content of this compaction item could not be verified.",
                param=f"{where}.encrypted_content",
                code="invalid_encrypted_content",
            )
        self.add("user", [TextPart(SUMMARY_INTRODUCTION + summary)])


def _tools(item: Item, where: str) -> list[Tool]:
    return [converted(tool, Tool, f"{where}.tools[{i}]") for i, tool in enumerate(item.tools or ())]


def _refuse(kind: str, where: str) -> None:
    """Items of hosted tools pass; raise InvalidRequest for all others."""
    if kind in HOSTED:
        return
    if kind == "item_reference":
        raise InvalidRequest("An item reference needs an 'id'.", param=f"{where}.id", code="missing_required_parameter")
    raise InvalidRequest(
        f"Items of the type '{kind}' are not supported.", param=f"{where}.type", code="unsupported_item"
    )
