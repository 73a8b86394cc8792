"""From what a request says of its tokens to what holds for its blocks.

A block can be used again only by a prompt that goes on to its last token, so what is said of that token is said of the block:

    tokens      0 ........ 40 .............. 100          ranges [0, 40) pinned, [40, 100) normal; blocks of 16
    blocks      [0..16)[16..32)[32..48)[48..64) ..        pinned: blocks 0 and 1; normal: from block 2 on
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from kvbus_blocks.retention import Directive, directive
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import BlockDirective
from kvbus_wire.request import Retention
from kvbus_worker.engines.base import DirectiveRun, EngineError
from kvbus_worker.engines.said import Said

_END = 1 << 62


def block_runs(
    ranges: Sequence[Retention], prompt_tokens: int, block_size: int, *, tenant: str, now_s: float, limit: int
) -> tuple[DirectiveRun, ...]:
    """Directives of the blocks of a prompt, in order; of ranges that overlap the last one counts.

    Output is ephemeral where the end of the prompt is; nothing else is said of it. Raise EngineError for what makes no sense.
    """
    if len(ranges) > limit:
        raise _invalid(f"{len(ranges)} ranges, at most {limit} are taken")
    spans = [_span(entry, prompt_tokens, block_size, tenant, now_s) for entry in ranges]
    edges = sorted({edge for start, end, _ in spans for edge in (start, end)})
    runs: list[tuple[int, int, Directive]] = []
    for start, end in pairwise(edges):
        said = next((d for first, last, d in reversed(spans) if first <= start and end <= last), None)
        if said is None:
            continue
        if runs and runs[-1][1:] == (start, said):
            start = runs.pop()[0]
        runs.append((start, end, said))
    return tuple(DirectiveRun(start, None if end == _END else end, said) for start, end, said in runs)


def on_the_wire(directives: Iterable[Directive | None], now_s: float) -> tuple[BlockDirective, ...]:
    """Of one entry per block; None: nothing is said of it."""
    wire: list[BlockDirective] = []
    position = 0
    for said, group in groupby(directives):
        start, position = position, position + sum(1 for _ in group)
        if said is not None:
            expires_s = said.expires_s
            wire.append(
                BlockDirective(
                    start=start,
                    end=position,
                    kind=said.kind,
                    priority=said.priority,
                    ttl_s=None if expires_s is None else max(expires_s - now_s, 0.0),
                    tenant=said.tenant,
                )
            )
    return tuple(wire)


def worth_saying(directives: Iterable[Directive]) -> list[Directive | None]:
    """Without those that a new block has anyway."""
    return [None if said.is_plain else said for said in directives]


def pinned_positions(runs: Sequence[DirectiveRun], count: int) -> list[int]:
    """Which of the first ``count`` blocks are to be pinned."""
    return [i for i, said in enumerate(Said(runs).of(0, count)) if said is not None and said.kind == "pinned"]


def _span(
    entry: Retention, prompt_tokens: int, block_size: int, tenant: str, now_s: float
) -> tuple[int, int, Directive]:
    if entry.start < 0 or entry.end < 0:
        raise _invalid(f"a range from {entry.start} to {entry.end}")
    try:
        said = directive(entry.kind, entry.priority, entry.ttl_s, tenant, now_s)
    except ValueError as error:
        raise _invalid(str(error)) from error
    end = prompt_tokens if not entry.end else min(entry.end, prompt_tokens)
    to_the_end = end == prompt_tokens and said.kind == "ephemeral"
    return entry.start // block_size, _END if to_the_end else end // block_size, said


def _invalid(problem: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, f"retention: {problem}", param="retention")
