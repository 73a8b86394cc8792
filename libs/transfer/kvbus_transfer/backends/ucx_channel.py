"""One UCX worker that reads the memory of one peer."""

import ctypes
import os
from typing import Any

from kvbus_transfer.backends.ucx_library import FIRST_ERROR, IN_PROGRESS, OnError, RequestParams, UcxError, UcxLibrary
from kvbus_transfer.copying import Pieces, address_of

ENTRY_BYTES = 8
"""Of the lease table."""
_EMULATED = {"tcp", "self", "sysv", "posix"}
"""Over these the owner's processor would answer reads, of any address that it is asked for. Tagged messages do that better."""
_KEYS_KEPT = 64
_TRIES = 16
_BYTES_PER_TRY = 64 << 10
"""cma copies 512 KiB or more each time that it is asked to go on."""


def direct_transports(wanted: str | None = None) -> str:
    """What UCX may use to read memory, of what ``UCX_TLS`` (by default) allows: no tcp. Empty when nothing is left."""
    wanted = (os.environ.get("UCX_TLS", "") if wanted is None else wanted) or "all"
    if wanted.startswith("^"):
        return f"{wanted},tcp"
    names = [name for name in wanted.split(",") if name not in ("tcp", "")]
    if "all" in names:
        return "^tcp"
    return ",".join(names) if set(names) - {"self"} else ""


class ChannelFailed(Exception):
    pass


class Unreachable(ChannelFailed):
    """This peer cannot be read so, from here."""


class Channel:
    """One read uses it at a time, from one thread at a time: it has a context of its own. After an error it is good for nothing;
    once `close` has returned, nothing writes to the targets of reads that had not ended."""

    def __init__(self, ucx: UcxLibrary, address: bytes) -> None:
        """It takes some milliseconds: call it in a thread. Raise Unreachable."""
        self.is_proven = False
        self.failure = ""
        self._ucx = ucx
        self._keys: dict[bytes, int] = {}
        self._pending: list[int] = []
        self._entry = memoryview(bytearray(ENTRY_BYTES))
        self._entry_address = address_of(self._entry)
        self._params = RequestParams()
        self._params_address = ctypes.addressof(self._params)
        errors: list[int] = []
        self._errors = errors
        self._on_error = OnError(lambda _argument, _endpoint, status: errors.append(status))
        self._worker: Any = None
        try:
            self._worker = ucx.binding.UCXWorker(ucx.context((ucx.binding.Feature.RMA,), direct_transports()))
            self._handle = int(self._worker.handle)
            self._endpoint = ucx.connect(self._handle, address, self._on_error)
            if ucx.transports(self._endpoint) <= _EMULATED:
                raise Unreachable("UCX has no way to read its memory")
        except Exception as error:  # the library has exceptions of its own without a common root
            self.close()  # now: the error's traceback may keep this object for long, and with it a dozen file descriptors
            raise Unreachable(str(error)) from error

    @property
    def is_good(self) -> bool:
        """Nothing is under way and nothing went wrong."""
        return not (self._pending or self.failure or self._errors)

    def read(self, pieces: Pieces, key: bytes, entry: tuple[int, bytes]) -> bool:
        """All at once: `post` the pieces, and ``entry`` (address and key) once they are there, which is seldom later than now.
        True when all is there; else let them end, and read the entry after that. Raise ChannelFailed."""
        self.post(pieces, key)
        if self._pending:
            return False
        self.post_entry(*entry)
        return not self._pending

    def post(self, pieces: Pieces, key: bytes) -> None:
        """Read (to, from, length). What the kernel copies is there when it returns, the rest when `progress` says so.

        Raise ChannelFailed."""
        ucx, worker, endpoint = self._ucx, self._handle, self._endpoint
        params = self._params_address
        unpacked = self._unpacked(key)
        for to, source, length in pieces:
            request = ucx.get(endpoint, to, length, source, unpacked, params)
            if request is None:
                continue
            if request >= FIRST_ERROR:
                raise self._fail(f"a read ended with status {request - 2**64}")
            tries = 1 if self._pending else _TRIES + length // _BYTES_PER_TRY
            while (status := ucx.status_of(request)) == IN_PROGRESS and tries:
                ucx.progress(worker)
                tries -= 1
            self._take(request, status)

    def post_entry(self, source: int, key: bytes) -> None:
        """Read an entry of the lease table. Raise ChannelFailed."""
        self.post([(self._entry_address, source, ENTRY_BYTES)], key)

    def entry(self) -> bytes:
        return bytes(self._entry)

    def progress(self) -> bool:
        """Go on; is anything still under way? Raise ChannelFailed."""
        if self._pending:
            self._ucx.progress(self._handle)
            requests, self._pending = self._pending, []
            for at, request in enumerate(requests):
                try:
                    self._take(request, self._ucx.status_of(request))
                except ChannelFailed:
                    self._pending += requests[at + 1 :]
                    raise
            if self._errors and self._pending:
                raise self._fail("the connection failed")
        return bool(self._pending)

    def close(self) -> None:
        """It takes some milliseconds: call it in a thread. Idempotent."""
        self.failure = self.failure or "closed"
        for key in self._keys.values():
            self._ucx.destroy(key)
        self._keys.clear()
        self._worker = None  # ends its endpoint, and what is under way
        self._pending.clear()

    def __del__(self) -> None:
        self.close()

    def _take(self, request: int, status: int) -> None:
        if status == IN_PROGRESS:
            self._pending.append(request)
            return
        self._ucx.free(request)
        if status != 0:
            raise self._fail(f"a read ended with status {status}")

    def _fail(self, why: str) -> ChannelFailed:
        self.failure = f"UCX: {why}"
        return ChannelFailed(self.failure)

    def _unpacked(self, key: bytes) -> int:
        known = self._keys.pop(key, None)
        if known is None:
            try:
                known = self._ucx.unpack(self._endpoint, key)
            except UcxError as error:
                raise self._fail(str(error)) from error
            while len(self._keys) >= _KEYS_KEPT and not self._pending:
                self._ucx.destroy(self._keys.pop(next(iter(self._keys))))
        self._keys[key] = known
        return known
