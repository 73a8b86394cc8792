"""`kvbus bench kvbm`: how fast blocks come back from host memory and disk, and what writing them through costs.

All of one run, on the machine at hand. Fields of the JSON file:
    kvbus_version, cores, block_bytes, blocks
    memcpy_bytes_per_s       plain copies of the same slots into the same memory, the best round
    g2_bytes_per_s           the same blocks onboarded: pinned, copied, verified, released; the best round
    g2_of_memcpy             g2_bytes_per_s / memcpy_bytes_per_s; the rounds take turns
    disk_bytes_per_s         plain sequential reads of files in g3_dir, past the page cache (O_DIRECT), 4 MiB each: the best round
    g3_bytes_per_s           blocks brought up from G3 into G2 and onboarded from there: the best round; the rounds take turns
    g3_of_disk               g3_bytes_per_s / disk_bytes_per_s
    decode                   null with --no-decode; else rounds, requests, tokens of each, tokens_per_s with and without
                             write-through, cost (1 - the mean ratio of a pair of rounds) and its standard error
    within                   both shares at least 0.7, and a decode cost of at most 0.03 (plus its error), known to 0.01
"""

import argparse
import asyncio
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvbus_cli.bench.kvbm_client import Decoder, Mover, on_the_bus
from kvbus_cli.bench.starting import run_with_services, start_in_order
from kvbus_cli.model_command import DEFAULT_MODEL, prepared_model
from kvbus_cli.up.embedded_nats import start_nats
from kvbus_cli.up.plan import STOP_ORDER, ProcessSpec
from kvbus_cli.up.ports import free_port_picker
from kvbus_cli.up.processes import ProcessSet
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.log import configure
from kvbus_runtime.nats_server import NatsServerNotFound

NAMESPACE = "bench"
LEAST_OF_RATE, MOST_COST, WANTED_ERROR = 0.7, 0.03, 0.01
_READ_BYTES = 4 << 20
_VOCABULARY = 40_000


class DecodeFigures(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    requests: int
    tokens: int
    with_tokens_per_s: float
    without_tokens_per_s: float
    cost: float
    error: float


class KvbmFigures(msgspec.Struct, frozen=True, kw_only=True):
    kvbus_version: str
    cores: int
    block_bytes: int
    blocks: int
    memcpy_bytes_per_s: float
    g2_bytes_per_s: float
    g2_of_memcpy: float
    disk_bytes_per_s: float
    g3_bytes_per_s: float
    g3_of_disk: float
    decode: DecodeFigures | None
    within: bool


class Options(msgspec.Struct, frozen=True, kw_only=True):
    block_bytes: int
    blocks: int
    rounds: int
    g3_dir: str
    model: str
    decode_s: float
    requests: int
    tokens: int


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench kvbm",
        description="Measure onboarding from host memory and disk, and what write-through costs decoding.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--block-bytes", type=int, default=2 << 20, help="size of a block (2 MiB)")
    parser.add_argument("--blocks", type=int, default=128, help="blocks that are moved in a round (128)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each rate (40)")
    parser.add_argument("--g3-dir", default="", metavar="DIR", help="a folder on the disk to measure (a temporary one)")
    parser.add_argument("--model", default="", help=f"model folder for decoding; default: {DEFAULT_MODEL}")
    parser.add_argument("--no-decode", action="store_true", help="only the rates")
    parser.add_argument("--decode-s", type=float, default=300.0, help="longest time for pairs of decode rounds (300)")
    parser.add_argument("--requests", type=int, default=4, help="requests decoded at the same time (4)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each (96)")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        model = "" if arguments.no_decode else arguments.model or prepared_model(DEFAULT_MODEL)
        options = Options(
            block_bytes=arguments.block_bytes,
            blocks=arguments.blocks,
            rounds=arguments.rounds,
            g3_dir=arguments.g3_dir,
            model=model,
            decode_s=arguments.decode_s,
            requests=arguments.requests,
            tokens=arguments.tokens,
        )
        with tempfile.TemporaryDirectory(prefix="kvbus-bench-", dir=options.g3_dir or None) as folder:
            figures = run_with_services(measure(Path(folder), options))
    except (ChildProcessError, NatsServerNotFound, TimeoutError, RequestFailed, RuntimeError, OSError) as error:
        print(f"kvbus bench kvbm: {error}", file=sys.stderr)
        return 1
    _print(figures)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0 if figures.within else 3


