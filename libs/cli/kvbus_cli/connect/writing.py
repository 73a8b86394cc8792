"""Configuration files on the disk: merged, with a copy of what was there, replaced in one step."""

import os
from pathlib import Path

from kvbus_cli.connect.configuration import ConfigFile
from kvbus_cli.connect.merging import CannotMerge, merged_text


class CannotWrite(Exception):
    """A file could not be read, merged or written; the text is one line."""


def write_files(files: tuple[ConfigFile, ...], home: Path) -> list[tuple[Path, Path | None]]:
    """Each file that had to change, and where its former content is kept. Raise CannotWrite.

    All texts are made before the first file is touched.
    """
    changes = []
    for file in files:
        path = _target(home / file.path)
        before = _read(path)
        try:
            after = merged_text(before or "", file)
        except CannotMerge as problem:
            raise CannotWrite(f"{path} {problem}; merge by hand what is printed without --write") from problem
        if after != before:
            changes.append((path, before, after, None if before is None or file.owned else _free_name(path)))
    for path, before, after, backup in changes:
        _replace(path, before, after, backup)
    return [(path, backup) for path, _, _, backup in changes]


def _target(path: Path) -> Path:
    """A link stays one."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise CannotWrite(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> str | None:
    """With the line ends that it has."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CannotWrite(f"{path} cannot be read: {error}") from error


def _replace(path: Path, before: str | None, after: str, backup: Path | None) -> None:
    """A new file is its owner's alone: it may hold a key."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if before is not None else 0o600
        if before is not None and backup is not None:
            _create(backup, before, mode)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            _create(temporary, after, mode)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error}") from error


def _create(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    os.fchmod(descriptor, mode)  # whatever the umask
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def _free_name(path: Path) -> Path:
    number = 1
    while (found := path.with_name(f"{path.name}.backup-{number}")).exists():
        number += 1
    return found
