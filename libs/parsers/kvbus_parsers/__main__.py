"""``python -m kvbus_parsers < cases.jsonl``: parses one case per line, and writes one result per line.

``cases`` says what a case holds; a result has ``id``, ``segments``, ``content``, ``reasoning``, ``tool_calls``,
``finish_reason``. A line that can not be read gives an object with ``line`` and ``error``, and exit status 1 at the end.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import IO

from kvbus_parsers.cases import BadCaseError, result, run_case
from kvbus_parsers.names import UnknownFormatError


def main(arguments: Sequence[str] | None = None, read: IO[bytes] | None = None, write: IO[bytes] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m kvbus_parsers", description=__doc__)
    options.add_argument(
        "--chunks", type=_chunking, default=0, help="how to feed an output: whole, char, or a number of characters"
    )
    size: int = options.parse_args(arguments).chunks
    output = write or sys.stdout.buffer
    status = 0
    for number, line in enumerate(read or sys.stdin.buffer, 1):
        if not line.strip():
            continue
        answer, failed = _answer(line, number, size)
        status |= failed
        output.write(answer + b"\n")
        output.flush()
    return status


def _answer(line: bytes, number: int, size: int) -> tuple[bytes, bool]:
    try:
        case = json.loads(line)
        if not isinstance(case, dict) or not isinstance(case.get("model_output"), str):
            raise BadCaseError("a case is an object with a text model_output")
        collected = run_case(case, _pieces(case["model_output"], size))
        return _encoded({"id": case.get("id"), **result(collected)}), False
    except (ValueError, UnknownFormatError, RecursionError) as error:
        return _encoded({"line": number, "error": str(error)}), True


def _encoded(answer: dict[str, object]) -> bytes:
    # a lone surrogate, which UTF-8 can not hold, becomes the escape that JSON has for it
    return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def _chunking(text: str) -> int:
    """Characters per piece; 0 is all of them."""
    size = {"whole": 0, "char": 1}.get(text) if not text.isdecimal() else int(text)
    if size is None or text.strip("0") == "":
        raise argparse.ArgumentTypeError(f"{text!r} is neither whole, char nor a positive number")
    return size


def _pieces(text: str, size: int) -> Iterable[str]:
    return [text] if not size else [text[at : at + size] for at in range(0, len(text), size)]


if __name__ == "__main__":
    sys.exit(main())
