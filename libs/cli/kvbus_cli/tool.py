"""What the verbs that ask services have in common: where the bus is, and the form of the answer."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec

from kvbus_runtime import log as logs
from kvbus_runtime.settings import CommonSettings, Flag, parse_settings, specs_of

PREFIX = "cli"
"""Of the variables of these verbs: ``KVBUS_CLI_...``."""

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
    env = own_variables(kind, os.environ)
    settings = parse_settings(
        kind, service=PREFIX, prog=f"kvbus {verb}", description=description, argv=list(argv), env=env
    )
    logs.configure(settings.log_level, settings.log_format)
    return settings


def own_variables(kind: type[S], env: Mapping[str, str]) -> dict[str, str]:
    """Without those that only other tools have: one prefix is that of all, so that ``KVBUS_CLI_URL`` serves each that needs it."""
    own = {spec.variable(PREFIX) for spec in specs_of(kind).values()}
    shared = f"KVBUS_{PREFIX}_".upper()
    return {name: value for name, value in env.items() if name in own or not name.startswith(shared)}


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
