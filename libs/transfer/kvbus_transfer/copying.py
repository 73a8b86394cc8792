"""Copies between mapped memory that do not hold the interpreter's lock."""

import ctypes
from collections.abc import Sequence
from typing import Any

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None


def address_of(buffer: Any) -> int:
    """Where the bytes of a contiguous buffer lie, read-only ones too. Keep the buffer alive while the address is used.

    Raise BufferError, TypeError.
    """
    view = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(view), 0)  # PyBUF_SIMPLE: contiguous, or an error
    address = view.buf or 0
    _release_buffer(ctypes.byref(view))
    return int(address)


Pieces = Sequence[tuple[int, int, int]]
"""(to, from, length): addresses."""


def copy_pieces(pieces: Pieces) -> None:
    """Copy (to, from, length) by address. The caller answers for the addresses."""
    for to, source, length in pieces:
        _memmove(to, source, length)
