"""From the text of an argument to JSON, by the tool's schema: for formats that carry no types on the wire.

The types of an argument are the union over ``type``, ``enum``, ``const``, ``anyOf``, ``oneOf``, ``allOf`` and ``$ref``. They are
tried in the order null, integer, number, boolean, object, array, string, and the first that fits wins. Text that fits none stays a
string, and without a schema an argument is one. Results are JSON *text*, so that numbers keep the digits that the model wrote.
"""

import json
from collections.abc import Iterator, Sequence, Set
from typing import Any
from urllib.parse import unquote

from kvbus_parsers import json_text, python_literals

_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
# What tools that were made from Python signatures call their types.
_TYPES = {"null", "integer", "number", "boolean", "object", "array", "string"}
_TYPE_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}


class Schema:
    """What is known about one value: the alternatives that its JSON schema allows, refs resolved. Without any, nothing is known."""

    def __init__(self, nodes: Sequence[object] = (), root: object = None) -> None:
        self._root = root
        self._alternatives = tuple(_alternatives(nodes, root))
        self._members: dict[str, Schema] = {}
        self._items: Schema | None = None
        self.types = frozenset(name for node in self._alternatives for name in _types(node)) & _TYPES

    @classmethod
    def of(cls, node: object) -> "Schema":
        """Reads a JSON schema, whose refs point into itself. Anything else but an object knows nothing."""
        return cls([node], node)

    def member(self, key: str) -> "Schema":
        """The schema of the value under ``key``."""
        if key not in self._members:
            nodes = [properties[key] for properties in self._properties() if key in properties]
            others = [node.get("additionalProperties") for node in self._alternatives]
            self._members[key] = Schema(nodes or others, self._root)
        return self._members[key]

    def declares(self, key: str) -> bool:
        """Whether the schema names the property ``key``."""
        return any(key in properties for properties in self._properties())

    @property
    def is_known(self) -> bool:
        """Whether there is a schema at all."""
        return bool(self._alternatives)

    def fits(self, members: Set[str]) -> bool:
        """Whether an object of these members has all required properties and none that the schema does not name."""
        required = [node["required"] for node in self._alternatives if isinstance(node.get("required"), list)]
        return all(map(self.declares, members)) and all(name in members for names in required for name in names)

    def item(self, index: int) -> "Schema":
        """The schema of the array's element ``index``."""
        first = [node["prefixItems"] for node in self._alternatives if isinstance(node.get("prefixItems"), list)]
        if nodes := [items[index] for items in first if index < len(items)]:
            return Schema(nodes, self._root)
        if self._items is None:
            self._items = Schema([node.get("items") for node in self._alternatives], self._root)
        return self._items

    def is_text(self, start: str) -> bool:
        """Whether a value that begins with ``start`` is a string however it goes on, so that it need not be awaited."""
        if not self.types:
            return True
        return "string" in self.types and not any(_may_fit(name, start) for name in self.types)

    def to_json(self, text: str) -> str:
        """The JSON text for an argument that the model wrote as ``text``."""
        fitting = self._fit(text)
        return json_text.quote(text) if fitting is None else fitting

    def _properties(self) -> Iterator[dict[str, Any]]:
        for node in self._alternatives:
            if isinstance(properties := node.get("properties"), dict):
                yield properties

    def _fit(self, text: str) -> str | None:
        """The JSON text of the first type that fits, ``None`` where only a string does."""
        types = self.types
        if "string" not in types:
            text = text.strip()
        if "null" in types and text.lower() == "null":
            return "null"
        if "integer" in types and (fitting := json_text.integer(text)) is not None:
            return fitting
        if "number" in types and (fitting := json_text.number(text)) is not None:
            return fitting
        if "boolean" in types and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if "object" in types and text.lstrip()[:1] == "{":
            return self._container(text, dict)
        if "array" in types and text.lstrip()[:1] in ("[", "("):
            return self._container(text, list)
        return None

    def _container(self, text: str, kind: type) -> str | None:
        try:
            try:
                value = json_text.loads(text)
            except ValueError:
                text = python_literals.json_text(text)
                value = json_text.loads(text)
            if not isinstance(value, kind):  # a Python set, or a value in parentheses
                return None
            coerced = self._coerced(value)
            return text if coerced is value else json_text.dumps(coerced)
        except (ValueError, RecursionError):  # not JSON at all, a number that JSON cannot hold, or nested too deeply
            return None

    def _coerced(self, value: Any) -> Any:
        """``value`` with the strings inside made what their schemas want; ``value`` itself where that changes nothing."""
        if not self._alternatives:
            return value
        if isinstance(value, dict):
            members = {key: self.member(key)._coerced(member) for key, member in value.items()}
            return members if any(members[key] is not value[key] for key in value) else value
        if isinstance(value, list):
            items = [self.item(index)._coerced(item) for index, item in enumerate(value)]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if isinstance(value, str) and "string" not in self.types:
            fitting = self._fit(value)
            return value if fitting is None else json.loads(fitting)
        return value


def _alternatives(nodes: Sequence[object], root: object) -> Iterator[dict[str, Any]]:
    """All nodes that speak about the same value as ``nodes``. Each is visited once, so cyclic refs end."""
    waiting = list(nodes)
    seen: set[int] = set()
    for node in waiting:  # grows on the way
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for combined in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := node.get(combined), list):
                waiting += choices
        if isinstance(ref := node.get("$ref"), str):
            waiting.append(_resolve(ref, root))


def _resolve(ref: str, root: object) -> object:
    """The node that a JSON pointer of this document names (``#/$defs/Port``); nothing for a ref to another document."""
    if not ref.startswith("#"):
        return None
    node = root
    for part in unquote(ref[1:]).split("/")[1:]:
        if not isinstance(node, dict):
            return None
        node = node.get(part.replace("~1", "/").replace("~0", "~"))
    return node


def _types(node: dict[str, Any]) -> Iterator[str]:
    declared = node.get("type")
    for name in declared if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            yield _TYPE_NAMES.get(name.lower(), name.lower())
    members = node.get("enum")
    for member in [*(members if isinstance(members, list) else ()), *([node["const"]] if "const" in node else ())]:
        yield _type_of(member)
    if declared is None and isinstance(node.get("properties"), dict):
        yield "object"
    if declared is None and isinstance(node.get("items"), dict):
        yield "array"


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    by_class = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return by_class.get(type(value), "object")


def _may_fit(name: str, start: str) -> bool:
    """Whether text that begins with ``start`` may become a ``name``. Looks at the first characters only; yes if in doubt."""
    if name == "null":
        return "null".startswith(start.lower())
    if name == "boolean":
        return any(word.startswith(start.lower()) for word in _BOOLEANS)
    if name in ("integer", "number"):
        return start[:1] in "+-.0123456789"
    if name in ("object", "array"):
        return start[:64].lstrip()[:1] in "{[("
    return False
