"""`kvbus nats`: the embedded nats-server alone, in the foreground, for services on several hosts."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbus_cli.paths import state_root
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.nats_server import NatsServerNotFound, ServerConfig, command, find_nats_server


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus nats",
        description="Run the embedded nats-server (JetStream on, payload limit raised) in the foreground.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other hosts")
    parser.add_argument("--port", type=int, default=4222, help="port for clients")
    parser.add_argument(
        "--state-dir", type=Path, default=state_root() / "nats", help="folder for its configuration and JetStream data"
    )
    parser.add_argument("--max-payload-mb", type=int, default=8, help="largest message, in MiB")
    parser.add_argument(
        "--config", type=Path, default=None, help="your own nats-server configuration; the other flags are ignored"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        binary = find_nats_server()
    except NatsServerNotFound as error:
        print(f"kvbus nats: {error}", file=sys.stderr)
        return 1
    config_file: Path = options.config or _write_config(options)
    arguments = command(binary, config_file)
    os.execv(arguments[0], arguments)  # noqa: S606  # no shell on purpose: signals go straight to the server
    raise AssertionError("unreachable")


def _write_config(options: argparse.Namespace) -> Path:
    state_dir: Path = options.state_dir
    state_dir.mkdir(parents=True, exist_ok=True)
    config = ServerConfig(
        store_dir=state_dir / "jetstream",
        host=options.host,
        port=options.port,
        max_payload_bytes=options.max_payload_mb << 20,
    )
    file = state_dir / "nats.conf"
    file.write_text(config.render(), encoding="utf-8")
    return file
