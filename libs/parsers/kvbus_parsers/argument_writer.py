"""Writes the arguments of a call that a model names one by one as one JSON object, while their values come."""

from kvbus_parsers.coercion import Schema
from kvbus_parsers.grammar import Context
from kvbus_parsers.json_text import escape, quote

_START_LENGTH = 64  # `Schema.is_text` looks no further


class ArgumentWriter:
    """Begins the call, and ends it with `close`. In between: `begin`, any number of `text`, `end` for each argument, and `raw`.

    A value that can only be a string goes out as it comes; other values go out at their end, as what the tool's schema says.
    """

    def __init__(self, context: Context, name: str, call_id: str = "") -> None:
        self.schema = Schema.of(context.schemas.get(name))
        self._sink = context.sink
        self._sink.start_call(name, call_id)
        self._written: dict[str, str] = {}
        self._object_open = False
        self._raw_open = False
        self._space: list[str] = []
        # the open argument
        self._key = ""
        self._value = Schema()
        self._pieces: list[str] = []
        self._start = ""
        self._streams = False
        self._framed = False
        self._held = ""  # a newline that may turn out to be the last

    @property
    def is_empty(self) -> bool:
        return not self._object_open and not self._raw_open

    def begin(self, key: str, schema: Schema | None = None, *, framed: bool = False) -> None:
        """The value of ``key`` begins. ``framed``: one newline at either end is framing. ``schema``: another than the tool's."""
        self._key = key
        self._value = schema if schema is not None else self.schema.member(key)
        self._pieces = []
        self._start = self._held = ""
        self._streams = False
        self._framed = framed
        self._lead(key)
        self._flow()

    def text(self, text: str) -> None:
        """The next piece of the open value."""
        if self._framed and not self._pieces and not self._held and text.startswith("\n"):
            self._pieces.append("")  # remembers that the newline in front is gone
            text = text[1:]
        if self._framed:
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text[: len(text) - len(self._held)]
        if text:
            self._pieces.append(text)
            if self._streams:
                self._sink.arguments(escape(text))
            elif len(self._start) < _START_LENGTH:
                self._start = (self._start + text)[:_START_LENGTH]
                self._flow()

    def end(self) -> None:
        """The open value is whole."""
        text = self._written[self._key] = "".join(self._pieces)
        self._sink.arguments('"' if self._streams else self._value.to_json(text))

    def abandon(self) -> None:
        """The output ends inside the open value: what was held of it goes out as it is."""
        if not self._streams:
            self._sink.arguments("".join(self._pieces))

    def member(self, key: str, json_text: str, written: str = "") -> None:
        """An argument that goes out as given. ``written``: the text that the model wrote for it."""
        self._written[key] = written
        self._lead(key)
        self._sink.arguments(json_text)

    def raw(self, text: str) -> None:
        """What is no grammar between arguments goes out as it is: the call is seen to be broken. Space around it is framing."""
        kept = text.rstrip()
        if kept:
            self._sink.arguments("".join(self._space) + kept if self._raw_open else kept.lstrip())
            self._raw_open = True
            self._space = []
        self._space.append(text[len(kept) :])

    def close(self, *, written: bool = True) -> None:
        """The call is complete. ``written``: the text of each argument goes with it, for formats without types on the wire."""
        if self._object_open:
            self._sink.arguments("}")
        self._sink.end_call(self._written if written else None)

    def _lead(self, key: str) -> None:
        self._sink.arguments(("{" if not self._object_open else ", ") + quote(key) + ": ")
        self._object_open = True
        self._raw_open = False
        self._space = []

    def _flow(self) -> None:
        """Lets the value go out as it comes if it can only be a string."""
        if self._value.is_text(self._start):
            self._streams = True
            self._sink.arguments('"' + escape("".join(self._pieces)))
