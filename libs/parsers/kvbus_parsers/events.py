"""What a parser says about a model's output, in the order in which the model wrote it.

A text or reasoning segment is a run of its deltas; ``ReasoningEnded`` closes a reasoning segment. A call is ``CallStarted``, any
number of ``CallArguments``, ``CallEnded``. A call that the end of the output cuts off has no ``CallEnded``. Calls do not overlap.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEnded:
    pass


@dataclass(frozen=True, slots=True)
class CallStarted:
    """``index`` counts the calls of one output from 0; ``id`` is unique within it, and the model's own where it writes one."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments' JSON text, never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is complete, the last character of it just parsed.

    ``arguments``: the whole text, all deltas joined: JSON as the model wrote it, ``{}`` when it wrote none, and something that is
    no JSON only where the model wrote no JSON. ``written``: for formats without types on the wire (the XML-like ones), the text
    that the model wrote per argument; a template that writes strings as they are renders the same characters again from it.
    """

    index: int
    id: str
    name: str
    arguments: str
    written: Mapping[str, str] | None = None


Event = Text | Reasoning | ReasoningEnded | CallStarted | CallArguments | CallEnded
