"""Which wire formats a model writes its tool calls and thoughts in, and the parser for one of its outputs."""

from collections.abc import Callable, Sequence

import msgspec

from kvbus_parsers import Parser, open_parser
from kvbus_parsers.choose import choose, reasoning_open
from kvbus_parsers.names import UnknownFormatError, reasoning_format, tool_format
from kvbus_protocols.conversation import Conversation, TextPart, ToolCallPart, ToolSpec
from kvbus_tokenizers import ChatTemplate, ModelBundle
from kvbus_tokenizers.bundle import CONFIG
from kvbus_wire.records import ModelCard

TAIL_CHARS = 512
"""How much of the end of a rendered prompt tells whether a thought is open; more than any generation prompt has."""

_TURN_BEGINS = "<|assistant|>"
"""Looks like the marker of a turn in any template, which tells text that begins a turn from text within one."""


class Formats(msgspec.Struct, frozen=True):
    """Names of parsers; None: the model writes nothing of the kind."""

    tool: str | None = None
    reasoning: str | None = None


def told_formats(template: ChatTemplate | None, bundle: ModelBundle) -> Formats:
    """What a model's files tell."""
    config = msgspec.json.decode(bundle.files[CONFIG]) if CONFIG in bundle.files else {}
    model_type = config.get("model_type", "") if isinstance(config, dict) else ""
    choice = choose(template.source if template is not None else "", model_type if isinstance(model_type, str) else "")
    return Formats(choice.tool, choice.reasoning)


def chosen_formats(card: ModelCard, told: Formats) -> Formats:
    """What the model's workers say, else what its files tell; also where the workers say a name that is known to nobody here."""
    return Formats(
        _chosen(card.tool_call_parser, told.tool, tool_format),
        _chosen(card.reasoning_parser, told.reasoning, reasoning_format),
    )


def unknown_parsers(card: ModelCard) -> tuple[str, ...]:
    """What the workers say and nobody here knows: they may be of a newer release."""
    named = ((card.tool_call_parser, tool_format), (card.reasoning_parser, reasoning_format))
    return tuple(name for name, find in named if name not in ("auto", "none") and not _is_known(name, find))


def _chosen(name: str, told: str | None, find: Callable[[str], object]) -> str | None:
    if name == "none":
        return None
    return name if name != "auto" and _is_known(name, find) else told


def _is_known(name: str, find: Callable[[str], object]) -> bool:
    try:
        find(name)
    except UnknownFormatError:
        return False
    return True


def parser_for(conversation: Conversation, formats: Formats, prompt_tail: str, mode: str) -> Parser | None:
    """None: all output is text. ``prompt_tail``: the end of the rendered prompt, as text. ``mode``: ``calls`` of `open_parser`."""
    if mode == "auto" and conversation.tool_choice.mode == "none":
        mode = "drop"
    reads_calls = bool(conversation.tools) or _has_calls(conversation)
    if reads_calls and not conversation.tools:
        mode = "drop"  # what looks like a call has no tool it could be a call of
    tool = formats.tool if reads_calls else None
    if tool is None and formats.reasoning is None and not mode.startswith("guided"):
        return None
    return open_parser(
        tool=tool,
        reasoning=formats.reasoning,
        tools=schemas(conversation.tools),
        reasoning_open=prompt_reasoning(conversation, formats.reasoning, prompt_tail),
        calls=mode,
    )


def schemas(tools: Sequence[ToolSpec]) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": t.name, "parameters": t.argument_schema or {}}} for t in tools]


def _has_calls(conversation: Conversation) -> bool:
    return any(isinstance(part, ToolCallPart) for turn in conversation.turns for part in turn.parts)


def prompt_reasoning(conversation: Conversation, name: str | None, prompt_tail: str) -> bool | None:
    """Whether the prompt ends inside a thought, behind one, or says nothing (None)."""
    if name is None:
        return None
    if conversation.continue_final:
        # The prompt ends inside the assistant's turn, whose text is the client's: only its own last marker counts.
        parts = conversation.turns[-1].parts if conversation.turns else ()
        begun = "".join(part.text for part in parts if isinstance(part, TextPart))
        return reasoning_open(f"{_TURN_BEGINS}{begun}", name) or False
    return reasoning_open(prompt_tail, name)
