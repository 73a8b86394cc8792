import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_blocks.retention import MAX_TTL_S, Directive
from kvbus_wire.kvbm import BlockDirective
from kvbus_wire.request import Retention
from kvbus_worker.core.requests import OpenRequest, unpinned
from kvbus_worker.core.retention import block_runs, on_the_wire, pinned_positions, worth_saying
from kvbus_worker.engines.base import DirectiveRun, EngineError
from kvbus_worker.engines.said import Said


def _runs(*ranges: Retention, prompt: int = 100, limit: int = 8) -> tuple[DirectiveRun, ...]:
    return block_runs(ranges, prompt, 16, tenant="t", now_s=1000.0, limit=limit)


def test_a_range_covers_the_blocks_whose_last_token_it_covers() -> None:
    runs = _runs(Retention(start=0, end=40, kind="pinned", ttl_s=300.0))
    assert runs == (DirectiveRun(0, 2, Directive("pinned", 0, 1300.0, "t")),)
    assert pinned_positions(runs, 6) == [0, 1]


def test_a_block_that_lies_in_two_ranges_is_the_second_ones() -> None:
    runs = _runs(Retention(start=0, end=40, priority=9), Retention(start=40, end=64, kind="ephemeral"))
    assert [(run.start, run.end, run.directive.kind) for run in runs] == [(0, 2, "normal"), (2, 4, "ephemeral")]


def test_of_ranges_that_overlap_the_last_one_counts() -> None:
    runs = _runs(
        Retention(priority=1), Retention(start=32, end=64, priority=2), Retention(start=48, end=64, priority=1)
    )
    assert [(run.start, run.end, run.directive.priority) for run in runs] == [(0, 2, 1), (2, 3, 2), (3, 6, 1)]


def test_output_is_ephemeral_where_the_end_of_the_prompt_is() -> None:
    assert _runs(Retention(kind="ephemeral"))[-1].end is None
    assert _runs(Retention(kind="pinned"))[-1].end == 6
    assert _runs(Retention(end=32, kind="ephemeral"))[-1].end == 2


def test_a_range_without_a_whole_block_says_nothing() -> None:
    assert _runs(Retention(start=0, end=15, kind="pinned"), Retention(start=100, end=200, priority=1)) == ()


@pytest.mark.parametrize(
    "retention",
    [
        Retention(kind="for ever"),
        Retention(start=-1),
        Retention(end=-1),
        Retention(ttl_s=math.nan),
        Retention(ttl_s=-1.0),
    ],
)
def test_what_makes_no_sense_is_refused(retention: Retention) -> None:
    with pytest.raises(EngineError) as refused:
        _runs(retention)
    assert refused.value.reply.param == "retention"


def test_more_ranges_than_the_limit_are_refused() -> None:
    assert len(_runs(*[Retention(start=16 * i, end=16 * i + 16, priority=i) for i in range(4)], limit=4)) == 4
    with pytest.raises(EngineError):
        _runs(*[Retention(priority=i) for i in range(5)], limit=4)


@pytest.mark.parametrize("ttl_s", [1e300, math.inf])
def test_a_time_without_end_has_one(ttl_s: float) -> None:
    assert _runs(Retention(kind="pinned", ttl_s=ttl_s))[0].directive.expires_s == 1000.0 + MAX_TTL_S


def test_directives_of_blocks_go_on_the_wire_as_ranges() -> None:
    high, lease = Directive(priority=5), Directive("pinned", 0, 1060.0, "t")
    assert on_the_wire([None, high, high, None, lease], 1000.0) == (
        BlockDirective(1, 3, "normal", 5),
        BlockDirective(4, 5, "pinned", 0, 60.0, "t"),
    )
    assert worth_saying([Directive(), high]) == [None, high]


@given(
    st.lists(st.tuples(st.integers(0, 130), st.integers(0, 130), st.integers(0, 3)), max_size=6),
    st.integers(1, 120),
)
def test_each_block_has_what_was_said_last_of_its_last_token(ranges: list[tuple[int, int, int]], prompt: int) -> None:
    runs = _runs(*[Retention(start=s, end=e, priority=p) for s, e, p in ranges], prompt=prompt)
    said = Said(runs)
    blocks = prompt // 16
    expected: list[int | None] = []
    for block in range(blocks):
        token = block * 16 + 15
        covering = [p for s, e, p in ranges if s <= token < (min(e, prompt) if e else prompt)]
        expected.append(covering[-1] if covering else None)
    assert [d.priority if d else None for d in said.of(0, blocks)] == expected
    assert [d.priority if (d := said[i]) else None for i in range(blocks)] == expected
    pieces = said.pieces(0, blocks)
    assert [d.priority if d else None for s, e, d in pieces for _ in range(s, e)] == expected
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))


def test_blocks_are_unpinned_when_neither_g1_nor_kvbm_pins_them() -> None:
    keys = tuple(bytes([i]) * 16 for i in range(3))
    request = OpenRequest(
        request_id="r",
        frontend_id="f",
        prompt_tokens=48,
        resumed=0,
        accepted_at=0.0,
        to_pin=tuple(enumerate(keys)),
    )
    in_g1 = [Directive("pinned"), Directive(), Directive()]
    assert unpinned(request, in_g1, 3) == 2
    request.unpinned_below = frozenset(keys[:2])
    assert unpinned(request, in_g1, 3) == 1
    assert unpinned(request, in_g1, 1) == 2, "what was just computed kvbm had not seen when it was asked"
