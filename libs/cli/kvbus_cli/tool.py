"""What the verbs that ask services have in common: where the bus is, and the form of the answer."""

import sys
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from kvbus_runtime import log as logs
from kvbus_runtime.settings import CommonSettings, Flag, parse_settings

FAILED = 1
"""Exit status: there is no answer."""

BAD_USAGE = 2
"""Exit status: nothing can be asked like that."""


class ToolSettings(CommonSettings, frozen=True, kw_only=True):
    """Where the bus is, and the form of the answer."""

    json: Annotated[bool, Flag("for tools")] = False
    log_level: Annotated[str, Flag("least severity logged", choices=("debug", "info", "warning", "error"))] = "error"


S = TypeVar("S", bound=ToolSettings)


def tool_settings(kind: type[S], verb: str, description: str, argv: Sequence[str]) -> S:
    """Of ``kvbus VERB``; from here on it logs as they say."""
    settings = parse_settings(kind, service="cli", prog=f"kvbus {verb}", description=description, argv=list(argv))
    logs.configure(settings.log_level, settings.log_format)
    return settings


def failed(verb: str, problem: object, status: int = FAILED) -> int:
    print(f"kvbus {verb}: {problem}", file=sys.stderr)
    return status


def print_json(value: object) -> None:
    print(msgspec.json.encode(_plain(value)).decode())


def _plain(value: object) -> object:
    """With the fields that have their default: the messages of the bus leave these out."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
