"""What a conversation demands of the answer's form, as guidance for the engine and as a mode for the parser.

    output_format                  the text is JSON; where tools may be called as well, a call or JSON
    tool_choice required, named    one call or more of the tools allowed, in the model's own form where it is known; a custom
                                   tool by itself may be its bare text
    strict tools, grammars         with tool_choice auto: text is free, calls are not

Thoughts come first where the model writes any, and are free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbus_frontend.core.call_forms import BARE_ARRAY, CallForm, call_form, element_arguments
from kvbus_frontend.core.schemas import DEFAULT_LIMITS, SchemaLimits, check_schema, types_of
from kvbus_parsers.names import reasoning_format, tool_format
from kvbus_protocols.conversation import CUSTOM_INPUT, CUSTOM_SCHEMA, Conversation, Grammar, ToolSpec
from kvbus_protocols.errors import InvalidRequest
from kvbus_wire.guidance import CallSection, FreeBlock, Guidance, GuidedArgument, GuidedCall

MAX_GRAMMAR_CHARS = 64 << 10
BARE_CALLS = "guided_array"
ANY_OBJECT = '{"type":"object"}'


class FieldNames(msgspec.Struct, frozen=True):
    """What an API calls the fields that errors name; ``{i}`` is the number of the tool."""

    output: str = "response_format"
    parameters: str = "tools[{i}].function.parameters"
    grammar: str = "tools[{i}].custom.format.grammar"


CHAT_FIELDS = FieldNames()
FIELDS: Mapping[str, FieldNames] = {
    "chat": CHAT_FIELDS,
    "responses": FieldNames("text.format", "tools[{i}].parameters", "tools[{i}].format"),
    "messages": FieldNames("output_config.format", "tools[{i}].input_schema", "tools[{i}]"),
}


class _Channels(msgspec.Struct, frozen=True):
    """A format that has a place of its own for the answer. ``lead``, ``tail``: around the answer's text."""

    thoughts: FreeBlock
    lead: str
    tail: str = ""


