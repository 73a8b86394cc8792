"""Prompts and their differences for people. Pure: rich's texts, which are plain where the output is no terminal."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from kvbus_cli.prompt.difference import Difference, Side
from kvbus_protocols.prompt_view import PromptRule, PromptSegment, PromptView

KEY_CHARS = 12
BEGINNING_CHARS = 48
TEMPLATE = "template text"

_TOOL = re.compile(r"(?:.*\.)?tools\[\d+\](?:\.tools\[\d+\])*")
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE_ENDS = str.maketrans({"\n": "⏎", "\t": "→"})


def visible(text: str) -> str:
    """Without characters that a terminal would act on."""
    return _UNSEEN.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(text: str, limit: int | None = None) -> str:
    shown = visible(text.translate(_LINE_ENDS))
    return shown if limit is None or len(shown) <= limit else f"{shown[: limit - 1]}…"


# one prompt


def prompt_report(view: PromptView, *, blocks: bool) -> Iterator[Text]:
    """``blocks``: with a table of them."""
    yield Text(_title(view), style="bold")
    yield from _rules(view.rules, "")
    if view.not_shown:
        yield Text(f"not in the prompt: {', '.join(view.not_shown)}", style="yellow")
    yield Text("")
    for source, members in groupby(view.segments, key=lambda segment: _group(segment.source)):
        group = list(members)
        yield Text(_heading(source, group, view.block_size), style="cyan" if source else "dim")
        text = Text()
        for segment in group:
            text.append(visible(segment.text), style=_style(segment))
        if text.plain.endswith("\n"):
            text.right_crop()  # the line ends anyway
        yield text
    if blocks:
        yield Text("")
        yield from _block_table(view)


def _group(source: str | None) -> str | None:
    """A tool as a whole."""
    match = _TOOL.match(source or "")
    return match[0] if match is not None else source


def _style(segment: PromptSegment) -> str:
    if segment.special:
        return "bold magenta"
    return "" if segment.source is not None else "dim"


def _title(view: PromptView) -> str:
    model = view.model if view.model == view.served_model else f"{view.model} ({view.served_model})"
    return (
        f"{view.api} · {model} · {_count(view.count, 'token')}, {_count(len(view.blocks), 'block')} of {view.block_size}"
        f"{' · salted' if view.salted else ''}{f' · {view.harness}' if view.harness else ''}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _heading(source: str | None, group: Sequence[PromptSegment], block_size: int) -> str:
    what = source or TEMPLATE
    start = group[0].start
    if start is None or any(segment.tokens is None for segment in group):
        return f"── {what}"
    tokens = sum(segment.tokens or 0 for segment in group)
    first, last = start // block_size, max(start, start + tokens - 1) // block_size
    where = f"block {first}" if first == last else f"blocks {first}-{last}"
    return f"── {what} · {_count(tokens, 'token')} from {start:,} · {where}"


def _block_table(view: PromptView) -> Iterator[Text]:
    text = "".join(segment.text for segment in view.segments)
    yield Text(f"{'block':>6} {'token':>8}  {'key':<{KEY_CHARS}}  begins with", style="bold")
    for i, block in enumerate(view.blocks):
        begins = "" if block.char is None else one_line(text[block.char : block.char + BEGINNING_CHARS])
        yield Text(f"{i:>6} {i * view.block_size:>8,}  {block.key[:KEY_CHARS]:<{KEY_CHARS}}  {begins}".rstrip())


def _rules(rules: Sequence[PromptRule], who: str) -> Iterator[Text]:
    for rule in rules:
        source = f" {rule.source}" if rule.source else ""
        text = f": {one_line(rule.text, 100)}" if rule.text else ""
        yield Text(f"{who}{rule.rule}{source}{text}", style="yellow")


# two prompts


def difference_report(
    found: Difference, a: PromptView, b: PromptView, names: tuple[str, str], hints: Sequence[str]
) -> Iterator[Text]:
    for letter, name, view in (("A", names[0], a), ("B", names[1], b)):
        yield Text(f"{letter}  {name} · {_title(view)}", style="bold")
    yield Text("")
    yield Text(f"common prefix  {_count(found.common_tokens, 'token')} ({_shares(found.a.share, found.b.share)})")
    yield Text(
        f"               {_count(found.common_blocks, 'block')} ({_shares(found.a.block_share, found.b.block_share)})"
    )
    if not found.is_none:
        yield Text(f"they part at   character {found.char:,}, line {found.line:,} of the prompt")
        yield from _sides(found)
    if hints:
        yield Text("\nwhy", style="bold")
        yield from (Text(f"  · {one_line(hint)}") for hint in hints)
    if a.rules or b.rules:
        yield Text("\nwhat the server changed in the requests", style="bold")
        yield from _rules(a.rules, "  A ")
        yield from _rules(b.rules, "  B ")


def _shares(a: float, b: float) -> str:
    return f"{a:.1%} of A, {b:.1%} of B"


def _sides(found: Difference) -> Iterator[Text]:
    for letter, side in (("A", found.a), ("B", found.b)):
        yield Text(f"  {letter}  {side.place}", style="cyan")
    yield Text("")
    for letter, side, style in (("A", found.a, "red"), ("B", found.b, "green")):
        yield Text.assemble(f"  {letter}  …", one_line(found.common), ("┃", "bold"), (_goes_on(side), style))


def _goes_on(side: Side) -> str:
    return "(end)" if side.is_end else f"{one_line(side.text)}…"
