"""Threads for calls that may hang for ever. A thread pool of the standard library would hang the end of the process with them."""

import ctypes
import mmap
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvbus_transfer import host_memory

T = TypeVar("T")


class Buffer:
    """Memory aligned for O_DIRECT, reused from call to call; it grows to the largest size that was asked for.

    On huge pages, where the kernel has some: a disk is given a list of pieces of physical memory, and one whose memory lies in
    scattered pages of 4 KiB read 1.2 GB/s instead of 3.
    """

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def view(self, size_bytes: int) -> memoryview:
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = host_memory(max(size_bytes, mmap.PAGESIZE))
        return self._memory[:size_bytes]


class IoThreads:
    """``count`` daemon threads, each with a `Buffer` for its calls, started with the first call."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._calls: queue.SimpleQueue[Callable[[Buffer], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[Buffer], T]) -> "Future[T]":
        if not self._threads:
            for number in range(self._count):
                thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        future: Future[T] = Future()

        def run(buffer: Buffer) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(buffer))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def stop(self) -> None:
        """The threads end after what they do now; nobody waits for them."""
        for _ in self._threads:
            self._calls.put(None)

    def _run(self) -> None:
        buffer = Buffer()
        while (call := self._calls.get()) is not None:
            call(buffer)


def copy(into: memoryview, data: memoryview) -> None:
    """Without the lock of the interpreter where that can be had."""
    if data.readonly:
        into[:] = data
        return
    size = data.nbytes
    ctypes.memmove((ctypes.c_char * size).from_buffer(into), (ctypes.c_char * size).from_buffer(data), size)
