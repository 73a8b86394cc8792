"""Stream parsers for what language models write: reasoning and tool calls, in every wire format. Standard library only."""

from kvbus_parsers.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_parsers.names import UnknownFormatError
from kvbus_parsers.parser import FinishReason, Parser, open_parser

__all__ = [
    "CallArguments",
    "CallEnded",
    "CallStarted",
    "Event",
    "FinishReason",
    "Parser",
    "Reasoning",
    "ReasoningEnded",
    "Text",
    "UnknownFormatError",
    "open_parser",
]
