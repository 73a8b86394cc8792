"""How long requests will keep a worker busy: their expected output (``osl``), released as it is said.

A request that has said all that was expected goes on all the same. Then as much again is expected, and so on:

    expected 100:   said  0 .. 99    left 100 .. 1
                    said 100 .. 199  left 100 .. 1
                    said 200 .. 399  left 200 .. 1
"""

from collections.abc import Sequence


def output_left(expected: int, said: int) -> int:
    """Tokens that are still to come, at least 1."""
    expected = max(expected, 1)
    while said >= expected:
        expected *= 2
    return expected - said


def share_left(expected: int, said: int) -> float:
    """The part of its expected output that a request has still to say, above 0 and at most 1."""
    left = output_left(expected, said)
    return left / (left + said)


def steps_until_free(left: Sequence[int], active: int, slots: int, expected: int) -> float:
    """Decode steps until one of ``active`` requests more than the ``slots`` there are has one.

    ``left``: output that is left of those known, ascending; of the others about ``expected`` tokens are. Those without a slot begin
    when one becomes free: each full turn of the slots takes the mean of what is left.
    """
    if active < slots:
        return 0.0
    known = sorted([*left, *[expected] * (active - len(left))]) if len(left) < active else left
    turns, place = divmod(active - slots, slots)
    return known[place] + turns * sum(known) / len(known)
