"""How long parts of a prompt are worth keeping: what the client says, and what the conversation tells, in tokens.

layers, each over the ones before it:
head (system prompt and tools)      a priority
prompt_cache_key                    a priority for all of it
ephemeral session                   all ephemeral
final session, condensed history    ephemeral behind the head
kvbus.retention                     as it says
cache_control, prompt_cache_retention   pinned, with the priority of what lies below
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from kvbus_protocols.conversation import CacheBreakpoint
from kvbus_protocols.extensions import Session
from kvbus_protocols.generation import GenerationRequest
from kvbus_wire.request import Retention

DEFAULT_TTL_S = 300.0
"""Of a cache breakpoint that names none, as in the Messages API."""
HOUR_S = 3600.0
LONGEST_TTL_S = 30 * 86_400.0
CACHE_KEY_PRIORITY = 20
_END = 2**31
"""Behind every prompt."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Lease(msgspec.Struct, frozen=True):
    """The first ``end`` tokens of the prompt are to stay for ``ttl_s``."""

    end: int
    ttl_s: float


class RetentionPlan(msgspec.Struct, frozen=True):
    """``ranges``: in order, without overlaps. ``leases``: what was asked for by way of the APIs, by its end."""

    ranges: tuple[Retention, ...] = ()
    leases: tuple[Lease, ...] = ()


class _Value(msgspec.Struct, frozen=True):
    kind: str = "normal"
    priority: int = 0
    ttl_s: float | None = None


_Layer = tuple[int, int, _Value]


def retention_plan(
    request: GenerationRequest,
    *,
    block_size: int,
    prompt_tokens: int,
    head: int = 0,
    head_priority: int = 0,
    points: Sequence[tuple[CacheBreakpoint, int]] = (),
    condensing: bool = False,
) -> RetentionPlan:
    """``head``: tokens of system prompt and tools. ``points``: breakpoints, with the number of prompt tokens that each covers;
    what they keep are whole blocks. ``condensing``: the answer is to take the place of what was said."""
    kvbus = request.kvbus
    session = kvbus.session if kvbus is not None else None
    limit = (head if condensing else prompt_tokens) // block_size * block_size
    leases = () if session is not None and session.ephemeral else _leases(request, points, block_size, limit)
    values = {0: _Value()}  # by where they begin
    for layer in _automatic(request, session, head, head_priority, condensing=condensing):
        _lay(values, layer)
    for kept in (kvbus.retention or ()) if kvbus is not None else ():
        start, end = kept.start_token or 0, kept.end_token or _END
        _lay(values, (start, end, _Value(kept.kind, -1 if kept.priority is None else kept.priority, kept.ttl_s)))
    for lease in leases:
        _lay(values, (0, lease.end, _Value("pinned", -1, lease.ttl_s)))
    return RetentionPlan(tuple(_ranges(values)), leases)


def created(leases: Iterable[Lease], *, cached: int, prompt: int, unpinned: int) -> tuple[int, int]:
    """Tokens that were newly stored to be kept, for less than an hour and for an hour or more. ``unpinned``: so many could not be
    kept; they count as the last ones, since that is where a share ends."""
    longest, short = 0, 0
    for lease in leases:
        end = min(lease.end, prompt)
        longest = max(longest, end if lease.ttl_s >= HOUR_S else 0)
        short = max(short, end)
    all_end = max(0, short - unpinned)
    long_tokens = max(0, min(longest, all_end) - cached)
    return max(0, all_end - max(cached, longest)), long_tokens


def cache_time_s(given: str | None) -> float | None:
    """Of a `prompt_cache_retention`; None: no time is asked for."""
    if given is None or given.startswith("in"):
        return None
    return min(LONGEST_TTL_S, float(int(given[:-1]) * _UNITS_S[given[-1]]))


def _automatic(
    request: GenerationRequest, session: Session | None, head: int, head_priority: int, *, condensing: bool
) -> list[_Layer]:
    if session is not None and session.ephemeral:
        return [(0, _END, _Value("ephemeral"))]
    layers: list[_Layer] = []
    if request.prompt_cache_key:
        layers.append((0, _END, _Value(priority=CACHE_KEY_PRIORITY)))
    if condensing or (session is not None and session.final):
        layers.append((head, _END, _Value("ephemeral")))
    if head and head_priority:
        layers.append((0, head, _Value(priority=head_priority)))
    return layers


def _leases(
    request: GenerationRequest,
    points: Sequence[tuple[CacheBreakpoint, int]],
    block_size: int,
    limit: int,
) -> tuple[Lease, ...]:
    """None of them ends behind ``limit``: what is about to be replaced is not worth it, whatever the client marks in every
    request. An ephemeral session has none at all."""
    asked = [(end, DEFAULT_TTL_S if point.ttl_s is None else point.ttl_s) for point, end in points]
    if (ttl_s := cache_time_s(request.prompt_cache_retention)) is not None:
        asked.append((limit, ttl_s))
    longest: dict[int, float] = {}
    for end, ttl_s in asked:
        whole = min(end, limit) // block_size * block_size
        if whole:
            longest[whole] = max(ttl_s, longest.get(whole, 0.0))
    return tuple(Lease(end, ttl_s) for end, ttl_s in sorted(longest.items()))


def _lay(values: dict[int, _Value], layer: _Layer) -> None:
    """Over what is there. Priority -1: that of what lies below; of two pins the longer one holds."""
    start, end, value = layer
    for cut in (start, end):
        if cut not in values and cut < _END:
            values[cut] = values[max(at for at in values if at < cut)]
    for at, below in values.items():
        if start <= at < end:
            values[at] = _over(below, value)


def _over(below: _Value, value: _Value) -> _Value:
    priority = below.priority if value.priority < 0 else value.priority
    ttl_s = value.ttl_s
    if below.kind == value.kind == "pinned" and below.ttl_s is not None and ttl_s is not None:
        ttl_s = max(below.ttl_s, ttl_s)
    return _Value(value.kind, priority, ttl_s)


def _ranges(values: dict[int, _Value]) -> Iterable[Retention]:
    """Without those that say nothing."""
    cuts = sorted(at for at in values)
    begins = [at for i, at in enumerate(cuts) if not i or values[at] != values[cuts[i - 1]]]
    for start, end in pairwise([*begins, 0]):
        value = values[start]
        if value != _Value():
            yield Retention(start=start, end=end, priority=value.priority, ttl_s=value.ttl_s, kind=value.kind)
