"""Cohere Command A and later: sections for thinking, calls and the response, each between its own tokens."""

from kvbus_parsers.formats.json_tags import json_tags
from kvbus_parsers.grammar import ReasoningFormat
from kvbus_parsers.json_calls import CallKeys

# The model numbers its calls anew in every answer, so its ids are not taken over.
_KEYS = CallKeys(name=("tool_name", "name"), arguments=("parameters", "arguments"))

_REASONING = ReasoningFormat(
    "cohere_command",
    ("<|START_THINKING|>",),
    # A response shows that the thoughts are over, even where the model did not close them.
    ("<|END_THINKING|>", "<|START_RESPONSE|>", "<|START_TEXT|>"),
    framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ends_on_tool_opener=True,
)

FORMATS = (json_tags("cohere_command", ("<|START_ACTION|>",), ("<|END_ACTION|>",), keys=_KEYS, reasoning=_REASONING),)
REASONING = (_REASONING,)
ALIASES = dict.fromkeys(("cohere", "cohere_command3", "cohere_command4"), "cohere_command")
REASONING_ALIASES = ALIASES
