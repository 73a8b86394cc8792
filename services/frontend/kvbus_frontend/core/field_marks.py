"""Where in a prompt the texts of a request stand: every text gets marks around it, and the marks are looked for in the prompt.

A mark is one character of Unicode's supplementary private use planes that the prompt does not hold. It stands next to the white
space at a text's ends, not outside of it: templates strip that. What is marked goes the whole way of a request; a prompt that is
the plain one when its marks are taken out tells for certain which of its characters came from which field. Text that a template or
a rule compares with something does not survive its marks; `core.prompt_sources` leaves those texts as they are.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec

from kvbus_frontend.core.written_calls import WrittenCall

_MARK = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)
"""What stands before a colon is a key."""

_TEXTS = frozenset(
    {
        "content", "context", "data", "description", "input", "instructions", "output", "reasoning", "reasoning_content",
        "refusal", "system", "text", "thinking", "title",
    }
)  # fmt: skip
_SCHEMAS = ("parameters", "input_schema")
_CALLS = ("tool_use", "function_call", "custom_tool_call", "tool_search_call")
_SEALED = ("signature", "encrypted_content")

Reseal = Callable[[str, Mapping[str, Any], Callable[[str], str]], str]
"""Of a sealed text, the block or item that it stands in, and what to do with the open text: the result sealed again."""


class Owner(msgspec.Struct, frozen=True):
    """The tool or the call that a field belongs to. ``path``: "" for none."""

    path: str = ""
    is_tool: bool = False


class Field(msgspec.Struct, frozen=True):
    """``text``: what is between the marks, "" where that is not the field's own text; ``skipped``: characters before it.

    ``in_schema``: one of the many strings of a tool's schema.
    """

    path: str
    owner: str
    text: str = ""
    skipped: int = 0
    in_schema: bool = False


class Span(msgspec.Struct, frozen=True):
    """Characters of a prompt that came from a field."""

    start: int
    end: int
    field: Field


class Located(msgspec.Struct, frozen=True):
    """``text``: without marks; ``marks``: where in it each mark stood, and whose it was."""

    text: str
    spans: tuple[Span, ...]
    marks: tuple[tuple[int, Field], ...]

    def beside(self, position: int) -> list[Field]:
        """The fields with a mark at this place, else the one with the last mark before it, else with the first behind it."""
        here = [field for at, field in self.marks if at == position]
        before = [field for at, field in self.marks if at < position]
        return here or before[-1:] or [field for _, field in self.marks[:1]]


def unmarked_text(text: str) -> str:
    return _MARK.sub("", text)


class Marking:
    """Marks one request. ``taken``: text that holds no mark of it; ``kept``: paths of fields that stay as they are.

    ``schemas``: all strings of schemas are marked, not only descriptions. ``changed``: texts that prompt stability changes, and
    what it makes of them.
    """

    def __init__(
        self, *, taken: str, kept: Collection[str], schemas: bool, changed: Mapping[str, str], reseal: Reseal
    ) -> None:
        self._free = _free_marks(frozenset(_MARK.findall(taken)))
        self._kept = kept
        self._schemas = schemas
        self._changed = changed
        self._reseal = reseal
        self._tool_names: dict[str, str] = {}
        self._arguments: dict[str, tuple[str, str]] = {}
        self._marks: dict[str, tuple[Field, bool]] = {}

    @property
    def fields(self) -> list[Field]:
        return [field for field, opens in self._marks.values() if opens]

    def document(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """``document``: what a prompt is made of, by the path in the request. Tools first: others refer to them."""
        names = sorted(document, key=lambda name: not name.endswith("tools"))
        marked = {name: self._member(name.rpartition(".")[2], document[name], name, Owner(), {}) for name in names}
        return {name: marked[name] for name in document}

    # walking

    def _member(self, key: str, value: Any, path: str, owner: Owner, siblings: Mapping[str, Any]) -> Any:
        match value:
            case str():
                return self._string(key, value, path, owner, siblings)
            case dict() if key in _SCHEMAS:
                return self._schema(value, path, owner)
            case dict() if key in ("arguments", "input") and owner.path:
                return self._written(value, self._arguments_marks(path, owner))
            case dict():
                return self._object(value, path, owner)
            case list():
                return [self._item(key, item, f"{path}[{i}]", owner) for i, item in enumerate(value)]
        return value

    def _item(self, key: str, item: Any, path: str, owner: Owner) -> Any:
        if key in ("tools", "tool_calls"):
            owner = Owner(path, is_tool=key == "tools")
        return self._object(item, path, owner) if isinstance(item, dict) else item

    def _object(self, value: Mapping[str, Any], path: str, owner: Owner) -> dict[str, Any]:
        if value.get("type") in _CALLS:
            owner = Owner(path)
        return {key: self._member(key, item, f"{path}.{key}", owner, value) for key, item in value.items()}

    def _string(self, key: str, value: str, path: str, owner: Owner, siblings: Mapping[str, Any]) -> str:
        kind = siblings.get("type")
        if key == "name" and owner.path and kind != "namespace":
            return self._name(value, path, owner)
        if key == "tool_name" or (key == "name" and path.startswith("tool_choice")):
            return self._tool_names.get(value, value)
        if key == "arguments" and owner.path:
            return self._arguments_text(value, path, owner)
        if key in _SEALED and path not in self._kept:
            return self._reseal(value, siblings, lambda text: self._around(text, self._new(Field(path, owner.path))))
        if key == "data" and kind != "text":  # of a file
            return value
        if key in _TEXTS or (key == "source" and kind == "search_result"):
            marks = self._text_marks(value, path, owner)
            if key == "input" and owner.path and marks is not None:
                self._arguments[owner.path] = marks
            return self._around(self._changed.get(value) or value, marks)
        return value

    def _schema(self, value: Any, path: str, owner: Owner, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._schema(item, f"{path}.{name}", owner, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self._schema(item, f"{path}[{i}]", owner, key) for i, item in enumerate(value)]
        if isinstance(value, str) and (self._schemas or key == "description"):
            field = _field_of(value, path, owner)
            return self._around(value, self._new(msgspec.structs.replace(field, in_schema=key != "description")))
        return value

    # marking

    def _new(self, field: Field) -> tuple[str, str] | None:
        """None for a field that stays as it is, and when there are no marks left."""
        if field.path in self._kept:
            return None
        pair = (next(self._free, ""), next(self._free, ""))
        if not all(pair):
            return None
        self._marks[pair[0]], self._marks[pair[1]] = (field, True), (field, False)
        return pair

    @staticmethod
    def _around(text: str, marks: tuple[str, str] | None) -> str:
        core = text.strip()
        if not core or marks is None:
            return text
        start = len(text) - len(text.lstrip())
        return text[:start] + marks[0] + core + marks[1] + text[start + len(core) :]

    def _text_marks(self, value: str, path: str, owner: Owner) -> tuple[str, str] | None:
        if not value.strip() or self._changed.get(value) == "":
            return None
        return self._new(Field(path, owner.path) if value in self._changed else _field_of(value, path, owner))

    def _name(self, value: str, path: str, owner: Owner) -> str:
        """What looks for a tool finds it by its name: tools of one name share their marks, which then tell nothing."""
        if not owner.is_tool or value != value.strip():
            return self._around(value, self._new(_field_of(value, path, owner)))
        if value in self._tool_names:
            mark = self._tool_names[value][:1]
            field = Field("", "")
            if mark in self._marks:
                self._marks[mark], self._marks[self._tool_names[value][-1]] = (field, True), (field, False)
        else:
            self._tool_names[value] = self._around(value, self._new(_field_of(value, path, owner)))
        return self._tool_names[value]

    # calls

    def _arguments_marks(self, path: str, owner: Owner) -> tuple[str, str] | None:
        marks = self._new(Field(path, owner.path))
        if marks is not None:
            self._arguments[owner.path] = marks
        return marks

    def _arguments_text(self, text: str, path: str, owner: Owner) -> str:
        """JSON text, which is read and written anew on its way; other text goes as it is."""
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            value = None
        marks = self._arguments_marks(path, owner)
        if not isinstance(value, dict):
            return self._around(text, marks)
        return json.dumps(self._written(value, marks), ensure_ascii=False)

    def _written(self, value: Any, marks: tuple[str, str] | None) -> Any:
        if isinstance(value, str):
            return self._around(value, marks)
        if isinstance(value, dict):
            return {key: self._written(item, marks) for key, item in value.items()}
        return [self._written(item, marks) for item in value] if isinstance(value, list) else value

    def call(self, marked_name: str) -> str:
        """The path of the call with this marked name; "" where its name is not marked."""
        found = self._marks.get(marked_name[:1])
        return found[0].owner if found is not None else ""

    def as_written(self, path: str, call: WrittenCall) -> WrittenCall:
        """A call that takes the place of the one with this path, marked as that one's arguments."""
        marks = self._arguments.get(path)
        if marks is None:
            return call
        arguments = _JSON_STRING.sub(
            lambda match: match[0] if match[2] or not match[1] else f'"{marks[0]}{match[1]}{marks[1]}"', call.arguments
        )
        written = None
        if call.written is not None:
            written = {key: self._around(text, marks) for key, text in call.written.items()}
        return msgspec.structs.replace(call, arguments=arguments, written=written)

    # finding

    def located(self, text: str) -> Located:
        """What stands between the two marks of one field came from it."""
        spans: list[Span] = []
        marks: list[tuple[int, Field]] = []
        opened: tuple[int, Field] | None = None
        for found, match in enumerate(found for found in _MARK.finditer(text) if found[0] in self._marks):
            field, opens = self._marks[match[0]]
            at = match.start() - found
            marks.append((at, field))
            if not opens and opened is not None and opened[1] is field and field.path:
                spans.append(Span(opened[0], at, field))
            opened = (at, field) if opens else None
        plain = _MARK.sub(lambda match: "" if match[0] in self._marks else match[0], text)
        return Located(plain, tuple(spans), tuple(marks))


def paths_of(document: Mapping[str, Any], texts: Collection[str]) -> dict[str, list[str]]:
    """Where in a document, however deep it is, each of these strings stands."""
    found: dict[str, list[str]] = {text: [] for text in texts}
    waiting: list[tuple[str, Any]] = [("", document)] if texts else []
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if value in found:
                found[value].append(path)
        elif isinstance(value, dict):
            waiting += ((f"{path}.{key}".removeprefix("."), item) for key, item in reversed(value.items()))
        elif isinstance(value, list):
            waiting += ((f"{path}[{i}]", value[i]) for i in reversed(range(len(value))))
    return found


def _field_of(value: str, path: str, owner: Owner) -> Field:
    return Field(path, owner.path, value.strip(), len(value) - len(value.lstrip()))


def _free_marks(taken: Collection[str]) -> Iterator[str]:
    return (chr(code) for plane in _PLANES for code in plane if chr(code) not in taken)