async def measure(folder: Path, options: Options) -> KvbmFigures:
    configure("error", "auto")
    (folder / "logs").mkdir()
    processes = ProcessSet(folder / "logs", lambda child: None)
    try:
        _, nats_url = await start_nats(processes, folder)
        services = _Services(nats_url, folder, options)
        await start_in_order(processes, [services.kvbm()])
        async with on_the_bus("worker", nats_url, NAMESPACE) as service:
            mover = Mover(service, "kvbm", options.block_bytes)
            await mover.attach()
            try:
                memcpy, g2 = await _host_memory(mover, options)
                disk, g3 = await _disk(mover, folder, options)
            finally:
                mover.close()
        decode = await _decode(processes, services, nats_url, options) if options.model else None
    finally:
        await processes.stop(STOP_ORDER, grace_s=10.0)
    rates = g2 / memcpy, g3 / disk
    cheap = decode is None or (decode.error <= WANTED_ERROR and decode.cost - decode.error <= MOST_COST)
    return KvbmFigures(
        kvbus_version=version("kvbus"),
        cores=os.cpu_count() or 1,
        block_bytes=options.block_bytes,
        blocks=options.blocks,
        memcpy_bytes_per_s=round(memcpy),
        g2_bytes_per_s=round(g2),
        g2_of_memcpy=round(rates[0], 3),
        disk_bytes_per_s=round(disk),
        g3_bytes_per_s=round(g3),
        g3_of_disk=round(rates[1], 3),
        decode=decode,
        within=min(rates) >= LEAST_OF_RATE and cheap,
    )


