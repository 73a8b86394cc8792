"""`kvbus bench transfer`: reading block lists from another process of this host, per backend, beside what could be had at best.

A list of SIZE bytes consists of blocks of at most 2 MiB. Reads go on through 256 MiB, so that nothing is in a cache, as with real
blocks (ucx: of the reads at a time each has its SIZE bytes, the same again and again, as its own perf test does). For nixl and ucx
the memory lies on huge pages, as that test has it. Reads and limit take turns, some ten milliseconds each. Several reads may be
under way at a time, as the table says; limits do one after the other.

Fields of the JSON file:
    results[backend][size_bytes]
        gbps            GB/s of reads, `depth` at a time: median of the rounds
        limit_gbps      shm: memcpy; tcp: a plain blocking socket; nixl: the library called directly by one thread, one transfer at
                        a time, as its examples do; ucx: ucx_perftest tag_bw
        p50_us, p99_us  of single reads, one at a time
        depth           reads at a time
    unavailable         backends that are not here, and why
"""

import argparse
import asyncio
import base64
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import msgspec
import uvloop

from kvbus_cli.bench.transfer_limits import MemoryCopy, NixlCopy, NoPerftest, Segment, SocketCopy, ucx_perftest_gbps
from kvbus_runtime.arguments import ArgumentParser
from kvbus_transfer import TransferAgent, TransferLimits, host_memory
from kvbus_transfer.backends.choice import BACKENDS

KIB, MIB = 1 << 10, 1 << 20
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 8 * MIB, 32 * MIB, 64 * MIB)
BLOCK_BYTES = 2 * MIB
MEMORY_BYTES = 256 * MIB
ROUND_BYTES = 128 * MIB
WARM_UP_S = 0.5
DEPTHS = {"shm": 1, "tcp": 2, "nixl": 4, "ucx": 4}


class Limit(Protocol):
    def copy(self, segments: Sequence[Segment]) -> None: ...

    def close(self) -> None: ...


_LIMITS: dict[str, Callable[[dict[str, Any], memoryview], Limit]] = {
    "shm": MemoryCopy,
    "tcp": SocketCopy,
    "nixl": NixlCopy,
}


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench transfer",
        description="Measure the backends of block transfers between two processes of this host.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9, help="of reads and limit in turn, per size (9)")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    figures: dict[str, Any] = {
        "kvbus_version": version("kvbus"),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "results": {},
        "unavailable": {},
    }
    for backend in arguments.backends:
        measured = uvloop.run(_measure(backend, arguments.rounds, figures["unavailable"]))
        if measured:
            figures["results"][backend] = measured
    for backend, why in figures["unavailable"].items():
        print(f"{backend}: {why}", file=sys.stderr)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0 if figures["results"] else 1


async def _measure(backend: str, rounds: int, unavailable: dict[str, str]) -> dict[str, dict[str, float]]:
    blocks = sorted({min(size, BLOCK_BYTES) for size in SIZES})
    command = [sys.executable, "-m", "kvbus_cli.bench.transfer_owner", backend, str(MEMORY_BYTES), json.dumps(blocks)]
    owner = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=64 * MIB
    )
    if owner.stdout is None or owner.stdin is None:
        raise RuntimeError("no pipes")
    try:
        told = json.loads(await owner.stdout.readline())
        async with TransferAgent("bench-reader", backends=[backend], limits=TransferLimits()) as agent:
            if missing := {**told["unavailable"], **agent.unavailable}:
                unavailable.update(missing)
                return {}
            return await _Bench(backend, agent, told, rounds).run()
    finally:
        owner.stdin.close()
        await owner.wait()


