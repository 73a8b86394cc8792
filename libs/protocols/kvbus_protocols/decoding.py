"""Request bodies to typed requests; everything that can be wrong with the bytes becomes an InvalidRequest."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import msgspec.inspect

from kvbus_protocols.errors import InvalidRequest

T = TypeVar("T")

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`\Z")
_MISSING = re.compile(r"missing required field `(.+?)`")
_UNKNOWN = re.compile(r"contains unknown field `(.+?)`")
# Any escape sequence of a JSON string, a surrogate pair being one; the group holds a surrogate without its other half.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def replace_lone_surrogates(body: bytes) -> bytes:
    r"""``\ud83d`` without its other half becomes U+FFFD: JavaScript clients cut strings within an emoji."""
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], body)


_ROOM = 100
"""Calls. What can be read just so could not be written again further up the stack, when the answer has been generated already."""


def _with_room(work: Callable[[], T], calls: int) -> T:
    """As many calls deeper than here. Raise RecursionError."""
    return _with_room(work, calls - 1) if calls else work()


class RequestDecoder(Generic[T]):
    """Decodes one request type. Unknown fields are skipped."""

    def __init__(self, request_type: type[T]) -> None:
        self._type = request_type
        self._decoder = msgspec.json.Decoder(request_type)

    def decode(self, body: bytes) -> T:
        """Raise InvalidRequest with the field at fault in ``param``."""
        try:
            body.decode()  # unknown fields are skipped undecoded, so msgspec would not see bad bytes in them
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"The request body is not valid UTF-8 (byte {error.start}).", code="invalid_utf8"
            ) from error
        try:
            return _with_room(lambda: self._decode(body), _ROOM)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), self._type) from error
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
        except RecursionError as error:
            raise InvalidRequest("The request body is nested too deeply.", code="nesting_too_deep") from error

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            mended = replace_lone_surrogates(body)
            if mended == body:
                raise
            return self._decoder.decode(mended)


def converted(value: Any, into: type[T], where: str) -> T:
    """A part of a request that was decoded as plain JSON. Raise InvalidRequest; ``where``: its own path, for ``param``."""
    try:
        return msgspec.convert(value, into)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), into, where) from error


def _literals(kind: Any) -> Mapping[str, Sequence[str]]:
    """The values that fields take which take only certain ones, by the name of the field; without those of names that mean
    different things in different places."""
    found: dict[str, Sequence[str]] = {}
    seen, waiting = set[type](), [msgspec.inspect.type_info(kind)]
    while waiting:
        match waiting.pop():
            case msgspec.inspect.StructType(cls=cls, fields=fields) if cls not in seen:
                seen.add(cls)
                for field in fields:
                    waiting.append(field.type)
                    if values := _values(field.type):
                        known = found.setdefault(field.encode_name, values)
                        found[field.encode_name] = values if known == values else ()
            case msgspec.inspect.UnionType(types=types):
                waiting += types
            case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
                waiting.append(item)
            case msgspec.inspect.DictType(value_type=item) | msgspec.inspect.Metadata(type=item):
                waiting.append(item)
            case _:
                pass
    return found


def _values(kind: msgspec.inspect.Type) -> Sequence[str]:
    types = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return tuple(str(v) for t in types if isinstance(t, msgspec.inspect.LiteralType) for v in t.values)


def _wrong_field(message: str, kind: Any, where: str = "") -> InvalidRequest:
    path = _PATH.search(message)
    words, param = (message, "") if path is None else (message[: path.start()], path[1])
    param = f"{where}.{param}".rstrip(".") if where else param
    missing = _MISSING.search(words)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    unknown = _UNKNOWN.search(words)
    if unknown is not None:
        extension = param.partition(".")[0]
        return InvalidRequest(
            f"invalid {extension}: unknown field `{unknown[1]}`", param=f"{param}.{unknown[1]}", code="unknown_field"
        )
    if words.startswith("Invalid enum value") and (known := _literals(kind).get(param.rpartition(".")[2])):
        words += f" (known: {', '.join(known)})"
    if not param:
        return InvalidRequest(f"Invalid request body: {words[0].lower()}{words[1:]}.", code="invalid_value")
    return InvalidRequest(
        f"Invalid value for '{param}': {words[0].lower()}{words[1:]}.", param=param, code="invalid_value"
    )
