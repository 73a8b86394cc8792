"""The folder tree, the wheel, mypy and the import rules name the same packages."""

import configparser
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = sorted(path for path in (*ROOT.glob("libs/*/kvbus_*"), *ROOT.glob("services/*/kvbus_*")) if path.is_dir())
SERVICES = sorted(path.parent.name for path in PACKAGES if path.parent.parent.name == "services")
DEFAULTS_OF_SHAPE = ("__main__.py", "cli.py", "app.py", "settings.py")


def test_each_folder_holds_the_package_of_its_name() -> None:
    assert [path.name for path in PACKAGES] == [f"kvbus_{path.parent.name}" for path in PACKAGES]


def test_the_wheel_holds_every_package() -> None:
    packaged = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packaged) == sorted(str(path.relative_to(ROOT)) for path in PACKAGES)


def test_mypy_checks_every_package() -> None:
    assert sorted(PYPROJECT["tool"]["mypy"]["packages"]) == sorted(path.name for path in PACKAGES)


def test_the_import_rules_know_every_package() -> None:
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    assert rules["importlinter"]["root_packages"].split() == sorted(path.name for path in PACKAGES)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_each_package_is_typed(package: Path) -> None:
    assert (package / "__init__.py").is_file()
    assert (package / "py.typed").is_file()


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_the_same_shape(service: str) -> None:
    folder = ROOT / "services" / service
    assert (folder / "README.md").is_file()
    package = folder / f"kvbus_{service}"
    assert [name for name in DEFAULTS_OF_SHAPE if not (package / name).is_file()] == []
    assert [name for name in ("core", "handlers", "adapters") if not (package / name / "__init__.py").is_file()] == []


def test_test_files_have_unique_names_within_their_folder_and_no_package_files() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
