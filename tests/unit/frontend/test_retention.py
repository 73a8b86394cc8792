"""What a request says of retention becomes token ranges of its prompt, without overlaps, and what was stored is told truthfully."""

import pytest

from kvbus_frontend.core.retention import Lease, cache_time_s, created, retention_plan
from kvbus_protocols.conversation import CacheBreakpoint
from kvbus_protocols.extensions import KvbusExt, Session
from kvbus_protocols.extensions import Retention as Asked
from kvbus_protocols.generation import GenerationRequest
from kvbus_wire.request import Retention


def asks(*retention: Asked, session: Session | None = None, **fields: str) -> GenerationRequest:
    return GenerationRequest(model="m", kvbus=KvbusExt(retention=list(retention), session=session), **fields)  # type: ignore[arg-type]


def ranges(request: GenerationRequest, *points: tuple[int, float | None], **how: int) -> tuple[Retention, ...]:
    """``points``: tokens and time of cache breakpoints."""
    given = {"block_size": 4, "prompt_tokens": 400, **how}
    found = [(CacheBreakpoint(0, ttl_s), end) for end, ttl_s in points]
    return retention_plan(request, points=found, **given).ranges  # type: ignore[arg-type]


def test_a_request_that_says_nothing_has_no_directives() -> None:
    assert ranges(GenerationRequest(model="m")) == ()


def test_ranges_of_the_extension_are_taken_over_and_the_later_one_holds() -> None:
    asked = asks(Asked(priority=1), Asked(start_token=16, end_token=32, priority=3, ttl_s=9.0, kind="ephemeral"))
    assert ranges(asked) == (
        Retention(end=16, priority=1),
        Retention(start=16, end=32, priority=3, ttl_s=9.0, kind="ephemeral"),
        Retention(start=32, priority=1),
    )


def test_of_several_breakpoints_each_token_is_kept_for_the_longest_time() -> None:
    assert ranges(asks(), (100, 3600.0), (200, None), (300, 300.0), (0, 3600.0)) == (
        Retention(end=100, ttl_s=3600.0, kind="pinned"),
        Retention(start=100, end=300, ttl_s=300.0, kind="pinned"),
    )


def test_only_whole_blocks_before_a_breakpoint_are_kept() -> None:
    assert ranges(asks(), (103, 300.0), (3, 3600.0)) == (Retention(end=100, ttl_s=300.0, kind="pinned"),)


def test_system_prompt_and_tools_have_a_priority_also_when_they_are_pinned() -> None:
    assert ranges(asks(), (200, 300.0), head=40, head_priority=50) == (
        Retention(end=40, priority=50, ttl_s=300.0, kind="pinned"),
        Retention(start=40, end=200, ttl_s=300.0, kind="pinned"),
    )


def test_a_range_without_a_priority_keeps_that_of_the_system_prompt() -> None:
    assert ranges(asks(Asked(ttl_s=60.0, kind="pinned")), head=40, head_priority=50) == (
        Retention(end=40, priority=50, ttl_s=60.0, kind="pinned"),
        Retention(start=40, ttl_s=60.0, kind="pinned"),
    )


def test_everything_of_an_ephemeral_session_is_ephemeral_whatever_the_client_marks() -> None:
    session = asks(session=Session("s", ephemeral=True))
    plan = retention_plan(
        session, block_size=4, prompt_tokens=400, points=[(CacheBreakpoint(0), 100)], head=40, head_priority=50
    )
    assert plan.ranges == (Retention(kind="ephemeral"),)
    assert plan.leases == ()


def test_the_last_request_of_a_session_keeps_system_prompt_and_tools_only() -> None:
    assert ranges(asks(session=Session("s", final=True)), head=40, head_priority=50) == (
        Retention(end=40, priority=50),
        Retention(start=40, kind="ephemeral"),
    )


def test_a_history_that_is_condensed_loses_its_value_and_its_pins() -> None:
    assert ranges(asks(), (200, 300.0), head=40, head_priority=50, condensing=True) == (
        Retention(end=40, priority=50, ttl_s=300.0, kind="pinned"),
        Retention(start=40, kind="ephemeral"),
    )


def test_a_prompt_cache_key_raises_the_priority_and_a_retention_time_pins_the_prompt() -> None:
    assert ranges(asks(prompt_cache_key="k")) == (Retention(priority=20),)
    assert ranges(asks(prompt_cache_retention="in_memory")) == ()
    assert ranges(asks(prompt_cache_retention="24h"), prompt_tokens=403) == (
        Retention(end=400, ttl_s=86_400.0, kind="pinned"),
    )


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), ("in-memory", None), ("90s", 90.0), ("2d", 172_800.0), ("9999999d", 2_592_000.0)],
)
def test_retention_times_are_read_and_bounded(given: str | None, seconds: float | None) -> None:
    assert cache_time_s(given) == seconds


LEASES = (Lease(100, 3600.0), Lease(300, 300.0))


@pytest.mark.parametrize(
    ("cached", "unpinned", "told"),
    [
        (0, 0, (200, 100)),
        (40, 0, (200, 60)),
        (100, 0, (200, 0)),
        (250, 0, (50, 0)),
        (400, 0, (0, 0)),
        (0, 50, (150, 100)),
        (0, 220, (0, 80)),
        (90, 300, (0, 0)),
        (0, 9999, (0, 0)),
    ],
)
def test_what_was_newly_stored_is_told_by_its_time_and_never_more(
    cached: int, unpinned: int, told: tuple[int, int]
) -> None:
    assert created(LEASES, cached=cached, prompt=400, unpinned=unpinned) == told


def test_a_longer_lease_behind_a_shorter_one_counts_as_the_longer() -> None:
    assert created([Lease(100, 300.0), Lease(200, 3600.0)], cached=0, prompt=400, unpinned=0) == (0, 200)


def test_nothing_is_stored_behind_the_prompt() -> None:
    assert created(LEASES, cached=0, prompt=120, unpinned=0) == (20, 100)
