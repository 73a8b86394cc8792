"""Scripts: what the mock engine says, turn by turn, from a file of JSON lines.

Each line is an object:

    output     the raw model output (or give `chunks`)
    chunks     pieces whose tokens are emitted in one step each; joined they are the output
    finish     stop (default), length or stop_sequence
    error      instead of `finish`: {code, message, retryable, retry_after_s}; without output the request is refused, else it fails
               once the output is out. Codes are those of the bus. `retryable` lets the frontend try another worker.
    prefill_s  least time until the first token, whatever the timing model says
    step_s     least time between steps that emit tokens
    match      optional: text, or a list of texts that must all occur in the prompt; the line may be used as often as that happens
    once       with `match`: use the line once only

Agents send their whole history each time and put reminders behind what the user wrote, so what counts is which text of the script
stands last in the prompt: of all usable lines whose `match` occurs, the one wins whose match ends last, the earlier line when two
end together. Else the next unused line without `match` is played, in file order; else the engine makes its output up. Empty lines
and lines that start with # are skipped. The order is each worker's own: a script for several workers should use `match`, then a
migrated request continues with the same text anywhere.

A file that has changed is read again with the next request, and starts over.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvbus_wire.errors import ErrorCode

FINISHES = ("stop", "length", "stop_sequence")


class ScriptError(ValueError):
    """The script cannot be used; the message names the line."""


class ScriptedError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: ErrorCode
    message: str = "the script says so"
    retryable: bool = False
    retry_after_s: float | None = None


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str = ""
    chunks: tuple[str, ...] = ()
    finish: str = "stop"
    error: ScriptedError | None = None
    prefill_s: float = 0.0
    step_s: float = 0.0
    match: str | tuple[str, ...] = ()
    once: bool = False

    def __post_init__(self) -> None:
        if self.finish not in FINISHES:
            raise ValueError(f"finish is none of {', '.join(FINISHES)}")
        if self.chunks and self.output and "".join(self.chunks) != self.output:
            raise ValueError("the chunks do not add up to the output")
        if not (self.prefill_s >= 0 and self.step_s >= 0):
            raise ValueError("prefill_s and step_s must not be negative")

    @property
    def needles(self) -> tuple[str, ...]:
        needles = (self.match,) if isinstance(self.match, str) else self.match
        return tuple(needle for needle in needles if needle)

    @property
    def refuses(self) -> bool:
        """Nothing is said before the error."""
        return self.error is not None and not self.output and not self.chunks


class Script:
    """Hands out the lines of one script."""

    def __init__(self, lines: Sequence[ScriptLine]) -> None:
        self._matching = [line for line in lines if line.needles]
        self._ordered = [line for line in lines if not line.needles]
        self._next = 0

    @classmethod
    def load(cls, path: Path, max_bytes: int) -> "Script":
        """Raise ScriptError."""
        try:
            if path.stat().st_size > max_bytes:
                raise ScriptError(f"{path}: larger than {max_bytes} bytes")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ScriptError(f"{path}: {error}") from error
        lines = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    lines.append(msgspec.json.decode(line, type=ScriptLine))
                except msgspec.DecodeError as error:
                    raise ScriptError(f"{path}:{number}: {error}") from error
        return cls(lines)

    def take(self, prompt: Callable[[], str]) -> ScriptLine | None:
        """The line for the next turn, None when the script has nothing to say. ``prompt`` is asked for its text if that matters."""
        line = self._last_match(prompt()) if self._matching else None
        if line is not None:
            if line.once:
                self._matching.remove(line)
            return line
        if self._next < len(self._ordered):
            self._next += 1
            return self._ordered[self._next - 1]
        return None

    def _last_match(self, prompt: str) -> ScriptLine | None:
        found, end = None, 0
        for line in self._matching:
            ends = [prompt.rfind(needle) + len(needle) for needle in line.needles if needle in prompt]
            if len(ends) == len(line.needles) and max(ends) > end:
                found, end = line, max(ends)
        return found


class ScriptFile:
    """The script in a file, which may be rewritten while the engine runs."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._version = self._seen()
        self._script = Script.load(path, max_bytes)

    def take(self, prompt: Callable[[], str]) -> ScriptLine | None:
        """As `Script.take`. Raise ScriptError when the file has changed into something that is no script."""
        if (version := self._seen()) != self._version:
            self._script = Script.load(self._path, self._max_bytes)
            self._version = version
        return self._script.take(prompt)

    def _seen(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