class _Bench:
    def __init__(self, backend: str, agent: TransferAgent, told: dict[str, Any], rounds: int) -> None:
        self._backend, self._agent, self._told, self._rounds = backend, agent, told, rounds
        self._target = host_memory(MEMORY_BYTES)
        self._target[:] = bytes(MEMORY_BYTES)  # so that no page is touched for the first time while it is measured
        self._region = agent.register(self._target)
        self._depth = DEPTHS[backend]

    async def run(self) -> dict[str, dict[str, float]]:
        limit = _LIMITS[self._backend](self._told, self._target) if self._backend in _LIMITS else None
        results: dict[str, dict[str, float]] = {}
        await self._warm_up(max(SIZES))
        print(f"\n{self._backend}, {self._depth} at a time")
        print(f"{'list':>13}{'GB/s':>13}{'limit':>10}{'of it':>8}{'p50 us':>12}{'p99 us':>12}")
        for size in SIZES:
            figures = await self._size(size, limit)
            results[str(size)] = figures
            share = f"{100 * figures['gbps'] / figures['limit_gbps']:.0f} %" if figures["limit_gbps"] else "-"
            print(
                f"{size // KIB:>9} KiB{figures['gbps']:>13.2f}{figures['limit_gbps']:>10.2f}{share:>8}"
                f"{figures['p50_us']:>12.0f}{figures['p99_us']:>12.0f}"
            )
        if limit is not None:
            limit.close()
        return results

    async def _warm_up(self, size: int) -> None:
        """What comes once: shm compiles its copy while reads go on without, nixl makes an agent for each read at a time, memory is
        touched, grants are opened, and threads and cores find each other."""
        reads = self._reads(size)
        until = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < until:
            await self._at_once([next(reads) for _ in range(self._depth)])

    async def _size(self, size: int, limit: Limit | None) -> dict[str, float]:
        reads = self._reads(size)
        count = max(4, min(512, ROUND_BYTES // size))
        await self._warm_up(size)
        spent: list[float] = []
        limit_spent: list[float] = []
        waits: list[float] = []
        perf: list[float] = []
        limits = self._reads(size)
        for _ in range(self._rounds):
            if limit is not None:
                lists = [next(limits)[3] for _ in range(count)]
                start = time.perf_counter()
                for segments in lists:
                    limit.copy(segments)
                limit_spent.append(time.perf_counter() - start)
            spent.append(await self._at_once([next(reads) for _ in range(count)]))
            for _ in range(max(8, count // 4)):
                each = next(reads)
                start = time.perf_counter()
                await self._read(*each)
                waits.append(time.perf_counter() - start)
        if limit is None:
            try:
                perf = [await asyncio.to_thread(ucx_perftest_gbps, size, count) for _ in range(3)]
            except NoPerftest as missing:
                print(f"no limit for ucx: {missing}", file=sys.stderr)
        moved = size * count / 1e9
        waits.sort()
        return {
            "gbps": moved / median(spent),
            "limit_gbps": moved / median(limit_spent) if limit is not None else median(perf) if perf else 0.0,
            "p50_us": 1e6 * waits[len(waits) // 2],
            "p99_us": 1e6 * waits[len(waits) * 99 // 100],
            "depth": self._depth,
        }

    def _reads(self, size: int) -> Any:
        """For ever: (grant, indices, targets, segments) of the next list."""
        block = min(size, BLOCK_BYTES)
        grant = base64.b64decode(self._told["grants"][str(block)])
        each = size // block
        places = self._depth if self._backend == "ucx" else MEMORY_BYTES // size
        lists = []
        for place in range(places):
            numbers = list(range(place * each, (place + 1) * each))
            segments = [(number * block, block) for number in numbers]
            targets = [self._target[offset : offset + length] for offset, length in segments]
            lists.append((grant, numbers, targets, segments))
        while True:
            yield from lists

    async def _read(self, grant: bytes, numbers: list[int], targets: list[memoryview], _: list[Segment]) -> None:
        await self._agent.read(grant, numbers, targets, backend=self._backend)

    async def _at_once(self, reads: list[Any]) -> float:
        async def some(mine: list[Any]) -> None:
            for each in mine:
                await self._read(*each)

        start = time.perf_counter()
        await asyncio.gather(*(some(reads[at :: self._depth]) for at in range(self._depth)))
        return time.perf_counter() - start
