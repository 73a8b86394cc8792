"""`kvbus model list` and `kvbus model get NAME`: the models that kvbus can prepare by itself."""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvbus_cli.paths import models_dir
from kvbus_runtime.arguments import ArgumentParser

DEFAULT_MODEL = "smollm2"


class Preparation(msgspec.Struct, frozen=True):
    """``module`` has ``folder(cache_dir)`` (exists when prepared) and ``prepare(cache_dir, progress)``."""

    module: str
    description: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


MODELS = {
    "smollm2": Preparation(
        "kvbus_worker.models.smollm2", "SmolLM2-135M-Instruct, Apache-2.0: 93 MB to fetch, 270 MB on disk"
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus model",
        description="Models that kvbus can prepare by itself, kept in ~/.cache/kvbus/models (KVBUS_CACHE_DIR: another folder).",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="names of the models and whether they are prepared")
    get = verbs.add_parser("get", help="fetch and convert a model once; prints its folder")
    get.add_argument("name", choices=sorted(MODELS))
    get.add_argument("--link", type=Path, default=None, metavar="PATH", help="make PATH a symbolic link to the folder")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    return _list() if arguments.verb == "list" else _get(arguments.name, arguments.link)


def _folder(name: str) -> Path:
    folder: Path = MODELS[name].load().folder(models_dir())
    return folder


def _list() -> int:
    for name, preparation in MODELS.items():
        folder = _folder(name)
        print(f"{name}: {preparation.description}; {folder if folder.is_dir() else 'not prepared yet'}")
    return 0


def _get(name: str, link: Path | None) -> int:
    """The folder goes to stdout, the progress to stderr."""
    errors = importlib.import_module("kvbus_worker.models.errors")
    console = Console(stderr=True)
    if not _folder(name).is_dir():
        console.print(f"preparing the model {name} in {models_dir()}: {MODELS[name].description}", highlight=False)
    try:
        with _Bars(console) as bars:
            folder: Path = MODELS[name].load().prepare(models_dir(), bars.update)
        if link is not None:
            _link(link, folder)
    except (errors.ModelError, OSError) as error:
        print(f"kvbus model: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _link(link: Path, folder: Path) -> None:
    """Replaced in one step, so that a reader never finds nothing. Raise OSError (also when PATH is no link)."""
    if link.exists() and not link.is_symlink():
        raise FileExistsError(f"{link} exists and is no symbolic link")
    temporary = link.with_name(f"{link.name}.{os.getpid()}")
    temporary.symlink_to(folder)
    temporary.replace(link)


class _Bars:
    """A progress bar per step on a terminal; elsewhere one line when a step begins and ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("  {task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._finished: set[str] = set()

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, step: str, done: int, total: int) -> None:
        if step not in self._tasks:
            self._tasks[step] = self._progress.add_task(step, total=total)
            self._line(f"{step} ..")
        self._progress.update(self._tasks[step], completed=done, total=total)
        if done >= total and step not in self._finished:
            self._finished.add(step)
            self._line(f"{step} done")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"  {text}", highlight=False)


def prepared_model(name: str) -> str:
    """The folder of the model, prepared first if need be. Raise ChildProcessError.

    The conversion runs in a process of its own, so its memory is gone before the services start.
    """
    folder = _folder(name)
    if not folder.is_dir():
        command = [sys.executable, "-m", "kvbus_cli", "model", "get", name]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise ChildProcessError(f"'kvbus model get {name}' failed")
    return str(folder)


def prepared_folder(name: str) -> Path | None:
    """The folder of the model; None when it is not prepared."""
    folder = _folder(name)
    return folder if folder.is_dir() else None