_HARMONY = _Channels(
    FreeBlock(begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant"), "<|channel|>final<|message|>"
)
_COHERE = _Channels(
    FreeBlock(begin="<|START_THINKING|>", end="<|END_THINKING|>"), "<|START_RESPONSE|>", "<|END_RESPONSE|>"
)
_CHANNELS: Mapping[str, _Channels] = {"harmony": _HARMONY, "gpt_oss": _HARMONY, "cohere_command": _COHERE}
"""By the names of tool-call and reasoning formats."""


class Guided(msgspec.Struct, frozen=True):
    """``calls``: the mode in which the parser reads tool calls."""

    guidance: Guidance | None
    calls: str = "auto"


def guidance_of(
    conversation: Conversation,
    *,
    tool: str | None,
    reasoning: str | None,
    reasoning_open: bool | None,
    fields: FieldNames = CHAT_FIELDS,
    limits: SchemaLimits = DEFAULT_LIMITS,
) -> Guided:
    """``tool``, ``reasoning``: names of the parsers; ``reasoning_open``: the state of the prompt's end (None: it says nothing).

    Raise InvalidRequest for schemas and grammars that cannot be followed, as far as that can be told here, UnknownFormatError for
    names that no parser has.
    """
    choice = conversation.tool_choice
    tools = [] if choice.mode == "none" else _callable_tools(conversation, fields)
    form, thoughts = call_form(tool), _thoughts(tool, reasoning)
    framed = thoughts is not None and bool(thoughts.tail)  # which bare text could not be told from
    guided = None if framed else _free_text(conversation, tools, form)
    guided = guided or _answer(conversation, tools, form, fields, limits)
    if choice.mode == "none" and guided.calls == "auto":
        guided = msgspec.structs.replace(guided, calls="drop")
    if guided.guidance is None or guided.guidance.form == "free":  # free text holds thoughts as it is
        return guided
    return guided if thoughts is None else _with_thoughts(guided, thoughts, reasoning_open)


class _Tool(msgspec.Struct, frozen=True):
    """``param``, ``grammar_param``: what the request calls its schema and its grammar."""

    spec: ToolSpec
    param: str
    grammar_param: str


def _callable_tools(conversation: Conversation, fields: FieldNames) -> list[_Tool]:
    names = conversation.tool_choice.names
    return [
        _Tool(spec, fields.parameters.format(i=i), fields.grammar.format(i=i))
        for i, spec in enumerate(conversation.tools)
        if not names or spec.name in names
    ]


def _answer(
    conversation: Conversation, tools: Sequence[_Tool], form: CallForm | None, fields: FieldNames, limits: SchemaLimits
) -> Guided:
    parallel = conversation.parallel_tool_calls
    if tools and conversation.tool_choice.mode == "required":
        section = _section(tools, form, limits, parallel=parallel)
        if section is not None:
            # An engine that cannot follow the model's own form may write bare JSON; where that form is JSON, it is the model's.
            is_json = (section.begin + section.calls[0].begin).startswith("{")
            return Guided(
                Guidance(form="none", section=section), "auto" if is_json else _bare_mode(conversation, tools)
            )
        return _bare_calls(conversation, tools, limits)
    text = _text_form(conversation, fields, limits)
    if text is not None:
        return _text_or_calls(conversation, text, tools, form, limits)
    narrowed = bool(conversation.tool_choice.names)
    if form is not None and form.trigger and any(narrowed or t.spec.strict or t.spec.grammar for t in tools):
        section = _section(tools, form, limits, parallel=parallel, enforce_all=False)
        if section is not None:
            return Guided(Guidance(form="free", section=section))
    return Guided(None)


def _free_text(conversation: Conversation, tools: Sequence[_Tool], form: CallForm | None) -> Guided | None:
    """The text of a custom tool that is the only choice, and whose grammar has no place in the model's form of calls."""
    grammar = tools[0].spec.grammar if len(tools) == 1 and conversation.tool_choice.mode == "required" else None
    if grammar is None or (form is not None and (form.elements is not None or grammar.syntax == "regex")):
        return None
    tool = tools[0]
    _check_grammar(grammar, tool.grammar_param)
    guidance = Guidance(form=grammar.syntax, text=grammar.definition, param=tool.grammar_param)
    return Guided(guidance, f"guided_text:{CUSTOM_INPUT}:{tool.spec.name}")


def _text_form(conversation: Conversation, fields: FieldNames, limits: SchemaLimits) -> Guidance | None:
    wanted = conversation.output_format
    if wanted is None:
        return None
    if conversation.continue_final:
        raise InvalidRequest(
            f"'{fields.output}' cannot constrain an answer that the request itself has begun.", param=fields.output
        )
    if wanted.kind == "json_object":
        return Guidance(form="json_object", param=fields.output)
    text = check_schema(wanted.schema, limits, param=fields.output)
    return Guidance(form="json_schema", text=text, strict=wanted.strict, param=fields.output)


def _text_or_calls(
    conversation: Conversation, text: Guidance, tools: Sequence[_Tool], form: CallForm | None, limits: SchemaLimits
) -> Guided:
    """Without a form of calls that is known, there is still the bare array, if JSON text cannot be taken for it."""
    if not tools:
        return Guided(text)
    parallel = conversation.parallel_tool_calls
    section = _section(tools, form, limits, parallel=parallel, enforce_all=False)
    if section is not None:
        return Guided(msgspec.structs.replace(text, section=section))
    schema = conversation.output_format.schema if conversation.output_format is not None else None
    if schema is not None and "array" in types_of(schema, schema):
        return Guided(text)
    section = _section(tools, BARE_ARRAY, limits, parallel=parallel, enforce_all=False)
    return Guided(msgspec.structs.replace(text, section=section), BARE_CALLS)


def _bare_calls(conversation: Conversation, tools: Sequence[_Tool], limits: SchemaLimits) -> Guided:
    """Calls without the model's own markup."""
    mode = _bare_mode(conversation, tools)
    if mode != BARE_CALLS:
        tool = tools[0]
        schema = check_schema(_argument_schema(tool), limits, param=tool.param)
        guidance = Guidance(form="json_schema", text=schema, strict=tool.spec.strict, param=tool.param)
        return Guided(guidance, mode)
    section = _section(tools, BARE_ARRAY, limits, parallel=conversation.parallel_tool_calls)
    return Guided(Guidance(form="none", section=section), mode)


def _bare_mode(conversation: Conversation, tools: Sequence[_Tool]) -> str:
    """How bare JSON is read: as the arguments of the one tool that was named, or as an array of calls."""
    if conversation.tool_choice.named and len(tools) == 1:
        return f"guided_arguments:{tools[0].spec.name}"
    return BARE_CALLS


def _section(
    tools: Sequence[_Tool], form: CallForm | None, limits: SchemaLimits, *, parallel: bool, enforce_all: bool = True
) -> CallSection | None:
    """``enforce_all``: the arguments of tools that are not strict as well. None: a tool cannot be written in this form."""
    if form is None:
        return None
    calls = [_call(tool, form, limits, enforce=enforce_all or tool.spec.strict) for tool in tools]
    if any(call is None for call in calls):
        return None
    return CallSection(
        calls=tuple(call for call in calls if call is not None),
        begin=form.opening,
        end=form.closing,
        separator=form.separator,
        trigger=form.trigger,
        parallel=parallel and not form.single,
    )


def _call(tool: _Tool, form: CallForm, limits: SchemaLimits, *, enforce: bool) -> GuidedCall | None:
    begin = form.begin_of(tool.spec.name)
    if begin is None:
        return None
    grammar = tool.spec.grammar
    call = GuidedCall(
        begin=begin,
        end=form.end,
        strict=tool.spec.strict,
        param=tool.param if grammar is None else tool.grammar_param,
    )
    if not enforce and grammar is None:
        return _any_call(call, form)
    schema = _argument_schema(tool)
    text = check_schema(schema, limits, param=tool.param)
    if form.elements is None:
        return msgspec.structs.replace(call, schema=text)
    arguments = element_arguments(schema, form.elements)
    if arguments is None:
        return None if enforce else _any_call(call, form)
    return msgspec.structs.replace(call, arguments=tuple(_bound(argument, grammar) for argument in arguments))


def _any_call(call: GuidedCall, form: CallForm) -> GuidedCall:
    if form.elements is None:
        return msgspec.structs.replace(call, schema=ANY_OBJECT)
    return msgspec.structs.replace(call, any_content=True)


def _bound(argument: GuidedArgument, grammar: Grammar | None) -> GuidedArgument:
    """A custom tool has one argument, its text, which follows the tool's grammar."""
    if grammar is None:
        return argument
    return msgspec.structs.replace(argument, kind=grammar.syntax, text=grammar.definition)


def _argument_schema(tool: _Tool) -> dict[str, Any]:
    """Arguments are always an object. Raise InvalidRequest where the schema says otherwise."""
    grammar = tool.spec.grammar
    if grammar is not None:
        _check_grammar(grammar, tool.grammar_param)
        if grammar.syntax == "regex":  # within JSON a pattern can be followed; other grammars cannot
            text = {"type": "string", "pattern": f"^(?:{grammar.definition})$"}
            return {**CUSTOM_SCHEMA, "properties": {CUSTOM_INPUT: text}}
    schema = tool.spec.argument_schema or {}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"Invalid schema for '{tool.param}': the type of a tool's parameters must be object.",
            param=tool.param,
            code="invalid_json_schema",
        )
    return {**schema, "type": "object"}


