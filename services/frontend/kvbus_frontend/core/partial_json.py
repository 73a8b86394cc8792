"""JSON that was cut off, as far as it goes."""

import re
from json import JSONDecodeError, JSONDecoder
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))((?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\Z")
_DECODER = JSONDecoder()
_WORDS = {"true": True, "false": False, "null": None}


class _Cut(Exception):
    """The text ends here, or is no JSON from here on."""


def parsed_part(text: str) -> dict[str, Any]:
    """The members of a JSON object that are complete, and of the last one what is; empty when there is no object at all.

    Objects and arrays may stay unfinished, strings and words may not. A number at the very end counts as it is: that is how the
    official clients of the Messages API read unfinished arguments.
    """
    root: dict[str, Any] = {}
    try:
        start = _skip(text, 0)
        if text.startswith("{", start):
            _read_object(text, start + 1, root)
    except (_Cut, RecursionError):
        pass  # what is complete so far is in the root
    return root


def _read_object(text: str, at: int, into: dict[str, Any]) -> int:
    """Fills ``into`` as it goes. Returns where the object ends."""
    at = _skip(text, at)
    if text.startswith("}", at):
        return at + 1
    while True:
        if not text.startswith('"', at):
            raise _Cut
        key, at = _read_string(text, at)
        at = _skip(text, at)
        if not text.startswith(":", at):
            raise _Cut
        at = _read_value(text, _skip(text, at + 1), into, key)
        at = _skip(text, at)
        if not text.startswith(",", at):
            return _closed(text, at, "}")
        at = _skip(text, at + 1)


def _read_array(text: str, at: int, into: list[Any]) -> int:
    at = _skip(text, at)
    if text.startswith("]", at):
        return at + 1
    while True:
        at = _read_value(text, at, into, None)
        at = _skip(text, at)
        if not text.startswith(",", at):
            return _closed(text, at, "]")
        at = _skip(text, at + 1)


def _read_value(text: str, at: int, into: Any, key: str | None) -> int:
    """Objects and arrays are put in their place before they are read: what they hold stays when they are cut."""
    opener = text[at : at + 1]
    if opener == "{":
        members: dict[str, Any] = {}
        _put(into, key, members)
        return _read_object(text, at + 1, members)
    if opener == "[":
        items: list[Any] = []
        _put(into, key, items)
        return _read_array(text, at + 1, items)
    value, at = _read_string(text, at) if opener == '"' else _read_word(text, at)
    _put(into, key, value)
    return at


def _put(into: Any, key: str | None, value: Any) -> None:
    if key is None:
        into.append(value)
    else:
        into[key] = value


def _read_string(text: str, at: int) -> tuple[str, int]:
    try:
        string, end = _DECODER.raw_decode(text, at)
    except JSONDecodeError as error:
        raise _Cut from error
    return str(string), end


def _read_word(text: str, at: int) -> tuple[Any, int]:
    found = _WORD.match(text, at)
    if found is None:
        raise _Cut
    if found[0] in _WORDS:
        return _WORDS[found[0]], found.end()
    number = _NUMBER.match(found[0])
    if number is None:
        raise _Cut
    return (float(found[0]) if number[2] else int(number[1])), found.end()


def _closed(text: str, at: int, closer: str) -> int:
    if not text.startswith(closer, at):
        raise _Cut
    return at + 1


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
