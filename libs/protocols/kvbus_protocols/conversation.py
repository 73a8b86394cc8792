"""One ordered model of a conversation, which every API's requests convert to.

A conversation is a list of turns, a turn an ordered list of parts. The order is the one in which things were said:
``<think>a</think> call 0 <think>b</think> call 1`` is one turn of four parts, whichever API brought it. Nothing here is
specific to an API or to a model.
"""

from typing import Any, Literal

import msgspec

from kvbus_protocols.generation import GenerationRequest


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ReasoningPart(msgspec.Struct, frozen=True, tag="reasoning"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """``url``: a data URL or a web address; ``what``: image, or the media type of another file."""

    url: str
    what: str = "image"


class ToolCallPart(msgspec.Struct, frozen=True, tag="tool_call"):
    """``arguments``: JSON text as the client sent it; "" counts as no arguments. ``custom``: free text instead of JSON."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False


class ToolResultPart(msgspec.Struct, frozen=True, tag="tool_result"):
    call_id: str
    parts: "tuple[TextPart | ImagePart, ...]" = ()
    is_error: bool = False


Part = TextPart | ReasoningPart | ImagePart | ToolCallPart | ToolResultPart


class Turn(msgspec.Struct, frozen=True):
    """What one side said. Role ``tool`` holds tool results only, and only it does."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[Part, ...]
    name: str | None = None


CUSTOM_INPUT = "input"
CUSTOM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""Models call functions with JSON arguments; a custom tool's free text travels in this one."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool the model may call. ``custom``: its input is free text; ``grammar``: what that text must match (lark or regex).

    ``namespace``: given back with each call (Codex groups tools so); the model sees the bare name. ``deferred``: callable, but not
    shown at the top of the prompt: the conversation itself shows it, so that loading it changes nothing that came before.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    custom: bool = False
    grammar: "Grammar | None" = None
    namespace: str | None = None
    deferred: bool = False

    @property
    def argument_schema(self) -> dict[str, Any] | None:
        """Of the arguments as the model writes them: those of a custom tool are an object with its text as the one string."""
        return CUSTOM_SCHEMA if self.custom else self.parameters


class Grammar(msgspec.Struct, frozen=True):
    syntax: Literal["lark", "regex"]
    definition: str


class ToolChoice(msgspec.Struct, frozen=True):
    """``names``: only these tools may be called (empty: all of them); ``named``: the client asked for one tool by its name."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    named: bool = False


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer's text must be: any JSON object, or JSON by a schema."""

    kind: Literal["json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool = False


class CacheBreakpoint(msgspec.Struct, frozen=True):
    """The prompt is worth keeping up to and including turn ``turn`` (-1: the tools). ``ttl_s``: how long, None: the default.
    ``after``: so many of the turn's last parts come behind it."""

    turn: int
    ttl_s: float | None = None
    after: int = 0


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A request of any chat-like API. ``generation`` holds model, sampling, stopping and the request extensions.

    ``continue_final``: the last turn is the assistant's, and its text is to be continued.
    ``template_variables``: more names for the chat template. ``reasoning``: whether the client wants the model to think
    (None: the model's default). ``harness``: the client program, as far as headers or the body tell (claude-code, codex, ...).
    ``condensing``: the answer is to take the place of what was said.
    """

    generation: GenerationRequest
    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output_format: OutputFormat | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    template_variables: dict[str, Any] = {}
    reasoning: bool | None = None
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    harness: str = ""
    condensing: bool = False
