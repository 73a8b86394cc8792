"""How many workers a request is compared on.

A lone router compares all workers of a cluster of up to ``exact_workers``. Of a larger one it takes ``candidates`` that hold the
most of the prompt, and as many at random (power of k): the best of 16 is worse than the best of 1,000 by a percent of the time to
the first token, and found out in a tenth of the time.

Of n workers, r routers take n/r at random each. Decisions need a moment to be heard: routers that compare the same workers in that
moment choose the same one. So each worker is compared by one of them, on average. Not fewer than four: below, chance costs more
than the herd. ``kvbus bench router`` measures both; the numbers are in ADR 12.
"""

FEWEST = 4


def drawn(workers: int, routers: int, exact_workers: int, candidates: int) -> int:
    """How many of the ``workers`` are taken at random, besides those that hold the most of the prompt."""
    if routers <= 1 and workers <= exact_workers:
        return workers
    share = -(-workers // max(routers, 1))
    return min(workers, max(FEWEST, min(share, candidates)))
