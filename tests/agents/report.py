"""What each scenario came to, as a table."""

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """The cached share of one request, and how much it had to be. ``reusable``: the share that the prompt before it has, too, where
    that is known: more cannot be found."""

    what: str
    share: float
    at_least: float | None
    reusable: float | None = None

    def __str__(self) -> str:
        possible = f" of {self.reusable:.1%}" if self.reusable is not None else ""
        wanted = f" (>= {self.at_least:.0%})" if self.at_least is not None else ""
        return f"{self.what} {self.share:.1%}{possible}{wanted}"


class Row(NamedTuple):
    """``prompt_tokens``: of the last request."""

    client: str
    scenario: str
    outcome: str
    turns: int
    calls: int
    prompt_tokens: int
    shares: tuple[Share, ...]


_HEAD = ("client", "scenario", "outcome", "turns", "calls", "prompt", "cached share")


def table(rows: Sequence[Row]) -> str:
    """A Markdown table whose columns line up."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    ruler = tuple("-" * width for width in widths)
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (_HEAD, ruler, *cells[1:])
    ]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    shares = ", ".join(str(share) for share in row.shares)
    return (row.client, row.scenario, row.outcome, str(row.turns), str(row.calls), str(row.prompt_tokens), shares)
