"""UCX: contexts and workers by its Python binding ucxx, and the calls of UCX's C interface (ucp.h) that the binding lacks, to read
another process's memory. The layouts below are of ucp.h 1.21; UCX only ever adds fields at the end, behind bits of `mask`.
"""

import ctypes
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvbus_transfer.backends.base import BackendUnavailable

NAME = "ucx"
_SONAME = "libucp.so.0"
"""As ucxx has loaded it: the loader finds it by this name. (NIXL brings a UCX of its own under another.)"""
_CONFIG = {
    # What ucxx sets for device memory makes host memory slow.
    "RNDV_FRAG_MEM_TYPE": "host",
    # What cma copies each time that it is asked to go on: threads wait for the interpreter in between.
    "CMA_SEG_SIZE": "8m",
    "TCP_SNDBUF": "4m",
    "TCP_RCVBUF": "4m",
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
}
_ADDRESS, _LENGTH = 1, 2
_REMOTE_ADDRESS, _ERR_MODE, _ERR_HANDLER = 1, 2, 4
_TRANSPORTS = 8
_NAME_BYTES = 32
_SOCKADDR_BYTES = 128
IN_PROGRESS = 1
FIRST_ERROR = 2**64 - 100
"""A pointer from here on is a status."""

_Pointer = ctypes.c_void_p
_Status = ctypes.c_int8  # a packed enum
OnError = ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Status)


class _MapParams(ctypes.Structure):
    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("address", _Pointer),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported_memh_buffer", _Pointer),
    ]


class _SocketAddress(ctypes.Structure):
    _fields_ = [("address", _Pointer), ("length", ctypes.c_uint32)]


class _EndpointParams(ctypes.Structure):
    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("address", ctypes.c_char_p),
        ("err_mode", ctypes.c_int),
        ("on_error", OnError),
        ("on_error_argument", _Pointer),
        ("user_data", _Pointer),
        ("flags", ctypes.c_uint),
        ("sockaddr", _SocketAddress),
        ("conn_request", _Pointer),
        ("name", ctypes.c_char_p),
        ("local_sockaddr", _SocketAddress),
    ]


