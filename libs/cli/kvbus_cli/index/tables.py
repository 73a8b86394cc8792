"""Answers of indexers for people."""

from rich.console import Console
from rich.table import Table


def print_table(table: Table, *lines: str) -> None:
    """The lines stand above it."""
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