class _Services:
    def __init__(self, nats_url: str, folder: Path, options: Options) -> None:
        self._nats_url = nats_url
        self._folder = folder
        self._options = options
        self._free_port = free_port_picker(random.Random())

    def kvbm(self) -> ProcessSpec:
        # One half is for the pool of the rates, which holds little more than a chain: the next chain drives the one before out.
        # The pool of the worker that decodes has half of the rest.
        size = self._options.blocks * self._options.block_bytes
        arguments = ["--g2-bytes", str(2 * (size * 9 // 8)), "--pool-share", "0.5"]
        arguments += ["--g3-dir", str(self._folder / "g3"), "--g3-bytes", str(8 * size + (1 << 30))]
        return self._spec("kvbm", "kvbm", arguments)

    def worker(self, name: str, *, kvbm: bool) -> ProcessSpec:
        arguments = ["--engine", "torch", "--model", self._options.model, "--served-model-name", "bench-model"]
        return self._spec("worker", name, [*arguments, "--threads", "1", "--kvbm" if kvbm else "--no-kvbm"])

    def _spec(self, service: str, name: str, arguments: Sequence[str]) -> ProcessSpec:
        port = self._free_port()
        common = ["--nats", self._nats_url, "--namespace", NAMESPACE, "--instance-id", name, "--health-port", str(port)]
        return ProcessSpec(
            name=name,
            group=service,
            command=(sys.executable, "-m", f"kvbus_{service}", *common, "--drain-timeout-s", "2", *arguments),
            ready_url=f"http://127.0.0.1:{port}/readyz",
            env={"OMP_NUM_THREADS": "1"},
        )


async def _host_memory(mover: Mover, options: Options) -> tuple[float, float]:
    """Bytes per second of plain copies and of onboarding."""
    keys = [os.urandom(16) for _ in range(options.blocks)]
    await mover.offload(keys)
    await _settled(mover, options.blocks)
    size = options.blocks * options.block_bytes
    plain, onboard = 0.0, 0.0
    for _ in range(options.rounds + 1):
        plain = max(plain, size / await asyncio.to_thread(mover.plain_copy_s, options.blocks))
        blocks, took_s, _ = await mover.onboard(keys)
        if blocks < options.blocks:
            raise RuntimeError(f"only {blocks} of {options.blocks} blocks were in host memory")
        onboard = max(onboard, size / took_s)
    return plain, onboard


async def _disk(mover: Mover, folder: Path, options: Options) -> tuple[float, float]:
    """Bytes per second of a plain sequential read and of onboarding from G3. Two chains drive each other out of G2, where the
    slots that one chain does not need may still hold some of the other: these are not counted."""
    size = options.blocks * options.block_bytes
    left_in_g2 = mover.pool.slots - options.blocks
    if left_in_g2 >= options.blocks:
        raise RuntimeError(f"the pool of {mover.pool.slots} slots holds two chains of {options.blocks} blocks")
    chains = [[os.urandom(16) for _ in range(options.blocks)] for _ in range(2)]
    for i, chain in enumerate(chains):
        await mover.offload(chain)
        await _settled(mover, (i + 2) * options.blocks)  # those of host memory are there, too
    # Two as well: what the disk has read shortly before it may read faster.
    files = [folder / "plain-0", folder / "plain-1"]
    for file in files:
        await asyncio.to_thread(_write_file, file, size)
    plain, onboard = 0.0, 0.0
    for i in range(options.rounds + 1):
        plain = max(plain, size / await asyncio.to_thread(_read_file_s, files[i % 2]))
        blocks, took_s, _ = await mover.onboard(chains[i % 2], wait_s=10.0)
        if blocks < options.blocks:
            raise RuntimeError(f"only {blocks} of {options.blocks} blocks came from the disk")
        if i:
            onboard = max(onboard, (size - left_in_g2 * options.block_bytes) / took_s)
    return plain, onboard


async def _settled(mover: Mover, blocks: int) -> None:
    """Return when kvbm has written so many blocks to G3: before that it needs the processor itself."""
    async with asyncio.timeout(120):
        while await mover.in_tier("g3") < blocks:  # noqa: ASYNC110  (another process writes them)
            await asyncio.sleep(0.1)


def _write_file(path: Path, size: int) -> None:
    piece = os.urandom(_READ_BYTES)
    with path.open("wb") as file:
        for _ in range(0, size, _READ_BYTES):
            file.write(piece)
        os.fsync(file.fileno())


def _read_file_s(path: Path) -> float:
    """Seconds of one sequential read, past the page cache where the file system can, into ordinary memory: as fio has it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(-1, _READ_BYTES) as buffer:
            started_s = time.perf_counter()
            while os.readv(fd, [buffer]):
                pass
            return time.perf_counter() - started_s
    finally:
        os.close(fd)


async def _decode(processes: ProcessSet, services: _Services, nats_url: str, options: Options) -> DecodeFigures:
    """Pairs of rounds, one with and one without write-through, in turns, until their ratio is known well enough."""
    await start_in_order(processes, [services.worker("with", kvbm=True), services.worker("without", kvbm=False)])
    ratios: list[float] = []
    rates: dict[str, list[float]] = {"with": [], "without": []}
    async with on_the_bus("frontend", nats_url, NAMESPACE) as service:
        decoder = Decoder(service, "bench-model", _VOCABULARY, seed=1)
        await decoder.begin()
        for name in rates:  # what is slow at first
            await decoder.tokens_per_s(name, 1, 64, 16)
        ends_s = time.monotonic() + options.decode_s
        error = 1.0
        while len(ratios) < 3 or (error > WANTED_ERROR and time.monotonic() < ends_s):
            order = ("with", "without") if len(ratios) % 2 else ("without", "with")
            for name in order:
                rates[name].append(await decoder.tokens_per_s(name, options.requests, 64, options.tokens))
            ratios.append(rates["with"][-1] / rates["without"][-1])
            error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 1.0
    return DecodeFigures(
        rounds=len(ratios),
        requests=options.requests,
        tokens=options.tokens,
        with_tokens_per_s=round(statistics.mean(rates["with"]), 1),
        without_tokens_per_s=round(statistics.mean(rates["without"]), 1),
        cost=round(1 - statistics.mean(ratios), 4),
        error=round(error, 4),
    )


def _print(figures: KvbmFigures) -> None:
    print(f"{figures.blocks} blocks of {figures.block_bytes} bytes, {figures.cores} cores")
    print(f"  plain copy            {figures.memcpy_bytes_per_s / 1e9:8.2f} GB/s")
    print(f"  onboarding from G2    {figures.g2_bytes_per_s / 1e9:8.2f} GB/s  {figures.g2_of_memcpy:6.0%} of it")
    print(f"  plain read of disk    {figures.disk_bytes_per_s / 1e9:8.2f} GB/s")
    print(f"  onboarding from G3    {figures.g3_bytes_per_s / 1e9:8.2f} GB/s  {figures.g3_of_disk:6.0%} of it")
    if (decode := figures.decode) is not None:
        print(
            f"  decoding              {decode.with_tokens_per_s:8.1f} tokens/s with write-through, "
            f"{decode.without_tokens_per_s:.1f} without: it costs {decode.cost:.1%} +- {decode.error:.1%} "
            f"({decode.rounds} pairs of rounds)"
        )
    print("within the limits" if figures.within else "NOT within the limits")
