"""Arguments, checks and signals of `kvbus up`."""

import argparse
import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from kvbus_cli.model_command import DEFAULT_MODEL, prepared_model
from kvbus_cli.paths import state_root
from kvbus_cli.running import STATUS_FILE
from kvbus_cli.up.console import TerminalReporter
from kvbus_cli.up.plan import SERVICES, ProcessSpec, UpOptions, longest_drain_s, plan
from kvbus_cli.up.ports import free_port_picker, is_free
from kvbus_cli.up.state_dir import StateDirInUse, StateDirUnusable, locked
from kvbus_cli.up.status import StatusFile
from kvbus_cli.up.system import System
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.nats_server import NatsServerNotFound
from kvbus_runtime.service import LONGEST_END_S

_ENGINES = "kvbus.engines"
"""Entry points of engines that others provide."""
BUS_TIMEOUT_S = 5.0
MOST_WORKERS = 1024

_EPILOG = f"""\
A service that dies is reported, and why. Nothing restarts itself: while another of its kind lives (the workers)
the system goes on, otherwise everything is ended and the exit status is 1. Ctrl-C or SIGTERM ends everything in order, the
frontend first and the bus last, with exit status 0; a second one kills what is left.
Every setting of a service can also be given by its environment variable (KVBUS_WORKER_DEVICE=cuda kvbus up), or by
--set SERVICE.NAME=VALUE, SERVICE being one of {", ".join(SERVICES)}; or one process: --set worker-0.role=prefill
--set worker-1.role=decode.
"""


class PassedOn(msgspec.Struct, frozen=True):
    """A setting of a service that is a flag of this command, too. ``prefixes``: further spellings of it."""

    service: str
    name: str
    help: str
    is_switch: bool = False
    prefixes: tuple[str, ...] = ()

    def add_to(self, up: argparse.ArgumentParser) -> None:
        flag = self.name.replace("_", "-")
        flags = [f"--{prefix}{flag}" for prefix in ("", *self.prefixes)]
        if self.is_switch:
            up.add_argument(*flags, dest=self.name, action=argparse.BooleanOptionalAction, default=None, help=self.help)
        else:
            up.add_argument(*flags, dest=self.name, default=None, metavar="NAME", help=self.help)

    def override(self, given: argparse.Namespace) -> tuple[tuple[str, str, str], ...]:
        value = getattr(given, self.name)
        return () if value is None else ((self.service, self.name, str(value)),)


PASSED_ON = (
    PassedOn("worker", "tool_call_parser", "format of the model's tool calls (auto)", prefixes=("dyn-",)),
    PassedOn("worker", "reasoning_parser", "format of the model's thoughts (auto)", prefixes=("dyn-",)),
    PassedOn(
        "frontend", "enable_openai_api", "serve Chat Completions, Completions and Responses (yes)", is_switch=True
    ),
    PassedOn("frontend", "enable_anthropic_api", "serve Messages (yes)", is_switch=True),
    PassedOn(
        "frontend", "strip_anthropic_preamble", "drop Claude Code's billing line from prompts (yes)", is_switch=True
    ),
    PassedOn(
        "frontend", "enable_streaming_tool_dispatch", "announce finished tool calls by an event (no)", is_switch=True
    ),
    PassedOn(
        "frontend", "enable_streaming_reasoning_dispatch", "announce finished thoughts by an event (no)", is_switch=True
    ),
)


def _override(text: str) -> tuple[str, str, str]:
    target, equals, value = text.partition("=")
    service, dot, name = target.partition(".")
    if not (equals and dot and name) or service.partition("-")[0] not in SERVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is not SERVICE.NAME=VALUE with a service of {', '.join(SERVICES)}")
    return service, name, value


def _port(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"{number} is no port (1 to 65535)")
    return number


def _engine(text: str) -> str:
    known = ["torch", "mock", *(point.name for point in entry_points(group=_ENGINES))]
    if text not in known:
        raise argparse.ArgumentTypeError(f"there is no engine {text!r}; there are {', '.join(known)}")
    return text


