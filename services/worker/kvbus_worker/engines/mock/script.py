"""Scripts: what the mock engine says, turn by turn, from a file of JSON lines.

Each line is an object:

    output   the raw model output (or give `chunks`)
    chunks   pieces whose tokens are emitted in one step each; joined they are the output
    finish   stop (default), length or stop_sequence
    match    optional: use this line for prompts whose last part contains this text, as often as that happens
    once     with `match`: use the line once only

For each request the first usable line whose `match` occurs in the tail of the prompt wins; else the next unused line without
`match`, in file order; else the engine makes its output up. Empty lines and lines that start with # are skipped. The order is each
worker's own: a script for several workers should use `match`, then a migrated request continues with the same text anywhere.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbus_wire.request import MockOutput

FINISHES = ("stop", "length", "stop_sequence")


class ScriptError(ValueError):
    """The script cannot be used; the message names the line."""


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str = ""
    chunks: tuple[str, ...] = ()
    finish: str = "stop"
    match: str = ""
    once: bool = False

    def __post_init__(self) -> None:
        if self.finish not in FINISHES:
            raise ValueError(f"finish is none of {', '.join(FINISHES)}")
        if self.chunks and self.output and "".join(self.chunks) != self.output:
            raise ValueError("the chunks do not add up to the output")


class Script:
    """Hands out the lines of one script."""

    def __init__(self, lines: Sequence[ScriptLine]) -> None:
        self._matching = [line for line in lines if line.match]
        self._ordered = [line for line in lines if not line.match]
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

    def take(self, prompt_tail: str) -> MockOutput | None:
        """The output for the next turn, None when the script has nothing to say."""
        for line in self._matching:
            if line.match in prompt_tail:
                if line.once:
                    self._matching.remove(line)
                return _output(line)
        if self._next < len(self._ordered):
            self._next += 1
            return _output(self._ordered[self._next - 1])
        return None


def _output(line: ScriptLine) -> MockOutput:
    return MockOutput(output=line.output, chunks=line.chunks, finish=line.finish)
