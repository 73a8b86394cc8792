"""Ranges of retention, token by token: in order, without overlaps, and each token has what was asked for it."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.retention import RetentionPlan, created, retention_plan
from kvbus_protocols.conversation import CacheBreakpoint
from kvbus_protocols.extensions import KvbusExt, Retention, Session
from kvbus_protocols.generation import GenerationRequest

BLOCK = 4
PROMPT = 40
Worth = tuple[str, int, float | None]

TTLS = st.sampled_from([60.0, 300.0, 3600.0])
RANGES = st.builds(
    Retention,
    start_token=st.none() | st.integers(0, 20),
    end_token=st.none() | st.integers(21, 60),
    priority=st.none() | st.integers(0, 3),
    ttl_s=TTLS,
    kind=st.sampled_from(["pinned", "normal", "ephemeral"]),
)
POINTS = st.lists(
    st.tuples(st.builds(CacheBreakpoint, turn=st.just(0), ttl_s=st.none() | TTLS), st.integers(0, PROMPT))
)


def naive(
    request: GenerationRequest,
    session: Session,
    points: list[tuple[CacheBreakpoint, int]],
    head: int,
    *,
    condensing: bool,
    at: int,
) -> Worth:
    kind, priority, ttl_s = "normal", 20 if request.prompt_cache_key else 0, None
    if session.ephemeral:
        kind, priority = "ephemeral", 0
    elif at < head:
        priority = 50
    elif condensing or session.final:
        kind, priority = "ephemeral", 0
    assert request.kvbus is not None
    lays = [
        (kept.start_token or 0, kept.end_token or 1 << 40, kept.kind, kept.priority, kept.ttl_s)
        for kept in request.kvbus.retention or ()
    ]
    limit = head if condensing else PROMPT
    leases = [] if session.ephemeral else points
    lays += [
        (0, min(end, limit) // BLOCK * BLOCK, "pinned", None, point.ttl_s or 300.0)
        for point, end in sorted(leases, key=lambda p: p[1])
    ]
    for start, end, new_kind, new_priority, new_ttl_s in lays:
        if start <= at < end:
            longest = kind == new_kind == "pinned"
            ttl_s = max(ttl_s or 0.0, new_ttl_s or 0.0) if longest else new_ttl_s
            kind, priority = new_kind, priority if new_priority is None else new_priority
    return kind, priority, ttl_s


@given(
    ranges=st.lists(RANGES, max_size=4),
    points=POINTS,
    head=st.integers(0, PROMPT),
    ephemeral=st.booleans(),
    final=st.booleans(),
    condensing=st.booleans(),
    key=st.sampled_from([None, "k"]),
)
def test_each_token_has_what_was_asked_for_it(
    ranges: list[Retention],
    points: list[tuple[CacheBreakpoint, int]],
    head: int,
    ephemeral: bool,
    final: bool,
    condensing: bool,
    key: str | None,
) -> None:
    session = Session("s", final=final, ephemeral=ephemeral)
    request = GenerationRequest(model="m", prompt_cache_key=key, kvbus=KvbusExt(session=session, retention=ranges))
    plan = retention_plan(
        request,
        block_size=BLOCK,
        prompt_tokens=PROMPT,
        head=head,
        head_priority=50,
        points=points,
        condensing=condensing,
    )
    ends = [kept.end or 1 << 40 for kept in plan.ranges]
    assert all(end <= after.start for end, after in zip(ends, plan.ranges[1:], strict=False))
    for at in range(PROMPT + 30):
        found = [
            (kept.kind, kept.priority, kept.ttl_s)
            for kept, end in zip(plan.ranges, ends, strict=True)
            if kept.start <= at < end
        ]
        assert (found or [("normal", 0, None)]) == [naive(request, session, points, head, condensing=condensing, at=at)]
    _is_truthful(plan)


def _is_truthful(plan: RetentionPlan) -> None:
    """Nothing is told as written that is not pinned."""
    pinned = max((lease.end for lease in plan.leases), default=0)
    for cached in range(0, PROMPT, 5):
        assert sum(created(plan.leases, cached=cached, prompt=PROMPT, unpinned=0)) == max(0, pinned - cached)