class _Transport(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class _EndpointAttributes(ctypes.Structure):
    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("local_sockaddr", ctypes.c_uint64 * (_SOCKADDR_BYTES // 8)),
        ("remote_sockaddr", ctypes.c_uint64 * (_SOCKADDR_BYTES // 8)),
        ("transports", ctypes.POINTER(_Transport)),
        ("count", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", _Pointer),
    ]


class RequestParams(ctypes.Structure):
    """With a mask of 0 UCX looks at nothing else and finds out by itself what kind of memory it is."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", _Pointer),
        ("callback", _Pointer),
        ("datatype", ctypes.c_uint64),
        ("user_data", _Pointer),
        ("reply_buffer", _Pointer),
        ("memory_type", ctypes.c_int),
        ("recv_info", _Pointer),
        ("memh", _Pointer),
    ]


class UcxError(Exception):
    """``status``: of UCX, negative."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"UCX: {what}: status {status}")
        self.status = status


class UcxLibrary:
    """Raise OSError when UCX's library is not what ucxx has loaded."""

    def __init__(self, binding: Any, arrays: Any) -> None:
        self.binding = binding
        self.array: Callable[[Any], Any] = arrays.Array
        releasing = ctypes.CDLL(_SONAME)  # these may copy: other threads go on meanwhile
        holding = ctypes.PyDLL(_SONAME)
        self.get = _function(
            releasing.ucp_get_nbx, _Pointer, _Pointer, _Pointer, ctypes.c_size_t, ctypes.c_uint64, _Pointer, _Pointer
        )
        self.progress = _function(releasing.ucp_worker_progress, ctypes.c_uint, _Pointer)
        self.status_of = _function(holding.ucp_request_check_status, _Status, _Pointer)
        self.free = _function(holding.ucp_request_free, None, _Pointer)
        self._map = _function(releasing.ucp_mem_map, _Status, _Pointer, _Pointer, _Pointer)
        self._unmap = _function(releasing.ucp_mem_unmap, _Status, _Pointer, _Pointer)
        self._pack = _function(releasing.ucp_rkey_pack, _Status, _Pointer, _Pointer, _Pointer, _Pointer)
        self._release = _function(releasing.ucp_rkey_buffer_release, None, _Pointer)
        self._unpack = _function(releasing.ucp_ep_rkey_unpack, _Status, _Pointer, ctypes.c_char_p, _Pointer)
        self._destroy = _function(releasing.ucp_rkey_destroy, None, _Pointer)
        self._connect = _function(releasing.ucp_ep_create, _Status, _Pointer, _Pointer, _Pointer)
        self._query = _function(releasing.ucp_ep_query, _Status, _Pointer, _Pointer)

    def context(self, features: tuple[Any, ...], transports: str = "") -> Any:
        """``transports``: instead of what UCX_TLS says."""
        config = {name: value for name, value in _CONFIG.items() if f"UCX_{name}" not in os.environ}
        if transports:
            config["TLS"] = transports
        return self.binding.UCXContext(config, features)

    def map(self, context: int, address: int, size_bytes: int) -> tuple[int, bytes]:
        """(handle for `unmap`, key for readers). Raise UcxError."""
        params = _MapParams(mask=_ADDRESS | _LENGTH, address=address, length=size_bytes)
        memory, buffer, length = _Pointer(), _Pointer(), ctypes.c_size_t()
        _check("ucp_mem_map", self._map(context, ctypes.byref(params), ctypes.byref(memory)))
        handle = memory.value or 0
        try:
            _check("ucp_rkey_pack", self._pack(context, handle, ctypes.byref(buffer), ctypes.byref(length)))
        except UcxError:
            self.unmap(context, handle)
            raise
        key = ctypes.string_at(buffer.value or 0, length.value)
        self._release(buffer)
        return handle, key

    def unmap(self, context: int, memory: int) -> None:
        self._unmap(context, memory)

    def connect(self, worker: int, address: bytes, on_error: Any) -> int:
        """An endpoint; it ends with its worker. Raise UcxError.

        It does not "handle errors" in UCX's sense, for such endpoints do not copy by cma. That there is a handler is what counts:
        without one UCX takes the whole process down when the other one has died, or has unmapped what is read."""
        params = _EndpointParams(
            mask=_REMOTE_ADDRESS | _ERR_MODE | _ERR_HANDLER, address=address, err_mode=0, on_error=on_error
        )
        endpoint = _Pointer()
        _check("ucp_ep_create", self._connect(worker, ctypes.byref(params), ctypes.byref(endpoint)))
        return endpoint.value or 0

    def transports(self, endpoint: int) -> set[str]:
        """Which an endpoint uses. Raise UcxError."""
        entries = (_Transport * 64)()
        attributes = _EndpointAttributes(
            mask=_TRANSPORTS, transports=entries, count=len(entries), entry_size=ctypes.sizeof(_Transport)
        )
        _check("ucp_ep_query", self._query(endpoint, ctypes.byref(attributes)))
        return {entries[at].name.decode() for at in range(attributes.count) if entries[at].name}

    def unpack(self, endpoint: int, key: bytes) -> int:
        """To be given to `destroy` before the endpoint ends. Raise UcxError."""
        unpacked = _Pointer()
        _check("ucp_ep_rkey_unpack", self._unpack(endpoint, key, ctypes.byref(unpacked)))
        return unpacked.value or 0

    def destroy(self, unpacked_key: int) -> None:
        self._destroy(unpacked_key)


def _function(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    found: Callable[..., Any] = function
    return found


def _check(what: str, status: int) -> None:
    if status != 0:
        raise UcxError(what, status)


def load() -> UcxLibrary:
    """Raise BackendUnavailable."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # it writes to stderr by itself; errors arrive as exceptions, too
    try:
        with _environment_kept():
            binding = importlib.import_module("ucxx._lib.libucxx")
            arrays = importlib.import_module("ucxx._lib.arr")
        return UcxLibrary(binding, arrays)
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailable(f"UCX is not installed (pip install 'kvbus[ucx]'): {error}") from error


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Importing it sets variables for device memory, which would count for NIXL's UCX as well."""
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
