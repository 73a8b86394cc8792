"""How the messages of one model's prompts are written: what its template does, and what its output's formats tell."""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from kvbus_frontend.core.formats import Formats
from kvbus_frontend.core.template_traits import TemplateTraits
from kvbus_frontend.core.written_calls import plain_id
from kvbus_parsers.names import reasoning_format, tool_format
from kvbus_protocols.conversation import Conversation, ToolCallPart

_KIMI_ID = re.compile(r"functions\..+:\d+")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_HISTORY_KEPT: Mapping[str, Any] = {
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
    "drop_thinking": False,
}


class ThinkMarkers(msgspec.Struct, frozen=True):
    """Around a thought within text. ``label``: a word behind the opener that belongs to it."""

    opener: str
    closer: str
    label: str = ""

    def around(self, thought: str) -> str:
        """As models write it: markers like tags stand on lines of their own."""
        if self.label or not self.opener.startswith("<"):
            head = f"{self.opener}{self.label}\n" if self.label else self.opener
            return head + thought + ("\n" if self.label else "") + self.closer
        return f"{self.opener}\n{thought}\n{self.closer}\n\n"


class MessageStyle(msgspec.Struct, frozen=True):
    """``markers``: None where the model writes no thoughts. ``numbered_calls``: ids are ``functions.NAME:N``, counted on."""

    traits: TemplateTraits = TemplateTraits()
    markers: ThinkMarkers | None = None
    numbered_calls: bool = False

    def call_id(self, call_id: str, name: str, number: int) -> str:
        """An id in the form that the template or the model wants; the same for the same call in every request."""
        if self.numbered_calls and not _KIMI_ID.fullmatch(call_id):
            return f"functions.{name}:{number}"
        if self.traits.short_ids and not _SHORT_ID.fullmatch(call_id):
            # Clients drop all but letters and digits, from some turn on.
            plain = plain_id(call_id) or f"{name}:{number}"
            return blake2b(plain.encode(errors="surrogatepass")).hexdigest()[:9]
        return call_id


def style_of(traits: TemplateTraits, formats: Formats) -> MessageStyle:
    markers = None
    if formats.reasoning is not None:
        known = reasoning_format(formats.reasoning)
        if known.openers and known.closers:
            markers = ThinkMarkers(known.openers[0], known.closers[0], known.label)
    numbered = formats.tool is not None and tool_format(formats.tool).name == "kimi_k2"
    return MessageStyle(traits, markers, numbered)


def template_variables(conversation: Conversation, traits: TemplateTraits) -> dict[str, Any]:
    """Names for the template. Where tools are about, it is to show all thoughts of earlier turns: without them the next answer is
    worse, and the prompt is no continuation of what was generated. What the client gives wins."""
    variables: dict[str, Any] = {}
    if _is_agentic(conversation):
        variables |= _HISTORY_KEPT
        if conversation.reasoning is None:
            variables["enable_thinking"] = True
    if conversation.reasoning is not None:
        variables |= {"enable_thinking": conversation.reasoning, "thinking": conversation.reasoning}
    known = {name: value for name, value in variables.items() if name in traits.variables}
    return known | conversation.template_variables


def _is_agentic(conversation: Conversation) -> bool:
    return bool(conversation.tools) or any(
        isinstance(part, ToolCallPart) for turn in conversation.turns for part in turn.parts
    )
