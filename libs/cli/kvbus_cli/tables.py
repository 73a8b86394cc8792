"""Tables for people. Whatever stands in them can be read and found by `grep`: a name is never cut to fit a width."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDEST = 10_000


def print_table(table: Table, *lines: str | Text) -> None:
    """The lines stand above it. On a narrow terminal the table's lines run on; the terminal breaks them."""
    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def right_aligned(*names: str, first: int = 1) -> Table:
    """A table whose first columns hold names, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < first else "right")
    return table
