"""Compiles the kernels with numba: ``python -m kvbus_blocks.flash.build PARENT_PID`` writes one object file for this processor to
its output, and ends when its parent does.

In a process of its own, since numba costs a hundred megabytes and seconds that a service should not pay; what it makes needs
neither numba nor numpy. A kernel is known by its own name in the object file; nothing in it refers to anything outside.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types

from kvbus_blocks.flash.compiled import ARGUMENTS, target_machine
from kvbus_blocks.flash.kernels import changes, matching, sets

_PR_SET_PDEATHSIG = 1
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "store": changes.store,
    "remove": changes.remove,
    "clear": changes.clear,
    "settle": changes.settle,
    "copy_held": changes.copy_held,
    "match": matching.match,
    "resize": sets.resize,
}


def object_code() -> bytes:
    """The object file with all kernels."""
    machine = target_machine()
    module: Any = None
    for name, function in _FUNCTIONS.items():
        result = types.int64 if name == "match" else types.void
        compiled = numba.cfunc(result(*[types.int64] * ARGUMENTS[name]), error_model="numpy")(function)
        part = llvm.parse_assembly(compiled.inspect_llvm())
        part.get_function(compiled.native_name).name = name
        if module is None:
            module = part
        else:
            module.link_in(part)
    for function in module.functions:
        if not function.is_declaration and function.name not in _FUNCTIONS:
            function.linkage = "internal"
    # numba's wrappers report exceptions; inlined, it shows that there are none, and the reporting is dropped.
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def _end_with(parent: int) -> None:
    """Nobody waits for the code when the process that wants it has gone; compiling takes seconds."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it went before the call
        raise SystemExit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    sys.stdout.buffer.write(object_code())
