"""Opens a trace of either format, compressed or not."""

import gzip
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

from kvbus_replay.trace.agent_format import MAX_LINE_BYTES, AgentTraceReader
from kvbus_replay.trace.calls import Call, Trace, TraceError
from kvbus_replay.trace.mooncake import BLOCK_TOKENS, read_mooncake

_MARK = b'"kind"'


def read_trace(path: Path, *, mooncake_block_size: int = BLOCK_TOKENS, max_calls: int = 0) -> Trace:
    """The format is told from the first line. ``max_calls`` 0: all. Raise TraceError."""
    name = str(path)
    try:
        with _open(path) as file:
            lines = _lines(name, file)
            first = next(lines, None)
            if first is None:
                raise TraceError(name, 0, "the trace is empty")
            lines = chain((first,), lines)
            if _MARK in first[:4096]:
                reader = AgentTraceReader(name)
                calls = _take(reader.read(lines), max_calls)
                return Trace(path.name, reader.block_size, calls)
            calls = _take(read_mooncake(name, lines, mooncake_block_size), max_calls)
            return Trace(path.name, mooncake_block_size, calls)
    except (OSError, EOFError, zlib.error) as problem:
        raise TraceError(name, 0, str(problem)) from problem


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(name: str, file: IO[bytes]) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(name, number, f"the line is longer than {MAX_LINE_BYTES} bytes")
        yield line


def _take(calls: Iterator[Call], most: int) -> list[Call]:
    if not most:
        return list(calls)
    return [call for _, call in zip(range(most), calls, strict=False)]
