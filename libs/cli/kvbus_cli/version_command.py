"""`kvbus version`: what to name in a bug report."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.nats_server import NatsServerNotFound, find_nats_server, server_version

_PACKAGES = ("nats-py", "msgspec", "uvloop", "aiohttp", "tokenizers", "fastokens", "torch")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _nats_server() -> str:
    try:
        binary = find_nats_server()
    except NatsServerNotFound:
        return "not found"
    return "{}.{} ({})".format(*server_version(binary), binary)


def main(argv: Sequence[str]) -> int:
    ArgumentParser(prog="kvbus version", description="Print versions.").parse_args(argv)
    print(f"kvbus {_version_of('kvbus')}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    print(f"nats-server {_nats_server()}")
    for package in _PACKAGES:
        print(f"{package} {_version_of(package)}")
    return 0
