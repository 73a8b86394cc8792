"""The tree of prefixes in flight against a plain list of them."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus_blocks.chains import common_blocks
from kvbus_router.core.inflight import InFlightPrefixes
from kvbus_testkit.routing import chain

GRACE_S = 2.0


def packed(path: list[int]) -> bytes:
    """Keys that are chained, as those of blocks are: equal ones have equal prefixes."""
    numbers, above = [], 0
    for step in path:
        above = above * 3 + step + 1
        numbers.append(above)
    return chain(*numbers)


paths = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(packed)
requests = st.sampled_from("abcdefgh")
workers = st.sampled_from(["w1", "w2", "w3"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests, workers, paths),
        st.tuples(st.just("computed"), requests),
        st.tuples(st.just("discard"), requests),
        st.tuples(st.just("end"), requests),
        st.tuples(st.just("drop"), workers),
        st.tuples(st.just("wait"), st.floats(0, 1.5)),
    ),
    max_size=40,
)


@given(steps, paths)
def test_the_deepest_prefix_in_flight_of_each_worker_is_found(made: list[tuple], asked: bytes) -> None:  # type: ignore[type-arg]
    inflight = InFlightPrefixes(1 << 20, GRACE_S)
    known: dict[str, tuple[str, bytes, float | None]] = {}
    now = 0.0
    for step in made:
        match step:
            case ("add", request_id, worker_id, keys):
                inflight.add(request_id, worker_id, keys)
                known[request_id] = (worker_id, keys, None)
            case ("computed", request_id):
                inflight.computed(request_id, now)
                if request_id in known and known[request_id][2] is None:
                    known[request_id] = (*known[request_id][:2], now + GRACE_S)
            case ("discard", request_id):
                inflight.discard(request_id)
                known.pop(request_id, None)
            case ("end", request_id):
                inflight.discard_uncomputed(request_id)
                if request_id in known and known[request_id][2] is None:
                    del known[request_id]
            case ("drop", worker_id):
                inflight.drop_worker(worker_id)
                known = {request_id: entry for request_id, entry in known.items() if entry[0] != worker_id}
            case ("wait", seconds):
                now += seconds
        inflight.check_integrity()
    known = {request_id: entry for request_id, entry in known.items() if entry[2] is None or entry[2] > now}
    expected: dict[str, int] = {}
    for worker_id, keys, _ in known.values():
        depth = common_blocks(asked, keys)
        if depth > expected.get(worker_id, 0):
            expected[worker_id] = depth
    assert inflight.depths(asked, now) == expected
    inflight.check_integrity()
    assert len(inflight) == len(known)
    some = inflight.depths(asked, now, most=1)
    assert list(some.values()) == sorted(expected.values(), reverse=True)[:1]
