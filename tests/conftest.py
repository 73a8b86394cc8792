"""Fixtures of all tests: one nats-server per test run, one namespace per test."""

import secrets
from collections.abc import Iterator

import pytest

from kvbus_testkit.nats import NatsServer


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A running nats-server shared by all tests; a test that disturbs its server starts its own."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses, so that tests share the server and nothing else."""
    return f"test-{secrets.token_hex(6)}"