def _check_grammar(grammar: Grammar, param: str) -> None:
    if len(grammar.definition) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"The grammar of '{param}' has more than {MAX_GRAMMAR_CHARS} characters.",
            param=param,
            code="grammar_too_large",
        )


class _Thoughts(msgspec.Struct, frozen=True):
    block: FreeBlock
    starts_open: bool = False
    lead: str = ""
    tail: str = ""


def _thoughts(tool: str | None, reasoning: str | None) -> _Thoughts | None:
    """How the model thinks before it answers, if it does."""
    calls = tool_format(tool) if tool is not None else None
    own = calls.reasoning if calls is not None else None
    known = reasoning_format(reasoning) if reasoning is not None else own
    channels = _CHANNELS.get(known.name if known else calls.name if calls else "")
    if channels is not None:
        return _Thoughts(channels.thoughts, lead=channels.lead, tail=channels.tail)
    if known is None or known.whole is not None:
        return None
    if not known.openers:  # thoughts are not split from the text, but the model writes them all the same
        return _Thoughts(FreeBlock(begin="<think>", end="</think>"), known.starts_open)
    label = f"{known.label}\n" if known.label else ""
    return _Thoughts(FreeBlock(begin=known.openers[0] + label, end=known.closers[0]), known.starts_open)


def _with_thoughts(guided: Guided, thoughts: _Thoughts, is_open: bool | None) -> Guided:
    """``is_open`` False: the prompt has closed them, so that none come."""
    guidance = guided.guidance
    if guidance is None:
        return guided
    section = guidance.section
    if section is not None and section.begin == BARE_ARRAY.opening:  # calls of a foreign form stand where text does
        begin, end = thoughts.lead + section.begin, section.end + thoughts.tail
        section = msgspec.structs.replace(section, begin=begin, end=end)
    guidance = msgspec.structs.replace(
        guidance,
        section=section,
        blocks=() if is_open is False else (thoughts.block,),
        open_block=thoughts.starts_open if is_open is None else is_open,
        lead=thoughts.lead,
        tail=thoughts.tail,
    )
    return msgspec.structs.replace(guided, guidance=guidance)
