"""How models write tool calls, spelled as their chat templates spell them: what a forced call looks like is what the model has been
trained on, and what the template makes of it in the next turn.

Only formats whose calls can be given as fixed text around JSON or around elements are here; calls of the others are forced in the
one form that every parser understands (`BARE_ARRAY`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbus_frontend.core.schemas import is_plain_name, resolve, types_of
from kvbus_parsers.names import tool_format
from kvbus_wire.guidance import GuidedArgument, ValueKind


class ElementForm(msgspec.Struct, frozen=True):
    """Arguments as elements: ``before`` key ``between`` value ``after``.

    ``between_json``: for what is no string, in formats that say so; otherwise the schema tells the types.
    """

    before: str
    between: str
    after: str
    between_json: str = ""


class CallForm(msgspec.Struct, frozen=True):
    """``begin``: with the name in place of ``{name}``, or in place of ``{json_name}`` as a JSON string.

    ``opening``, ``separator``, ``closing``: around all calls of an answer. ``trigger``: what announces calls in free text (empty:
    nothing that would be certain). ``single``: there is never more than one.
    """

    begin: str
    end: str
    separator: str = "\n"
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    elements: ElementForm | None = None
    single: bool = False

    def begin_of(self, name: str) -> str | None:
        """None: a tool of this name cannot be written."""
        if "{name}" in self.begin:
            return self.begin.replace("{name}", name) if is_plain_name(name) else None
        return self.begin.replace("{json_name}", msgspec.json.encode(name).decode())


def _json_in_tags(opener: str, closer: str) -> CallForm:
    return CallForm(f'{opener}\n{{"name": {{json_name}}, "arguments": ', f"}}\n{closer}", trigger=opener)


def _json_array(opening: str, closing: str, trigger: str, arguments: str = "arguments") -> CallForm:
    return CallForm(
        f'{{"name": {{json_name}}, "{arguments}": ',
        "}",
        separator=", ",
        opening=opening,
        closing=closing,
        trigger=trigger,
    )


def _functions_in_tags(opener: str, closer: str) -> CallForm:
    return CallForm(
        f"{opener}\n<function={{name}}>\n",
        f"</function>\n{closer}",
        trigger=opener,
        elements=ElementForm("<parameter=", ">\n", "\n</parameter>\n"),
    )


def _dsml(block: str) -> CallForm:
    return CallForm(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>",
        opening=f"<｜DSML｜{block}>\n",
        closing=f"\n</｜DSML｜{block}>",
        trigger=f"<｜DSML｜{block}>",
        elements=ElementForm(
            '<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n", '" string="false">'
        ),
    )


BARE_ARRAY = _json_array("[", "]", "", "parameters")

_HERMES = _json_in_tags("<tool_call>", "</tool_call>")
_QWEN3_CODER = _functions_in_tags("<tool_call>", "</tool_call>")

CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": _HERMES,
    "longcat": _json_in_tags("<longcat_tool_call>", "</longcat_tool_call>"),
    "ernie45": _HERMES,
    "nemotron_deci": _json_array("<TOOLCALL>[", "]</TOOLCALL>", "<TOOLCALL>"),
    "jamba": _json_array("<tool_calls>[", "]</tool_calls>", "<tool_calls>"),
    "granite": _json_array("<|tool_call|>[", "]", "<|tool_call|>"),
    "phi4": _json_array("functools[", "]", "functools["),
    "llama3_json": CallForm('{"name": {json_name}, "parameters": ', "}", single=True),
    "xlam": _json_array("[", "]", ""),
    "qwen3_coder": _QWEN3_CODER,
    "seed_oss": CallForm(
        "<seed:tool_call>\n<function={name}>\n",
        "</function>\n</seed:tool_call>",
        trigger="<seed:tool_call>",
        elements=ElementForm("<parameter=", ">", "</parameter>\n"),
    ),
    "glm45": CallForm(
        "<tool_call>{name}\n",
        "</tool_call>",
        trigger="<tool_call>",
        elements=ElementForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "glm47": CallForm(
        "<tool_call>{name}",
        "</tool_call>",
        separator="",
        trigger="<tool_call>",
        elements=ElementForm("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    "minimax_m2": CallForm(
        '<invoke name="{name}">\n',
        "</invoke>",
        opening="<minimax:tool_call>\n",
        closing="\n</minimax:tool_call>",
        trigger="<minimax:tool_call>",
        elements=ElementForm('<parameter name="', '">', "</parameter>\n"),
    ),
    "deepseek_v3": CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    "deepseek_v3_1": CallForm(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        separator="",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    "deepseek_v3_2": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "cohere_command": CallForm(
        '{"tool_call_id": "0", "tool_name": {json_name}, "parameters": ',
        "}",
        separator=",\n    ",
        opening="<|START_ACTION|>[\n    ",
        closing="\n]<|END_ACTION|>",
        trigger="<|START_ACTION|>",
    ),
    "apertus": CallForm(
        "{{json_name}: ",
        "}",
        separator=", ",
        opening="<|tools_prefix|>[",
        closing="]<|tools_suffix|>",
        trigger="<|tools_prefix|>",
    ),
    "granite_20b_fc": CallForm(
        '<function_call> {"name": {json_name}, "arguments": ', "}", separator=" ", trigger="<function_call>"
    ),
    "internlm2": CallForm(
        '<|action_start|><|plugin|>\n{"name": {json_name}, "parameters": ',
        "}<|action_end|>",
        trigger="<|action_start|>",
        single=True,
    ),
    "minicpm5": CallForm(
        '<function name="{name}">',
        "</function>",
        separator="",
        trigger="<function",
        elements=ElementForm('<param name="', '">', "</param>"),
    ),
    "harmony": CallForm(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", single=True
    ),
}  # fmt: skip
"""By the names of `kvbus_parsers`; aliases are here where a family has changed its spelling."""


def call_form(tool: str | None) -> CallForm | None:
    """By the name or alias of a tool-call format; None: calls of this format cannot be given this way. Raise UnknownFormatError."""
    if tool is None:
        return None
    alias = tool.lower().replace("-", "_").replace(".", "_")
    return CALL_FORMS.get(_ALIASES.get(alias, alias)) or CALL_FORMS.get(tool_format(tool).name)


_ALIASES = {
    "deepseek_v31": "deepseek_v3_1",
    "deepseekv31": "deepseek_v3_1",
    "deepseekv4": "deepseek_v4",
    "glm46": "glm45",
}


def element_arguments(schema: Mapping[str, Any], form: ElementForm) -> tuple[GuidedArgument, ...] | None:
    """The arguments of an object schema, in its order; None: it is not a plain list of properties.

    The value of a string is written as it is; what a schema says about the inside of a string, other than a list of possible
    values, is not enforced. Every other value is JSON.
    """
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(
        key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
    ):
        return None
    if not properties and schema.get("additionalProperties") is not False:
        return None
    required = schema.get("required") or ()
    arguments = []
    for name, value in properties.items():
        if not is_plain_name(name) or _leads_out(value):
            return None
        kind, text = _content(value, schema, typed=bool(form.between_json))
        between = form.between_json if kind == "json" and form.between_json else form.between
        begin = f"{form.before}{name}{between}"
        arguments.append(GuidedArgument(begin=begin, kind=kind, end=form.after, text=text, required=name in required))
    return tuple(arguments)


def _content(value: Any, root: Mapping[str, Any], *, typed: bool) -> tuple[ValueKind, str]:
    """What stands in an element. ``typed``: where more than strings are possible, the format can say that this is none."""
    types = types_of(value, root)
    if "string" in types and not (typed and len(types) > 1):
        choices = _choices(value, root)
        return ("text", "") if choices is None else ("regex", "|".join(map(escaped, choices)))
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    schema = {**value, **definitions} if isinstance(value, dict) else value
    return "json", msgspec.json.encode(schema).decode()


def _choices(value: Any, root: Mapping[str, Any]) -> list[str] | None:
    """The values of an enumeration, as they are written. A list that holds more than strings is written as JSON but for those."""
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        value = resolve(value["$ref"], root)
    if not isinstance(value, dict):
        return None
    values = value.get("enum") or ([value["const"]] if "const" in value else None)
    if values is None:
        return None
    return [item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in values]


def _leads_out(value: Any) -> bool:
    """Whether a schema refers to parts of its root that do not travel with it."""
    if isinstance(value, dict):
        ref = value.get("$ref")
        if isinstance(ref, str) and not ref.startswith(("#/$defs/", "#/definitions/")):
            return True
        return any(map(_leads_out, value.values()))
    return isinstance(value, list) and any(map(_leads_out, value))


def escaped(text: str) -> str:
    """A pattern that matches exactly this text, in the syntax that all regex engines share."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$#&-~/" else _visible(char) for char in text)


def _visible(char: str) -> str:
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(char, char)
