"""`kvbus bench router`: what a placement costs, and how evenly replicas spread requests, with the router's own core.

    placement   processor time of one request: 64 and 1,000 workers; each prompt of 2,000 blocks shares 50 to 400 with what every
                worker holds and 1,900 with what one of them holds; 300 requests are on their way
    herding     8 requests come at the same moment, again and again, to as many routers as there are, for 64 workers at 70 % load.
                Decisions are heard after 5 ms. Backlog: seconds of work that wait at a worker, right after such a moment

Fields of the JSON file:
    kvbus_version, python
    place_64_*, place_1000_*                        p50_us, p99_us: one placement
    herding                                         a row per number of routers and way of choosing:
        routers, delay_s
        compares, shares                            all workers, or some (as routers do); whether they tell their decisions
        ttft_mean_s, ttft_p99_s                     to the first token
        same_worker                                 of the requests of one moment, those on one worker at most; mean over all
        backlog_max_s, backlog_peak                 the largest backlog, and that over the mean one; means over all moments
"""

import argparse
import platform
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random

import msgspec

from kvbus_replay.simulation.bare_workers import MODEL, load_of, worker_of
from kvbus_replay.simulation.herding import Herding, Scene
from kvbus_router.core.dispatcher import Dispatcher, Placed
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.policies import KvPolicy
from kvbus_runtime.arguments import ArgumentParser
from kvbus_wire.indexer import Match
from kvbus_wire.request import SessionRef
from kvbus_wire.router import RouteRequest

BLOCKS = 2000
SHARED_BLOCKS = 400
SESSIONS = 200
UNDER_WAY = 300
LATER = 1e9


class Figures(msgspec.Struct):
    kvbus_version: str
    python: str
    place_64_p50_us: float
    place_64_p99_us: float
    place_1000_p50_us: float
    place_1000_p99_us: float
    herding: list[Herding]


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="kvbus bench router",
        description="Measure what a placement costs and how evenly replicas spread requests.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--placements", type=int, default=1500, help="measured placements per size of the cluster (1500)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated time of each way of choosing (10)")
    arguments = parser.parse_args(argv)
    figures = measure(arguments.placements, arguments.seconds)
    for name in figures.__struct_fields__[:-1]:
        print(f"{name:<24}{getattr(figures, name):>12}")
    print("\nrouters  compares  shares   TTFT mean    TTFT p99   same worker  largest backlog  largest/mean")
    for row in figures.herding:
        print(
            f"{row.routers:>7}  {row.compares:<8}  {'yes' if row.shares else 'no':<6}{row.ttft_mean_s * 1000:>9.0f} ms"
            f"{row.ttft_p99_s * 1000:>9.0f} ms{row.same_worker:>14.2f}{row.backlog_max_s:>15.2f} s{row.backlog_peak:>14.2f}"
        )
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


def measure(placements: int, seconds: float) -> Figures:
    small, large = placement_us(64, placements), placement_us(1000, placements)
    scenes = [
        Scene(routers=routers, everyone=everyone, shares=shares, seconds=seconds)
        for routers, everyone, shares in (
            (1, True, True),
            (2, True, True),
            (2, False, True),
            (8, True, True),
            (8, False, False),
            (8, False, True),
        )
    ]
    return Figures(
        kvbus_version=version("kvbus"),
        python=platform.python_version(),
        place_64_p50_us=_quantile(small, 0.5),
        place_64_p99_us=_quantile(small, 0.99),
        place_1000_p50_us=_quantile(large, 0.5),
        place_1000_p99_us=_quantile(large, 0.99),
        herding=[scene.run() for scene in scenes],
    )


def placement_us(workers: int, placements: int) -> list[float]:
    """Processor time of each placement, ascending."""
    rng = Random(1)
    dispatcher = Dispatcher("bench", Limits(), Weights(), KvPolicy(), rng)
    ids = [f"worker-{number}" for number in range(workers)]
    for number, worker_id in enumerate(ids):
        dispatcher.joined(worker_of(worker_id, host=f"host-{number // 8}"), 0.0)
        dispatcher.load_report(load_of(worker_id, rng.randrange(40), rng.randrange(20_000)), 0.0)
    shared = [Match(instance_id=w, tier="g1", depth=rng.choice((50, 100, SHARED_BLOCKS))) for w in ids]
    prefix = rng.randbytes(16 * SHARED_BLOCKS)
    prompts = [prefix + rng.randbytes(16 * (BLOCKS - SHARED_BLOCKS)) for _ in range(SESSIONS)]
    under_way: deque[str] = deque()
    times = []
    for number in range(placements):
        session, now = number % SESSIONS, number * 0.001
        own = session * 7 % workers
        matches = [*shared[:own], Match(instance_id=ids[own], tier="g1", depth=BLOCKS - 100), *shared[own + 1 :]]
        request = RouteRequest(
            request_id=f"r{number}",
            model=MODEL,
            keys=prompts[session],
            prompt_tokens=BLOCKS * 16 + 10,
            max_tokens=500,
            deadline_ms=0,
            session=SessionRef(id=f"session-{session}"),
        )
        started = time.thread_time_ns()
        outcome, _ = dispatcher.submit(request, matches, LATER, now)
        times.append((time.thread_time_ns() - started) / 1000)
        if isinstance(outcome, Placed):
            dispatcher.first_token(request.request_id, now)
            under_way.append(request.request_id)
        if len(under_way) > UNDER_WAY:
            dispatcher.finished(under_way.popleft())
    return sorted(times)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1)
