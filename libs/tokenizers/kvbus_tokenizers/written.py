"""JSON objects that keep the text in which they were written, for chat templates."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PLACE = "\udc00"
"""Stands for a written object while the JSON around it is made: text that can be tokenized holds no lone surrogate."""


class WrittenValue:
    """A JSON value with the text in which it was written. It is neither a string nor a mapping, and templates write its text."""

    __slots__ = ("json_text",)

    def __init__(self, json_text: str | None) -> None:
        self.json_text = json_text

    def __str__(self) -> str:
        return to_json(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.json_text!r})"

    # Templates of models whose arguments are text put them together with other text by "+".

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


class WrittenObject(WrittenValue, Mapping[str, Any]):
    """Arguments of a tool call as a model wrote them.

    A chat template writes arguments in one of three ways, and each gives the model's own characters again: by ``tojson`` or as text
    it writes ``json_text``; value by value it writes what the mapping holds. Where the model wrote each argument by itself (the
    XML-like formats), the mapping holds strings and `WrittenValue`.

    ``json_text``: None for an object whose text is not known; then it is whatever the template makes of the values.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any], json_text: str | None = None) -> None:
        super().__init__(json_text)
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"WrittenObject({dict(self._values)!r}, {self.json_text!r})"


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` of chat templates: plain JSON (jinja2's own escapes <, > and & for HTML).

    What is written keeps its text, unless the template asks for another shape (``indent`` or ``sort_keys``).
    """
    texts: list[str] = []

    def plain(item: Any) -> Any:
        if not isinstance(item, WrittenValue):
            raise TypeError(f"Object of type {type(item).__name__} is not JSON serializable")
        if item.json_text is None or indent is not None or sort_keys:
            return dict(item) if isinstance(item, Mapping) else _data(item.json_text or "null")
        texts.append(item.json_text)
        return _PLACE

    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=plain
    )
    if not texts:
        return text
    between = text.split(json.dumps(_PLACE, ensure_ascii=ensure_ascii))
    return "".join(part for pair in zip(between, [*texts, ""], strict=True) for part in pair)


def _data(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
