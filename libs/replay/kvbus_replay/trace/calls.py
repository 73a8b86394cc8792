"""A trace in memory: calls, and the chains of blocks they consist of."""

import sys
from array import array
from collections.abc import Iterable

import msgspec

from kvbus_blocks.keys import KEY_BYTES


class TraceError(Exception):
    """A trace cannot be read. ``line`` counts from 1, 0: none in particular."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


class Chain:
    """Blocks of a sequence from its beginning on, as 64-bit hashes that each stand for the whole prefix.

    A chain that continues another holds its own part only: the calls of a session cost what is new in each of them.
    """

    __slots__ = ("_base", "_own", "_start")

    def __init__(self, hashes: Iterable[int] = (), base: "Chain | None" = None, keep: int = 0) -> None:
        """The first ``keep`` blocks of ``base``, then ``hashes``. Raise ValueError when ``base`` is shorter than that."""
        if keep > (0 if base is None else len(base)):
            raise ValueError(f"{keep} blocks are kept of {0 if base is None else len(base)}")
        while base is not None and keep <= base._start:
            base = base._base
        self._base: Chain | None = base
        self._start: int = keep
        self._own = array("Q", hashes)

    def __len__(self) -> int:
        return self._start + len(self._own)

    @property
    def kept(self) -> int:
        """How many blocks it has of the chain that it continues."""
        return self._start

    def hashes(self) -> "array[int]":
        parts = [self._own]
        end, chain = self._start, self._base
        while chain is not None:
            parts.append(chain._own[: end - chain._start])
            end, chain = chain._start, chain._base
        whole = array("Q")
        for part in reversed(parts):
            whole += part
        return whole

    def keys(self) -> list[bytes]:
        """Block keys that have the hashes as their low 64 bits, and zeros above."""
        hashes = self.hashes()
        words = array("Q", bytes(KEY_BYTES * len(hashes)))
        words[::2] = hashes
        if sys.byteorder == "big":
            words.byteswap()
        packed = words.tobytes()
        return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a session. It is made ``pause_s`` after the last of ``after`` has ended, and not before ``at_s``.

    ``chain``: the whole blocks of the prompt, then those of prompt and output. ``reasoning_tokens`` are part of the output.
    ``trigger``: what it answers to, ``tool`` or ``user``.
    """

    call_id: str
    session_id: str
    chain: Chain
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    parent_session_id: str | None = None
    at_s: float = 0.0
    after: tuple[str, ...] = ()
    pause_s: float = 0.0
    priority: int = 0
    strict_priority: int = 0
    trigger: str = "user"
    tenant: str = ""
    final: bool = False


class Trace(msgspec.Struct, frozen=True):
    """``calls``: each after those that it waits for. ``block_size`` in tokens."""

    name: str
    block_size: int
    calls: list[Call]
