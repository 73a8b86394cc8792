"""The text of a configuration file, alone or merged into what is there already.

Foreign settings stay: objects are merged key by key, lists entry by entry (entries with one ``id`` and ``baseUrl`` are one), and
only values that the new settings name are replaced.
"""

import json
import re
import tomllib
from collections.abc import Mapping, MutableMapping
from typing import Any

import tomlkit
import tomlkit.exceptions

from kvbus_cli.connect.configuration import ConfigFile

_BARE = re.compile(r"[\w./:@+=${}-]*")


class CannotMerge(Exception):
    """The text that is there cannot be read, or has something else where settings belong."""


def text_of(file: ConfigFile) -> str:
    return merged_text("", file)


def merged_text(existing: str, file: ConfigFile) -> str:
    """Raise CannotMerge."""
    existing = "" if file.owned else existing
    match file.format:
        case "json":
            return _merged_json(existing, file.content)
        case "toml":
            return _merged_toml(existing, file.content)
        case "env":
            return "".join(f"{name}={_env_value(value)}\n" for name, value in file.content.items())


def _env_value(value: str) -> str:
    if _BARE.fullmatch(value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _merged_json(existing: str, content: Mapping[str, Any]) -> str:
    try:
        settings = json.loads(existing) if existing.strip() else {}
    except (ValueError, RecursionError) as error:
        raise CannotMerge(f"is no plain JSON ({error})") from error
    if not isinstance(settings, dict):
        raise CannotMerge("is JSON, but no object")
    _merge(settings, content, "")
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace").decode()  # half a surrogate pair stays the escape that it was


def _merged_toml(existing: str, content: Mapping[str, Any]) -> str:
    """Comments and layout stay."""
    try:
        document = tomlkit.parse(existing)
    except tomlkit.exceptions.ParseError as error:
        raise CannotMerge(f"is no TOML ({error})") from error
    _merge(document, content, "")
    text = tomlkit.dumps(document)
    if not _holds(tomllib.loads(text), content):
        raise CannotMerge("has tables in an order that is not understood")
    return text


def _holds(settings: Any, content: Any) -> bool:
    """Whether all of the content is there."""
    if isinstance(content, Mapping):
        return isinstance(settings, Mapping) and all(
            key in settings and _holds(settings[key], value) for key, value in content.items()
        )
    return isinstance(content, list) or bool(settings == content)


def _merge(settings: MutableMapping[str, Any], more: Mapping[str, Any], where: str) -> None:
    for key, value in more.items():
        path = f"{where}.{key}" if where else key
        present = settings.get(key)
        if isinstance(value, Mapping):
            if present is None:  # as a whole: what tomlkit gives for a new table may be a copy
                settings[key] = _copied(value)
            elif isinstance(present, MutableMapping):
                _merge(present, value, path)
            else:
                raise CannotMerge(f"has something else than an object at {path}")
        elif isinstance(value, list) and present is not None:
            if not isinstance(present, list):
                raise CannotMerge(f"has something else than a list at {path}")
            for entry in value:
                _merge_entry(present, entry)
        else:
            settings[key] = value


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _merge_entry(entries: list[Any], new: Any) -> None:
    for index, entry in enumerate(entries):
        if entry == new or (_identity(new) is not None and _identity(entry) == _identity(new)):
            entries[index] = new
            return
    entries.append(new)


def _identity(entry: Any) -> tuple[object, object] | None:
    return (entry["id"], entry.get("baseUrl")) if isinstance(entry, Mapping) and "id" in entry else None
