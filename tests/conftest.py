"""Fixtures of all tests: one nats-server per test run, one namespace per test."""

import logging
import secrets
from collections.abc import Iterator

import pytest
import structlog
from blockbuster import blockbuster_ctx
from hypothesis import settings

from kvbus_runtime.service import kvbus_version
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.s3_server import S3Server

# How long one example takes says how busy the machine is, no more.
settings.register_profile("kvbus", deadline=None)
settings.load_profile("kvbus")

collect_ignore = ["agents"]
"""They need npm; `make agents` names them."""


@pytest.fixture(autouse=True)
def logs_of_one_test() -> Iterator[None]:
    """A program sets up the logs of its process, which here is that of all tests: none leaves that to another."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A running nats-server shared by all tests; a test that disturbs its server starts its own."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A running S3 server shared by all tests; it comes with the first that asks for it."""
    with S3Server() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses, so that tests share the server and nothing else."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """A blocking call of kvbus code on the event loop fails the test."""
    modules = ["kvbus_runtime", "kvbus_frontend", "kvbus_router", "kvbus_indexer", "kvbus_worker", "kvbus_kvbm"]
    kvbus_version()  # read from a file once per process, whichever test comes first
    with blockbuster_ctx(scanned_modules=modules) as detector:
        # Looking at a file costs microseconds, and tracebacks in the log do it.
        detector.functions["os.stat"].deactivate()
        yield
