"""The pinned clients, and where they are installed: a cache folder outside of the tree."""

import os
import tomllib
from pathlib import Path

import msgspec

HERE = Path(__file__).parent


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One client of pins.toml. ``npm``: the package. ``pypi``: packages, the first of which has the version."""

    versions: tuple[str, ...]
    npm: str = ""
    pypi: tuple[str, ...] = ()


def pins() -> dict[str, Pin]:
    return msgspec.convert(tomllib.loads((HERE / "pins.toml").read_text()), dict[str, Pin])


def versions_of(client: str) -> tuple[str, ...]:
    return pins()[client].versions


def cache_folder() -> Path:
    return Path(os.environ.get("KVBUS_AGENTS_CACHE") or Path.home() / ".cache" / "kvbus" / "agents").resolve()


def folder_of(client: str, version: str) -> Path:
    return cache_folder() / f"{client}-{version}"


def is_installed(client: str, version: str) -> bool:
    return marker_of(client, version).exists()


def marker_of(client: str, version: str) -> Path:
    """Exists when the folder is complete."""
    return folder_of(client, version) / ".kvbus-installed"


def node_bin() -> Path:
    """The folder of the pinned `node`."""
    return folder_of("node", versions_of("node")[0]) / "node_modules" / "node" / "bin"
