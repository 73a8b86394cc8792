"""What the agents written with libraries have in common: instructions, tools, command line and the session between runs.

Runs in the environment of the libraries, in which there is nothing else of this project than these files.
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RULES = (
    "Look at what is there before you change it.",
    "Keep to the style of the file that you change.",
    "Say what you did in one sentence.",
    "Ask only when there is no way to find out.",
    "Leave alone what nobody asked you to change.",
)
INSTRUCTIONS = "You are a coding agent.\n" + "\n".join(
    f"{number}. {_RULES[number % len(_RULES)]}" for number in range(1, 401)
)
"""As long as those of real agents."""


def write_file(path: str, content: str) -> str:
    """Write a text file."""
    Path(path).write_text(content)
    return f"wrote {path}"


def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text()


def run_command(command: str) -> str:
    """Run a command in a shell."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout  # noqa: S602


FUNCTIONS: tuple[Callable[..., str], ...] = (write_file, read_file, run_command)


def schema_of(function: Callable[..., str]) -> dict[str, Any]:
    """All parameters are texts."""
    names = [name for name in function.__annotations__ if name != "return"]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def run_tool(name: str, arguments: dict[str, Any]) -> str:
    (function,) = [function for function in FUNCTIONS if function.__name__ == name]
    return function(**arguments)


class Program:
    """The command line, and the history as far as earlier runs have made it."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        for option in ("--url", "--model", "--api", "--session"):
            parser.add_argument(option, required=True)
        parser.add_argument("--timeout", type=float, required=True)
        parser.add_argument("--stream", action="store_true")
        parser.add_argument("--resume", action="store_true")
        parser.add_argument("prompt")
        arguments = parser.parse_args()
        self.url: str = arguments.url
        self.model: str = arguments.model
        self.api: str = arguments.api
        self.timeout_s: float = arguments.timeout
        self.streams: bool = arguments.stream
        self._file = Path(arguments.session)
        self.history: list[Any] = json.loads(self._file.read_text()) if arguments.resume else []
        self.history.append({"role": "user", "content": arguments.prompt})

    def end(self, answer: str | None) -> None:
        print(answer)
        self._file.write_text(json.dumps(self.history))