def _model_folder(text: str) -> str:
    if text and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return text


def _workers(text: str) -> int:
    """They are processes of this machine."""
    count = _positive(text)
    if count > MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"at most {MOST_WORKERS}")
    return count


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    defaults = UpOptions()
    up = ArgumentParser(
        prog="kvbus up",
        description="Start the whole system on this machine: nats-server, frontend, router, indexer, workers, kvbm.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    up.add_argument("--http-host", default=defaults.http_host, help=f"address of the HTTP API ({defaults.http_host})")
    up.add_argument(
        "--http-port", type=_port, default=defaults.http_port, help=f"port of the HTTP API ({defaults.http_port})"
    )
    up.add_argument(
        "--engine",
        type=_engine,
        default=defaults.engine,
        help=f"engine of the workers: torch, mock ({defaults.engine})",
    )
    up.add_argument("--workers", type=_workers, default=defaults.workers, help=f"how many workers ({defaults.workers})")
    up.add_argument(
        "--model",
        type=_model_folder,
        default="",
        help=f"folder of the model; default: {DEFAULT_MODEL}, prepared when it is missing",
    )
    up.add_argument("--served-model-name", default="", help="name of the model in the HTTP API")
    up.add_argument(
        "--mock-speedup", type=float, default=None, help="mock engine: how many times faster than its timing model"
    )
    for setting in PASSED_ON:
        setting.add_to(up)
    up.add_argument("--kv-blocks", type=_positive, default=None, help="KV blocks of each worker")
    up.add_argument("--nats", default="", metavar="URL", help="use this running NATS server instead of an embedded one")
    up.add_argument("--namespace", default=defaults.namespace, help=f"prefix of all subjects ({defaults.namespace})")
    up.add_argument(
        "--state-dir", type=Path, default=None, help="folder for logs and bus data (~/.local/state/kvbus/up-PORT)"
    )
    up.add_argument("--log-level", default=defaults.log_level, help=f"of all services ({defaults.log_level})")
    up.add_argument(
        "--drain-timeout-s",
        type=float,
        default=defaults.drain_timeout_s,
        help=f"how long requests may finish at the end ({defaults.drain_timeout_s:g})",
    )
    up.add_argument("--ready-timeout-s", type=float, default=900.0, help="how long the start may take (900)")
    up.add_argument(
        "--keep-going", action="store_true", help="end only when the bus dies; for experiments with failures"
    )
    up.add_argument(
        "--json-status", type=Path, default=None, metavar="FILE", help="keep state, addresses and processes in FILE"
    )
    up.add_argument(
        "--set",
        type=_override,
        action="append",
        default=[],
        metavar="SERVICE.NAME=VALUE",
        help="a setting of a service",
    )
    return up


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    console = Console(soft_wrap=False)
    if not is_free(arguments.http_host, arguments.http_port):
        print(
            f"kvbus up: {arguments.http_host}:{arguments.http_port} cannot be listened on; give another --http-port "
            f"(make up ARGS='--http-port {_another_port(arguments.http_port)}')",
            file=sys.stderr,
        )
        return 2
    if arguments.json_status is not None and not arguments.json_status.absolute().parent.is_dir():
        print(f"kvbus up: there is no folder for --json-status {arguments.json_status}", file=sys.stderr)
        return 2
    options = options_of(arguments, arguments.model or ".")
    refusal = refused_setting(options, services_to_check(options, parser().parse_args([])))
    if refusal:
        print(f"kvbus up: {refusal}", file=sys.stderr)
        return 2
    if arguments.nats and (problem := no_bus(arguments.nats)):
        print(f"kvbus up: {problem}", file=sys.stderr)
        return 2
    state_dir: Path = (arguments.state_dir or state_root() / f"up-{arguments.http_port}").absolute()
    try:
        with locked(state_dir):
            model = arguments.model or prepared_model(DEFAULT_MODEL)
            return asyncio.run(_run(arguments, options_of(arguments, model), state_dir, console))
    except (StateDirInUse, StateDirUnusable, NatsServerNotFound) as error:
        print(f"kvbus up: {error}", file=sys.stderr)
    except ChildProcessError as error:
        print(f"kvbus up: the model could not be prepared: {error}", file=sys.stderr)
    return 1


def _another_port(port: int) -> int:
    return port + 1 if port < 65_535 else port - 1


def no_bus(url: str) -> str:
    """Why the bus of ``--nats`` cannot be used; "" when it is there. What it takes to log in, the services have."""

    async def connect() -> str:
        refusals = []
        for address in url.split(","):
            parts = urlsplit(address.strip() if "//" in address else f"nats://{address.strip()}")
            try:
                async with asyncio.timeout(BUS_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 4222)
                writer.close()
                return ""
            except (OSError, ValueError, TimeoutError) as problem:
                refusals.append(f"no bus at {parts.hostname}:{parts.port or 4222}: {problem or 'no answer'}")
        return "; ".join(refusals)

    try:
        return asyncio.run(connect())
    except ValueError as problem:  # what should be a port is none
        return f"{url} is no address of a bus: {problem}"


def services_to_check(options: UpOptions, default: argparse.Namespace) -> set[str]:
    """Those whose settings are not the usual ones; of what all of them are told, one is asked."""
    usual = options_of(default, "")
    found = {service for service, *_ in options.overrides}
    if (options.mock_speedup, options.kv_blocks, options.served_model_name) != (None, None, ""):
        found.add("worker")
    common = ("namespace", "log_level", "drain_timeout_s")
    if any(getattr(options, name) != getattr(usual, name) for name in common):
        found.add("router")
    return found


def refused_setting(options: UpOptions, services: Collection[str]) -> str:
    """What the first of ``services`` says against its settings, before anything starts; "" when they all take theirs."""
    specs = plan(options, nats_url="nats://127.0.0.1:4222", python=sys.executable, free_port=lambda: 0)
    for name in services:
        if not any(name in (spec.group, spec.name) for spec in specs):
            return f"--set {name}: there are {', '.join(spec.name for spec in specs)}"
    for spec in specs:
        if spec.group in services or spec.name in services:
            check = subprocess.run([*spec.command, "check-config"], capture_output=True, text=True, check=False)
            if check.returncode:
                lines = check.stderr.strip().splitlines()
                complaints = [line for line in lines if ": error: " in line] or lines[-1:]
                return (complaints or [f"{spec.group} refuses its settings"])[0]
    return ""


def options_of(arguments: argparse.Namespace, model: str) -> UpOptions:
    return UpOptions(
        http_host=arguments.http_host,
        http_port=arguments.http_port,
        engine=arguments.engine,
        workers=arguments.workers,
        model=model,
        served_model_name=arguments.served_model_name,
        mock_speedup=arguments.mock_speedup,
        kv_blocks=arguments.kv_blocks,
        namespace=arguments.namespace,
        log_level=arguments.log_level,
        drain_timeout_s=arguments.drain_timeout_s,
        overrides=(*(entry for setting in PASSED_ON for entry in setting.override(arguments)), *arguments.set),
    )


def _base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    client_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{client_host}:{port}"


async def _run(arguments: argparse.Namespace, options: UpOptions, state_dir: Path, console: Console) -> int:
    free_port = free_port_picker(random.Random())

    def make_plan(nats_url: str) -> list[ProcessSpec]:
        return plan(options, nats_url=nats_url, python=sys.executable, free_port=free_port)

    system = System(
        make_plan,
        url=_base_url(options.http_host, options.http_port),
        nats_url=arguments.nats,
        namespace=options.namespace,
        state_dir=state_dir,
        reporter=TerminalReporter(console),
        status_file=StatusFile(state_dir / STATUS_FILE, *filter(None, [arguments.json_status])),
        ready_timeout_s=arguments.ready_timeout_s,
        stop_grace_s=longest_drain_s(options) + LONGEST_END_S,
        keep_going=arguments.keep_going,
    )
    _handle_signals(system)
    return await system.run()


def _handle_signals(system: System) -> None:
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            system.request_stop(number.name)
        else:
            system.force()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
