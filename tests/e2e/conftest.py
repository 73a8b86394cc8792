"""Whole systems with the mock engine."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbus_testkit.up import KvbusUp
from kvbus_worker.models import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for the mock engine, which needs its tokenizer only."""
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


StartSystem = Callable[..., KvbusUp]


@pytest.fixture
def start_system(tiny_model: Path) -> Iterator[StartSystem]:
    """Starts systems with the mock engine that end with the test."""
    running: list[KvbusUp] = []

    with tempfile.TemporaryDirectory(prefix="kvbus-e2e-") as folder:

        def start(*arguments: str, wait: bool = True) -> KvbusUp:
            home = Path(folder, str(len(running)))
            home.mkdir()
            system = KvbusUp(home, "--engine", "mock", "--model", str(tiny_model), "--mock-speedup", "20", *arguments)
            running.append(system)
            return system.wait_ready(60) if wait else system

        yield start
        for system in running:
            system.__exit__()
