"""`kvbus bench startup`: what each service costs before anyone uses it. With the mock engine, on the machine at hand.

Fields of the JSON file:
    kvbus_version, python, engine, workers, cores
    services[]: name, service
        ready_s     seconds from the start of the process until its /readyz answers 200. The services are started one after the
                    other, each when what it waits for is ready, so this is the service's own time
        rss_mb      resident memory (VmRSS) after the idle time, in MB (10^6 bytes); pages shared with other processes count
        cpu_percent processor time while idle, in percent of one core
    idle_s               length of the idle measurement
    idle_cpu_percent     processor time of all processes, nats-server included, in percent of one core
    system_ready_s       seconds from the start of the first process until the HTTP API was ready
The bus (nats-server) is listed, too.
"""

import argparse
import asyncio
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvbus_cli.bench.starting import run_with_services, start_in_order
from kvbus_cli.model_command import DEFAULT_MODEL, prepared_model
from kvbus_cli.proc import cpu_seconds, rss_bytes
from kvbus_cli.up.embedded_nats import start_nats
from kvbus_cli.up.plan import STOP_ORDER, UpOptions, plan
from kvbus_cli.up.ports import free_port_picker
from kvbus_cli.up.processes import Child, ProcessSet
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.nats_server import NatsServerNotFound

SETTLE_S = 2.0
"""After the last start, before the idle measurement: first reports and leases are out of the way."""
BLOCK_BYTES = 360 << 10
"""Of the mock engine, as large as those of the small real model: kvbm keeps a record per block that fits into its memory."""


class ServiceFigures(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    service: str
    ready_s: float
    rss_mb: float
    cpu_percent: float


class StartupFigures(msgspec.Struct, frozen=True, kw_only=True):
    kvbus_version: str
    python: str
    engine: str
    workers: int
    cores: int
    services: tuple[ServiceFigures, ...]
    idle_s: float
    idle_cpu_percent: float
    system_ready_s: float


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench startup",
        description="Start every service with the mock engine and measure starting time, memory and idle load.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--workers", type=int, default=2, help="how many workers (2)")
    parser.add_argument("--idle-s", type=float, default=10.0, help="length of the idle measurement (10)")
    parser.add_argument("--model", default="", help=f"folder with the model's tokenizer; default: {DEFAULT_MODEL}")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        model = arguments.model or prepared_model(DEFAULT_MODEL)
        with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
            figures = run_with_services(measure(Path(folder), model, arguments.workers, arguments.idle_s))
    except (ChildProcessError, NatsServerNotFound, TimeoutError) as error:
        print(f"kvbus bench startup: {error}", file=sys.stderr)
        return 1
    _print(figures)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


async def measure(state_dir: Path, model: str, workers: int, idle_s: float) -> StartupFigures:
    """Raise ChildProcessError or TimeoutError when a service does not get ready."""
    (state_dir / "logs").mkdir()
    processes = ProcessSet(state_dir / "logs", lambda child: None)
    free_port = free_port_picker(random.Random())
    options = UpOptions(
        engine="mock",
        model=model,
        workers=workers,
        http_port=free_port(),
        drain_timeout_s=2.0,
        overrides=(("worker", "mock_block_bytes", str(BLOCK_BYTES)),),
    )
    begun = time.monotonic()
    try:
        _, nats_url = await start_nats(processes, state_dir)
        await start_in_order(processes, plan(options, nats_url=nats_url, python=sys.executable, free_port=free_port))
        system_ready_s = time.monotonic() - begun
        await asyncio.sleep(SETTLE_S)
        before = [cpu_seconds(child.pid) for child in processes.children]
        idle_begun = time.monotonic()
        await asyncio.sleep(idle_s)
        idle_for = time.monotonic() - idle_begun
        used = [cpu_seconds(child.pid) - start for child, start in zip(processes.children, before, strict=True)]
        services = tuple(_figures(child, cpu / idle_for) for child, cpu in zip(processes.children, used, strict=True))
    finally:
        await processes.stop(STOP_ORDER, grace_s=10.0)
    return StartupFigures(
        kvbus_version=version("kvbus"),
        python=platform.python_version(),
        engine="mock",
        workers=workers,
        cores=os.cpu_count() or 1,
        services=services,
        idle_s=round(idle_for, 2),
        idle_cpu_percent=round(100 * sum(used) / idle_for, 2),
        system_ready_s=round(system_ready_s, 2),
    )


def _figures(child: Child, share_of_core: float) -> ServiceFigures:
    return ServiceFigures(
        name=child.spec.name,
        service=child.spec.group,
        ready_s=round(child.ready_after_s or 0.0, 3),
        rss_mb=round(rss_bytes(child.pid) / 1e6, 1),
        cpu_percent=round(100 * share_of_core, 2),
    )


def _print(figures: StartupFigures) -> None:
    print(f"{'process':<12}{'ready s':>9}{'RSS MB':>9}{'idle CPU %':>12}")
    for service in figures.services:
        print(f"{service.name:<12}{service.ready_s:>9.2f}{service.rss_mb:>9.1f}{service.cpu_percent:>12.2f}")
    print(
        f"whole system: HTTP API ready after {figures.system_ready_s:.1f} s (started one by one), "
        f"idle {figures.idle_cpu_percent:.2f}% of one core over {figures.idle_s:.0f} s"
    )
