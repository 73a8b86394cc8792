"""Real agents against the whole system; `make agents` runs them, in a network namespace that has only loopback."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agents import isolation, report
from tests.agents.client import Client
from tests.agents.model_formats import CONTEXT_LENGTH, FORMATS
from tests.agents.pins import is_installed, versions_of
from tests.agents.recorder import Recorder
from tests.agents.stage import Stage
from tests.agents.system import System

REPORT_FILE = Path(__file__).parents[2] / "build" / "agents" / "report.md"
_HOMES_BYTES = 1 << 30
_ROWS = pytest.StashKey[list[report.Row]]()
_PASSED = pytest.StashKey[bool]()

StartStage = Callable[..., Stage]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = isolation.missing()
    for item in items:
        item.add_marker(pytest.mark.timeout(600))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    result: pytest.TestReport = yield  # type: ignore[assignment]
    if result.when == "call":
        item.stash[_PASSED] = result.passed
    return result  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_ROWS]
    if rows:
        text = report.table(rows)
        REPORT_FILE.parent.mkdir(parents=True, exist_ok=True)
        REPORT_FILE.write_text(text + "\n")
        terminalreporter.section("cached shares")
        terminalreporter.write_line(text)
        terminalreporter.write_line(f"written to {REPORT_FILE}")


@pytest.fixture(scope="session")
def memory_folder() -> Iterator[Path]:
    """A folder for homes and projects, in memory where there is room: clients with databases wait for disks otherwise."""
    shared_memory = Path("/dev/shm")
    roomy = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free >= _HOMES_BYTES
    parent = shared_memory if roomy else None
    with tempfile.TemporaryDirectory(prefix="kvbus-agents-", dir=parent) as folder:
        yield Path(folder).resolve()


SystemOf = Callable[[str, tuple[str, ...], int], System]


@pytest.fixture(scope="session")
def system_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemOf]:
    """Systems by model format, settings and context length. One runs at a time: a test that needs another ends the last."""
    with ExitStack() as current:
        key: tuple[str, tuple[str, ...], int] | None = None
        running: System | None = None

        def system(model_format: str, settings: tuple[str, ...], context_length: int) -> System:
            nonlocal key, running
            wanted = (model_format, settings, context_length)
            if running is None or key != wanted:
                current.close()
                folder = tmp_path_factory.mktemp("system")
                running = current.enter_context(System(folder, FORMATS[model_format], settings, context_length))
                key = wanted
            return running

        yield system


@pytest.fixture
def start_stage(
    request: pytest.FixtureRequest, memory_folder: Path, system_of: SystemOf, tmp_path: Path
) -> Iterator[StartStage]:
    """Sets a client and a system up: ``start_stage(client, model_format="xml", settings=(), context_length=...)``."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    folder = memory_folder / name[-40:].strip("-")
    stages: list[Stage] = []

    with ExitStack() as stack:

        def start(
            client: Client,
            model_format: str = "xml",
            settings: Sequence[str] = (),
            context_length: int = CONTEXT_LENGTH,
        ) -> Stage:
            for needed in ((client.name, client.version), ("node", versions_of("node")[0])):
                if not is_installed(*needed):
                    pytest.skip("{} {} is not installed".format(*needed))
            system = system_of(model_format, tuple(settings), context_length)
            recorder = stack.enter_context(Recorder(system.url))
            home = folder / str(len(stages))
            home.mkdir(parents=True)
            stages.append(Stage(client, system, recorder, home, tmp_path))
            return stages[-1]

        yield start
        passed = request.node.stash.get(_PASSED, False)
        scenario = request.node.originalname.removeprefix("test_").replace("_", " ")
        parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        details = [str(value) for name, value in parameters.items() if name not in ("client", "model_format")]
        for stage in stages:
            stage.end()
            request.config.stash[_ROWS].append(
                stage.row(" ".join([scenario, *details]), "passed" if passed else "failed")
            )
    shutil.rmtree(folder, ignore_errors=True)
