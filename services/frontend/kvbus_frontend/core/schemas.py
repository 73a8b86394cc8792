"""JSON Schemas of requests: whether they are schemas at all, within limits. What an engine can follow is the engine's to say."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from kvbus_protocols.errors import InvalidRequest

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

_ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems",
        "unevaluatedItems", "unevaluatedProperties", "contentSchema")  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS = ("minimum", "maximum", "multipleOf")
_TEXTS = ("$ref", "pattern", "format", "$id", "$anchor", "$comment", "title", "description")
_FLAGS = ("uniqueItems",)


class SchemaLimits(msgspec.Struct, frozen=True):
    """``size_bytes``: of the schema as JSON text; ``depth``: of schemas within schemas."""

    size_bytes: int = 256 << 10
    depth: int = 64


DEFAULT_LIMITS = SchemaLimits()


class _Malformed(Exception):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{problem} (at {path})")


def check_schema(schema: Any, limits: SchemaLimits, *, param: str) -> str:
    """The schema as JSON text. Raise InvalidRequest that names ``param`` for what is no JSON Schema, or too large."""
    text = msgspec.json.encode(schema)
    if len(text) > limits.size_bytes:
        raise InvalidRequest(
            f"The schema of '{param}' has {len(text)} bytes; at most {limits.size_bytes} are allowed.",
            param=param,
            code="schema_too_large",
        )
    try:
        _check(schema, schema, "#", limits.depth)
    except _Malformed as problem:
        raise InvalidRequest(
            f"Invalid schema for '{param}': {problem}.", param=param, code="invalid_json_schema"
        ) from problem
    return text.decode()


def _check(schema: Any, root: Any, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _Malformed(path, f"{_kind(schema)} is not a schema, which is an object or a boolean")
    if depth <= 0:
        raise _Malformed(path, "schemas are nested too deeply")
    for key, value in schema.items():
        check = _CHECKS.get(key)
        problem = check(value) if check is not None else None
        if problem is not None:
            raise _Malformed(f"{path}/{key}", f"'{key}' must be {problem}")
        if key == "$ref" and not _resolves(value, root):
            raise _Malformed(f"{path}/$ref", f"'{value[:200]}' is no schema within this one")
        if key in _ONE and not (key == "items" and isinstance(value, list)):
            _check(value, root, f"{path}/{key}", depth - 1)
        elif key in _LISTS or key == "items":
            for i, item in enumerate(value):
                _check(item, root, f"{path}/{key}/{i}", depth - 1)
        elif key in _MAPS:
            for name, item in value.items():
                _check(item, root, f"{path}/{key}/{name}", depth - 1)


def _resolves(ref: str, root: Any) -> bool:
    """Whether a reference within the schema leads to a schema. Named anchors are left to the engine."""
    if not ref.startswith("#"):
        return False
    if ref not in ("#", "#/") and not ref.startswith("#/"):
        return True
    return isinstance(resolve(ref, root), dict | bool)


def resolve(ref: str, root: Any) -> Any:
    """What a JSON pointer of the form ``#/a/b`` leads to; None: nothing."""
    found = root
    for step in unquote(ref.removeprefix("#")).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _type(value: Any) -> str | None:
    names = value if isinstance(value, list) else [value]
    ok = bool(names) and all(isinstance(name, str) and name in TYPES for name in names)
    return None if ok else f"one or more of {', '.join(TYPES)}"


def _strings(value: Any) -> str | None:
    ok = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return None if ok else "a list of strings"


def _enum(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "a list of at least one value"


def _schemas(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "a list of at least one schema"


def _schema_map(value: Any) -> str | None:
    return None if isinstance(value, dict) else "an object of schemas"


def _count(value: Any) -> str | None:
    ok = (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf and value == int(value)
    )
    return None if ok else "a whole number from 0 on"


def _number(value: Any) -> str | None:
    return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"


def _limit(value: Any) -> str | None:
    """A boolean in the oldest drafts."""
    return None if isinstance(value, int | float) else "a number"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a string"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "type": _type,
    "required": _strings,
    "enum": _enum,
    "exclusiveMinimum": _limit,
    "exclusiveMaximum": _limit,
    **dict.fromkeys(_LISTS, _schemas),
    **dict.fromkeys(_MAPS, _schema_map),
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_TEXTS, _text),
    **dict.fromkeys(_FLAGS, _flag),
}


def types_of(schema: Any, root: Any, *, depth: int = 8) -> frozenset[str]:
    """The types that a value of this schema may have, as far as is easily told; all where it is not."""
    if not isinstance(schema, dict) or depth <= 0:
        return frozenset(TYPES)
    if "$ref" in schema:
        return types_of(resolve(str(schema["$ref"]), root), root, depth=depth - 1)
    if "type" in schema:
        named = schema["type"]
        return frozenset(named if isinstance(named, list) else [named])
    if "const" in schema or "enum" in schema:
        return frozenset(map(_json_type, schema.get("enum") or [schema.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return frozenset().union(*(types_of(item, root, depth=depth - 1) for item in schema[key]))
    return frozenset(TYPES)


def _json_type(value: Any) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _kind(value: Any) -> str:
    return {"array": "a list", "null": "null", "integer": "a number"}.get(_json_type(value), f"a {_json_type(value)}")


def is_plain_name(name: str) -> bool:
    """Whether a name can stand in markup as it is."""
    return re.fullmatch(r"[A-Za-z0-9_.:-]+", name) is not None
