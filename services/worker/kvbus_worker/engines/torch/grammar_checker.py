"""Asks `grammar_check`, in its process, whether what a request wrote can be followed at bearable cost."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

from kvbus_wire.errors import ErrorCode
from kvbus_worker.engines.base import EngineError
from kvbus_worker.engines.torch.grammar import BadGrammar, Source

CHILD = "kvbus_worker.engines.torch.grammar_check"
_LINE_BYTES = 64 << 20
_TOO_EXPENSIVE = "it is too expensive to follow"
PATIENCE = 8
"""How much longer a check may take than its time on a processor: with so little of that, it is not the grammar's fault."""


class GrammarChecker:
    """Has a child process from the first check on. One check at a time. For the event loop.

    ``limit_s``: processor time, in whole seconds. ``patience``: see `PATIENCE`.
    """

    def __init__(self, limit_s: int, limit_bytes: int, *, patience: float = PATIENCE) -> None:
        self._limit_s = limit_s
        self._longest_s = limit_s * patience
        self._limit_bytes = limit_bytes
        self._child: asyncio.subprocess.Process | None = None

    async def check(self, source: Source) -> None:
        """Raise BadGrammar, EngineError when the machine is too busy to tell."""
        child = await self._running()
        line = json.dumps([source.kind, source.text, source.strict]).encode() + b"\n"
        try:
            async with asyncio.timeout(self._longest_s):
                answer = await _ask(child, line)
        except TimeoutError as error:
            await self.close()
            raise EngineError(ErrorCode.OVERLOADED, "no time to look at a grammar", retryable=True) from error
        except asyncio.CancelledError:
            await self.close()  # it still works on what nobody waits for
            raise
        if not answer:
            await self.close()
        problem = json.loads(answer) if answer else _TOO_EXPENSIVE
        if problem:
            what = "schema" if source.kind == "json" else "pattern" if source.kind == "regex" else "grammar"
            raise BadGrammar(f"the {what} cannot be followed: {problem}", source.param)

    async def close(self) -> None:
        """Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)  # child.kill() would take its exit status away from the loop
            await child.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                CHILD,
                str(self._limit_s),
                str(self._limit_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE_BYTES,
            )
        return self._child


async def _ask(child: asyncio.subprocess.Process, line: bytes) -> bytes:
    """Empty: the child has died."""
    if child.stdin is None or child.stdout is None:
        return b""
    child.stdin.write(line)
    with suppress(ConnectionError):
        await child.stdin.drain()
    return await child.stdout.readline()
