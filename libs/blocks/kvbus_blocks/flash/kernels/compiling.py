"""What kernels are made of: typed decorators, and the few machine operations that numba has no name for."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
_pointer: Any = types.CPointer
_cgutils: Any = cgutils


class Words(Protocol):
    """Signed integers from some address on. Bounds are never checked."""

    def __getitem__(self, index: int) -> int: ...

    def __setitem__(self, index: int, value: int) -> None: ...


def inner(function: Function) -> Function:
    """A function that kernels call."""
    return cast("Function", numba.njit(nogil=True, error_model="numpy")(function))


def _words(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


def _words64(_context: Any, _address: Any) -> Any:
    return _pointer(types.int64)(types.int64), _words


def _words32(_context: Any, _address: Any) -> Any:
    return _pointer(types.int32)(types.int64), _words


def _fence(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), codegen


def _trailing_zeros(_context: Any, _word: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.int64), codegen


def _prefetch(_context: Any, _address: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(arguments[0], byte), number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


words64 = cast("Callable[[int], Words]", intrinsic(_words64))
"""The 64-bit words at an address."""
words32 = cast("Callable[[int], Words]", intrinsic(_words32))
"""The 32-bit words at an address."""
fence = cast("Callable[[], None]", intrinsic(_fence))
"""Loads and stores before it happen before those after it: for the compiler, and where it matters for the processor."""
prefetch = cast("Callable[[int], None]", intrinsic(_prefetch))
"""Fetch the cache line at an address, which need not exist, and go on meanwhile."""
trailing_zeros = cast("Callable[[int], int]", intrinsic(_trailing_zeros))
"""Of a word that is not 0."""
