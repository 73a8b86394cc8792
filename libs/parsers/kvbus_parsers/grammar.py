"""What a format is: the markers it writes, and grammars that read what follows them.

The outer grammar (`parser.py`) passes text on and stops at markers; a format only reads on from there. A grammar is a generator
over `Context.source` and says what it finds to `Context.sink`. To write one:

- Read with the primitives of `Source` (`yield from source.literal("[")`). Never look at a whole buffer: decide on what they return.
- `ToolFormat.read(context, opener)` is called behind one of its `openers`. It returns False, with everything read given back
  (`source.unread`, or `record`/`rewind`), if the opener was only a word in prose; the outer grammar then lets it stand as text. It
  returns True when it has read markup: calls, or nothing worth a call. On the way `sink.start_call`, `sink.arguments`,
  `sink.end_call` as soon as their piece is certain, `sink.marker()` for markup without a call.
- Inside a call nothing is rejected any more: what is not grammar there goes out as raw arguments.
- A body that turns out broken before its call began is prose, without the markers: `sink.prose`, which also fits inside reasoning.
- Where the input ends early: `source.cut_off` says that the output was cut (drop what is unfinished); else what was read is text.
- Markers in `ToolFormat.strays` (close tags without an opener) and ``framing`` are swallowed wherever they stand in text.
- `ToolFormat.leading` reads calls without an opener at the start of the content; False means that nothing was read.
- `ToolFormat.whole` (harmony) replaces the outer grammar altogether; it opens and closes reasoning itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbus_parsers.sink import Sink
from kvbus_parsers.source import Source, Step

Schema = Mapping[str, Any]


@dataclass(slots=True)
class Context:
    """What a grammar works with. ``schemas``: per offered tool the JSON schema of its parameters."""

    source: Source
    sink: Sink
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    leading: "Grammar | None" = None
    """Reads calls at the start of content: guided output, or what the tool format has. For `whole` grammars to use."""


Grammar = Callable[[Context], Step[bool]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    openers: tuple[str, ...] = ()
    read: Callable[[Context, str], Step[bool]] | None = None
    strays: tuple[str, ...] = ()
    leading: Grammar | None = None
    whole: Grammar | None = None
    reasoning: "ReasoningFormat | None" = None
    """The reasoning that is part of the format (sections of Cohere), for when no other is chosen."""
    framing: tuple[str, ...] = ()
    """Markers around the answer, dropped from text with the white space that touches them."""
    new_id: Callable[[], str] | None = None
    """Mints ids that the family's chat templates take back, if they do not take any."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A block of reasoning between markers. A second opener inside it and a closer outside it are swallowed."""

    name: str
    openers: tuple[str, ...] = ("<think>",)
    closers: tuple[str, ...] = ("</think>",)
    starts_open: bool = False
    """What holds when the prompt does not tell."""
    ends_on_tool_opener: bool = False
    """A call ends an open block."""
    framing: tuple[str, ...] = ()
    """Markers around the answer, dropped from text."""
    label: str = ""
    """A word on the line of the opener that belongs to it (Gemma's ``thought``)."""
    phrases: bool = False
    """The markers are ordinary words: the opener counts only at the start of the output, the closer only inside the block."""
    prefix: str = ""
    """Text put in front of the output."""
    whole: Grammar | None = None
