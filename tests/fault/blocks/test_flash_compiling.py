"""A process that dies while the index's code is compiled leaves nothing behind that goes on compiling."""

import subprocess
import sys
from pathlib import Path

from kvbus_testkit.timing import eventually_sync


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_compiling(pid: int) -> bool:
    try:
        return b"kvbus_blocks.flash.build" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_the_compiler_ends_with_the_process_that_wants_its_code() -> None:
    asker = subprocess.Popen([sys.executable, "-c", "from kvbus_blocks.flash import compiled; compiled._compile()"])
    try:
        compiler = eventually_sync(
            lambda: next((child for child in children(asker.pid) if is_compiling(child)), 0), what="a compiler"
        )
    finally:
        asker.kill()
        asker.wait()
    eventually_sync(lambda: not is_compiling(compiler), timeout_s=30, what="the end of the compiler")
