"""The compiled kernels as functions: from a file of an earlier process, or compiled now by another process and kept.

Errors: `CannotCompile`.
"""

import ctypes
import fcntl
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm

ARGUMENTS = {"store": 9, "remove": 7, "clear": 3, "settle": 1, "copy_held": 4, "match": 7, "resize": 7}
"""How many words each kernel takes."""
COMPILE_TIMEOUT_S = 300.0
_ROOT = Path(__file__).parent
_DIGEST_BYTES = sha256().digest_size


class CannotCompile(Exception):
    """``reason`` for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Kernels(NamedTuple):
    """Each releases the interpreter's lock while it runs. ``engine`` owns their code."""

    store: Callable[..., None]
    remove: Callable[..., None]
    clear: Callable[..., None]
    settle: Callable[..., None]
    copy_held: Callable[..., None]
    match: Callable[..., int]
    resize: Callable[..., None]
    engine: Any


def target_machine() -> Any:
    """This processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic"
    )


def default_folder() -> Path:
    """Where compiled code is kept: KVBUS_CACHE_DIR, else XDG_CACHE_HOME, else the user's cache."""
    own = os.environ.get("KVBUS_CACHE_DIR")
    return (
        Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbus"
    ) / "compiled"


def load(folder: Path | None) -> Kernels:
    """Takes seconds when nothing fits in the folder (None or not writable: nothing is kept). Raise CannotCompile."""
    machine = target_machine()
    return _linked(_object_code(folder), machine)


def _object_code(folder: Path | None) -> bytes:
    if folder is None:
        return _compile()
    file = folder / f"flash-{_fingerprint()}.o"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(file.with_suffix(".lock")):
            code = _kept(file)
            if code is None:
                code = _compile()
                with suppress(OSError):
                    _keep(file, code)
            return code
    except OSError:
        # Not writable; what somebody else has put there will do.
        return _kept(file) or _compile()


def _fingerprint() -> str:
    """Of all that the object file depends on."""
    digest = sha256()
    for source in sorted([*_ROOT.glob("kernels/*.py"), _ROOT / "layout.py", _ROOT / "build.py"]):
        digest.update(source.read_bytes())
    digest.update(importlib.metadata.version("llvmlite").encode())
    digest.update(f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}".encode())
    return digest.hexdigest()[:32]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process compiles, others wait for what it makes."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(file: Path, code: bytes) -> None:
    """Behind its SHA-256."""
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        scratch.write_bytes(sha256(code).digest() + code)
        scratch.replace(file)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def _kept(file: Path) -> bytes | None:
    """None where there is nothing, or not all of it: LLVM ends the process over code that was cut."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if sha256(code).digest() == digest else None


def _compile() -> bytes:
    command = [sys.executable, "-m", "kvbus_blocks.flash.build", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CannotCompile(str(problem)) from problem
    if done.returncode:
        raise CannotCompile(done.stderr.decode(errors="replace").strip()[-2000:] or f"exit status {done.returncode}")
    return done.stdout


def _linked(code: bytes, machine: Any) -> Kernels:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()

    def function(name: str) -> Callable[..., Any]:
        result = ctypes.c_int64 if name == "match" else None
        # Words; a pointer type takes addresses, numbers and the data of bytes objects alike.
        kind = ctypes.CFUNCTYPE(result, *[ctypes.c_void_p] * ARGUMENTS[name])
        return kind(engine.get_function_address(name))

    return Kernels(**{name: function(name) for name in ARGUMENTS}, engine=engine)
