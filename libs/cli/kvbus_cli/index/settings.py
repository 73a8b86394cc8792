"""What all questions to indexers have in common."""

import sys
from typing import Annotated, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from kvbus_runtime import log as logs
from kvbus_runtime.settings import CommonSettings, Flag, parse_settings

FAILED = 1


class IndexToolSettings(CommonSettings, frozen=True, kw_only=True):
    """Where the bus is, and the form of the answer."""

    json: Annotated[bool, Flag("for tools")] = False
    log_level: Annotated[str, Flag("least severity logged", choices=("debug", "info", "warning", "error"))] = "error"


S = TypeVar("S", bound=IndexToolSettings)


def settings_of(kind: type[S], verb: str, description: str, argv: "list[str]") -> S:
    settings = parse_settings(kind, service="cli", prog=f"kvbus index {verb}", description=description, argv=argv)
    logs.configure(settings.log_level, settings.log_format)
    return settings


def failed(verb: str, problem: object) -> int:
    print(f"kvbus index {verb}: {problem}", file=sys.stderr)
    return FAILED


def print_json(value: object) -> None:
    """With the fields that have their default."""
    print(msgspec.json.encode(msgspec.to_builtins(value)).decode())


def print_table(table: Table, *lines: str) -> None:
    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(table)


def right_aligned(*names: str, first: int = 1) -> Table:
    """A table whose first columns hold names, the others numbers."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < first else "right")
    return table
