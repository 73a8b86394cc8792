"""`kvbus bench index`: the indexer's prefix index, through the calls that the indexer makes, on the machine at hand.

Three loads; keys are packed as they come in messages, and random. 1,000 workers.

    mixed     50 applications with a system prompt of 400 to 1,500 blocks, held by 1,000, 500, 333, ... workers; 300 sessions of
              3,250 blocks below them, held by one to three workers to different depths. A query is a session's whole prompt
              (or its first 512 blocks) or a new session of an application; popular applications are asked more
    all       one prompt of 3,250 blocks that all 1,000 workers hold
    distinct  --blocks blocks in chains of 3,250, each held by one worker: memory, and the cost of memory that is new

Fields of the JSON file:
    kvbus_version, python, cores, blocks
    stores_per_s_1thread, stores_per_s_2threads     blocks of the mixed load, in chains; 2: half of the workers each
    stores_distinct_per_s                           of the distinct load
    stores_cpu_ns, stores_distinct_cpu_ns           processor time of the storing thread, per block
    match_512_*, match_3250_*                       p50_us, p99_us: a query of the mixed load
    match_3250_listed_*                             the same, and all owners named one by one
    match_3250_writing_*                            the same as match_3250 while another thread stores
    match_all_*, match_all_listed_*                 the query of the load `all`, which names 1,000 owners
    match_distinct_*                                a query of the distinct load: nothing of it is in a cache
    bytes_per_block                                 distinct load: growth of resident memory
    bytes_per_block_accounted                       what the index says itself
    clear_ms, held_ms                               distinct load: one worker's blocks dropped, or listed
"""

import argparse
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import count
from pathlib import Path

import msgspec

from kvbus_blocks.flash import FlashUnavailable, flash_maker
from kvbus_blocks.index import Owner, PrefixIndex
from kvbus_blocks.keys import KEY_BYTES, ShortKeys
from kvbus_cli.bench.index_load import DEPTH, WORKERS, Chain, MixedLoad, distinct_chains, owner
from kvbus_cli.proc import rss_bytes
from kvbus_runtime.arguments import ArgumentParser

Figures = dict[str, float | int | str]
Match = Callable[[ShortKeys], object]
QUERIES = 4000
"""Per percentile."""
WARM_UP = 200


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench index",
        description="Measure storing, matching and memory of the prefix index.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="blocks of the distinct load (10000000)")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        make_index = flash_maker()
    except FlashUnavailable as problem:
        print(f"kvbus bench index: {problem}", file=sys.stderr)
        return 1
    figures = measure(make_index, arguments.blocks)
    for name, value in figures.items():
        print(f"{name:<30}{value:>16,}" if isinstance(value, int | float) else f"{name:<30}{value:>16}")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


def measure(make_index: Callable[[], PrefixIndex], blocks: int) -> Figures:
    figures: Figures = {
        "kvbus_version": version("kvbus"),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "blocks": blocks,
    }
    rng = random.Random(20)
    # First, while the process is small: its growth is what is measured.
    figures |= _distinct(make_index(), blocks, rng)
    figures |= _mixed(make_index, MixedLoad(rng))
    return figures


def _mixed(make_index: Callable[[], PrefixIndex], load: MixedLoad) -> Figures:
    index = make_index()
    one_s, one_cpu_s = _store(index, load.chains)

    def listed(keys: ShortKeys) -> list[tuple[Owner, int]]:
        return list(index.match(keys).items())

    figures: Figures = {
        "stores_per_s_1thread": round(load.blocks / one_s),
        "stores_cpu_ns": round(1e9 * one_cpu_s / load.blocks, 1),
    }
    deep, short = load.queries(QUERIES, DEPTH), load.queries(QUERIES, 512)
    halves = [[chain for chain in load.chains if chain.worker % 2 == half] for half in range(2)]
    two_s, _ = _store(make_index(), *halves)
    figures["stores_per_s_2threads"] = round(load.blocks / two_s)
    figures |= _while_writing(index, deep)
    figures |= _match_us("match_512", index.match, short)
    figures |= _match_us("match_3250", index.match, deep)
    figures |= _match_us("match_3250_listed", listed, deep)
    everyone = ShortKeys(random.Random(21).randbytes(KEY_BYTES * DEPTH))
    for worker in range(WORKERS):
        index.store(owner(worker), None, everyone)
    figures |= _match_us("match_all", index.match, [everyone] * QUERIES)
    figures |= _match_us("match_all_listed", listed, [everyone] * QUERIES)
    return figures


def _distinct(index: PrefixIndex, blocks: int, rng: random.Random) -> Figures:
    chains = [Chain(worker, keys) for worker, keys in enumerate(distinct_chains(blocks, rng))]
    before = rss_bytes(os.getpid())
    wall_s, cpu_s = _store(index, chains)
    stored = index.sizes().blocks
    figures: Figures = {
        "stores_distinct_per_s": round(stored / wall_s),
        "stores_distinct_cpu_ns": round(1e9 * cpu_s / stored, 1),
        "bytes_per_block": round((rss_bytes(os.getpid()) - before) / stored, 1),
        "bytes_per_block_accounted": round(index.memory().size_bytes / stored, 1),
    }
    queries = [chain.keys for chain in rng.choices(chains, k=QUERIES)]
    figures |= _match_us("match_distinct", index.match, queries)
    begun = time.perf_counter()
    index.held(owner(0))
    figures["held_ms"] = round(1000 * (time.perf_counter() - begun), 2)
    begun = time.perf_counter()
    index.clear(owner(0))
    figures["clear_ms"] = round(1000 * (time.perf_counter() - begun), 2)
    return figures


def _store(index: PrefixIndex, *parts: list[Chain]) -> tuple[float, float]:
    """Wall and processor seconds; one thread per part."""
    ready = threading.Barrier(len(parts))

    def work(part: list[Chain]) -> tuple[float, float, float]:
        owners = [owner(chain.worker) for chain in part]
        ready.wait()
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        for holder, chain in zip(owners, part, strict=True):
            index.store(holder, None, chain.keys)
        return begun, time.perf_counter(), time.thread_time() - cpu_begun

    with ThreadPoolExecutor(len(parts)) as threads:
        begun, ended, cpu_s = zip(*threads.map(work, parts), strict=True)
    return max(ended) - min(begun), sum(cpu_s)


def _match_us(name: str, match: Match, queries: Sequence[ShortKeys]) -> Figures:
    for keys in queries[:WARM_UP]:
        match(keys)
    samples = []
    for keys in queries:
        begun = time.perf_counter()
        match(keys)
        samples.append(time.perf_counter() - begun)
    samples.sort()
    return {
        f"{name}_{label}_us": round(1e6 * samples[int(len(samples) * share)], 2)
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


def _while_writing(index: PrefixIndex, queries: Sequence[ShortKeys]) -> Figures:
    """Another thread stores new sessions of its own, and drops them again."""
    stop = threading.Event()
    rng = random.Random(22)
    chains = list(distinct_chains(20 * DEPTH, rng))

    def write() -> None:
        writer = Owner("writer", "g1")
        for number in count():
            if stop.is_set():
                return
            index.store(writer, None, chains[number % len(chains)])
            index.remove(writer, chains[number % len(chains)])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        return _match_us("match_3250_writing", index.match, queries)
    finally:
        stop.set()
        thread.join()
