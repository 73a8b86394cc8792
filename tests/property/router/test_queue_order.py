"""The order of the queue, known on arrival, against sorting by the score of the moment."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus_blocks.chains import common_blocks
from kvbus_router.core.queue import WaitingQueue

AGING = 0.25

arrivals = st.lists(st.tuples(st.integers(0, 2), st.integers(-4, 4), st.integers(0, 40)), max_size=20)


@given(arrivals, st.integers(0, 100))
def test_the_order_equals_that_of_the_aged_scores_at_any_moment(
    waiting: list[tuple[int, int, int]], later: int
) -> None:
    queue: WaitingQueue[int] = WaitingQueue(100, AGING, overdue_s=1e9)
    waiting = sorted(waiting, key=lambda one: one[2])
    for number, (strict, priority, at) in enumerate(waiting):
        queue.add(str(number), number, strict_priority=strict, priority=priority, now=float(at))
    queue.check_integrity()
    now = 40 + later

    def score(number: int) -> tuple[int, float, int]:
        strict, priority, at = waiting[number]
        return (-strict, -(priority + (now - at) * AGING), number)

    assert [w.item for w in queue.in_order(float(now))] == sorted(range(len(waiting)), key=score)


@given(st.lists(st.booleans(), max_size=60), st.lists(st.booleans(), max_size=60))
def test_the_common_part_of_chains_equals_a_walk(one: list[bool], other: list[bool]) -> None:
    def chain(branches: list[bool]) -> bytes:
        keys, place = [], 1
        for branch in branches:
            place = 2 * place + branch
            keys.append(place.to_bytes(16, "little"))
        return b"".join(keys)

    walked = 0
    while walked < min(len(one), len(other)) and one[walked] == other[walked]:
        walked += 1
    assert common_blocks(chain(one), chain(other)) == walked
