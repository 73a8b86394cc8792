"""Each module imports alone, and only the torch engine imports torch."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus_testkit.timing import scaled

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path.name for path in (*ROOT.glob("libs/*/kvbus_*"), *ROOT.glob("services/*/kvbus_*")) if path.is_dir()
)
TORCH_ONLY = "kvbus_worker.engines.torch"

LIBRARIES = [
    *("aiohttp.web", "asyncio", "jinja2", "msgspec", "nats", "numpy"),
    *("prometheus_client", "rich.progress", "structlog", "tokenizers", "uvloop"),
]

# Each module in a fork of an interpreter that has imported nothing of ours: as good as a fresh one, and fast, since the libraries
# of other people are loaded once.
IMPORT_EACH = """
import importlib, json, os, sys, traceback
from contextlib import suppress
names, libraries = json.loads(sys.argv[1])
for library in libraries:
    with suppress(ModuleNotFoundError):
        importlib.import_module(library)
with_torch = "torch" in sys.modules
problems = {}
for name in names:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            importlib.import_module(name)
            text = "imports torch" if "torch" in sys.modules and not with_torch else ""
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode()[-3000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if text:
        problems[name] = text
print(json.dumps(problems))
"""


def modules_of(package: str) -> list[str]:
    """Found by name only: importing them is what is tested."""
    kind = "services" if (ROOT / "services" / package.removeprefix("kvbus_")).is_dir() else "libs"
    folder = ROOT / kind / package.removeprefix("kvbus_") / package
    found = [package]
    for file in sorted(folder.rglob("*.py")):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        if parts[-1] != "__main__":
            found.append(".".join(part for part in parts if part != "__init__"))
    return sorted(set(found))


def problems_of(names: list[str], libraries: list[str]) -> dict[str, str]:
    command = [sys.executable, "-W", "error", "-c", IMPORT_EACH, json.dumps([names, libraries])]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(110))
    problems: dict[str, str] = json.loads(result.stdout)
    return problems


@pytest.mark.parametrize("package", PACKAGES)
def test_each_module_imports_alone_and_without_torch(package: str) -> None:
    names = [name for name in modules_of(package) if not name.startswith(TORCH_ONLY)]
    assert problems_of(names, LIBRARIES) == {}


def test_each_module_of_the_torch_engine_imports_alone() -> None:
    pytest.importorskip("torch")
    names = [name for name in modules_of("kvbus_worker") if name.startswith(TORCH_ONLY)]
    assert problems_of(names, ["torch"]) == {}


def test_every_package_is_importable_from_this_environment() -> None:
    known = {module.name for module in pkgutil.iter_modules() if module.name.startswith("kvbus_")}
    assert set(PACKAGES) <= known
