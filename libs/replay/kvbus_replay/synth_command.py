"""`kvbus trace synth FILE`: a made-up trace."""

import argparse
import gzip
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from kvbus_replay.help import Help
from kvbus_replay.trace.agent_format import CallLine, encode_line
from kvbus_replay.trace.synth import Shape, synthesize
from kvbus_runtime.arguments import ArgumentParser

HELP = {
    "sessions": "how many sessions begin",
    "sessions_per_s": "how many of them per second, on average",
    "typical_calls": "median calls of a session (the mean is 1.13 times that: 42)",
    "harnesses": "system prompts that sessions share, the first one used most",
    "system_tokens": "length of a system prompt",
    "user_tokens": "length of the first message, and of the task of a sub-agent",
    "typical_tool_tokens": "median length of a tool result",
    "max_tool_tokens": "longest tool result",
    "typical_output_tokens": "median length of an output, reasoning included",
    "max_output_tokens": "longest output",
    "reasoning_share": "part of an output that is reasoning",
    "keeps_reasoning": "the next prompt holds the reasoning of the last output",
    "pause_s": "how long a tool runs",
    "fan_out": "probability that sub-agents run after a call",
    "sub_agents": "how many of them begin together",
    "sub_agent_calls": "calls of a sub-agent",
    "sub_agent_system_tokens": "length of the system prompt of sub-agents",
    "brief_tokens": "what sub-agents that begin together share beyond it",
    "side_calls": "probability that a tool calls the model for itself, with a text of its own (a page to condense)",
    "side_call_tokens": "length of such a text",
    "user_turns": "probability that a call answers to the user instead of a tool",
    "user_pause_s": "how long the user takes",
    "compaction_tokens": "length of a prompt at which the history is condensed",
    "summary_tokens": "length of the summary",
    "block_size": "tokens per block",
}


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    values = {name: getattr(arguments, name) for name in HELP}
    calls = tokens = 0
    try:
        shape = msgspec.convert(values, Shape)
        with _output(arguments.file) as file:
            for line in synthesize(shape, arguments.seed):
                file.write(encode_line(line) + b"\n")
                if isinstance(line, CallLine):
                    calls, tokens = calls + 1, tokens + line.prompt_tokens
    except (OSError, msgspec.ValidationError) as problem:
        print(f"kvbus trace synth: {problem}", file=sys.stderr)
        return 2
    print(f"{arguments.file}: {shape.sessions} sessions, {calls} calls, {tokens / max(calls, 1):,.0f} tokens a prompt")
    return 0


@contextmanager
def _output(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        # Without a time in it, so that equal arguments give equal files.
        with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
            yield packed  # type: ignore[misc]
    else:
        with path.open("wb") as file:
            yield file


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus trace synth",
        formatter_class=Help,
        description="Make up agent sessions: growing prompts, tool pauses, sub-agents, compaction, shared system prompts.",
    )
    parser.add_argument("file", type=Path, help="where to write the trace; .gz compresses it")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds and shapes give equal files")
    for field in msgspec.structs.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        default = field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=HELP[field.name])
        elif isinstance(default, tuple):
            kind = type(default[0])
            parser.add_argument(
                flag, type=kind, nargs=2, metavar=("LEAST", "MOST"), default=default, help=HELP[field.name]
            )
        else:
            parser.add_argument(flag, type=type(default), metavar="N", default=default, help=HELP[field.name])
    return parser
