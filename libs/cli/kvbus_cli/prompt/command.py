"""`kvbus prompt`: asks the running server, prints."""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import msgspec
from rich.console import Console
from rich.text import Text

from kvbus_cli.prompt.client import PromptFailed, fetch_prompt
from kvbus_cli.prompt.difference import Difference, difference
from kvbus_cli.prompt.hints import Compared, hints
from kvbus_cli.prompt.report import difference_report, prompt_report
from kvbus_cli.prompt.request_file import BadRequestFile, read_request, request_headers
from kvbus_cli.server_address import DEFAULT_URL
from kvbus_protocols.prompt_view import PromptApi, PromptRule
from kvbus_runtime.arguments import ArgumentParser

FAILED = 2

_EPILOG = """\
FILE is the body of a request as a client sends it (JSON; - is the standard input). The server renders it with its own settings,
aliases, template and rules; nothing is generated. Fields are named as in the body, characters within them counted from 0. Exit
status: 0, or 2 when there is nothing to show.
"""


class DiffReport(msgspec.Struct, frozen=True):
    """What `kvbus prompt diff --json` prints. ``rules``: of A and of B."""

    difference: Difference
    hints: list[str]
    rules: tuple[list[PromptRule], list[PromptRule]]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus prompt",
        description="Show what prompt a request becomes, and where the prompts of two requests part.",
        epilog=_EPILOG,
    )
    common = ArgumentParser(add_help=False)
    common.add_argument("--url", default=DEFAULT_URL, help=f"address of the HTTP API ({DEFAULT_URL})")
    common.add_argument(
        "--api", choices=get_args(PromptApi), default=None, help="API of the requests (default: told from each body)"
    )
    common.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="a header of the requests; may be repeated"
    )
    common.add_argument("--api-key", default="", help="sent as bearer token")
    common.add_argument("--json", action="store_true", help="for tools")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    render = verbs.add_parser(
        "render", parents=[common], help="the prompt of a request with its segments", epilog=_EPILOG
    )
    render.add_argument("file", metavar="FILE")
    render.add_argument("--blocks", action="store_true", help="list the blocks with their keys")
    diff = verbs.add_parser("diff", parents=[common], help="where two prompts part, and why", epilog=_EPILOG)
    diff.add_argument("file_a", metavar="A")
    diff.add_argument("file_b", metavar="B")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        headers = request_headers(arguments.header, arguments.api_key)
        return _render(arguments, headers) if arguments.verb == "render" else _diff(arguments, headers)
    except (BadRequestFile, PromptFailed) as failure:
        print(f"kvbus prompt: {failure}", file=sys.stderr)
        return FAILED


def _render(arguments: argparse.Namespace, headers: Mapping[str, str]) -> int:
    view = fetch_prompt(arguments.url, read_request(arguments.file, arguments.api), headers)
    if arguments.json:
        print(msgspec.json.encode(view).decode())
    else:
        _print(prompt_report(view, blocks=arguments.blocks))
    return 0


def _diff(arguments: argparse.Namespace, headers: Mapping[str, str]) -> int:
    first, second = (read_request(name, arguments.api) for name in (arguments.file_a, arguments.file_b))
    a, b = (fetch_prompt(arguments.url, request, headers) for request in (first, second))
    found = difference(a, b)
    told = hints(Compared(first.fields, second.fields, a, b, found))
    if arguments.json:
        print(msgspec.json.encode(DiffReport(found, told, (a.rules, b.rules))).decode())
    else:
        _print(difference_report(found, a, b, (first.name, second.name), told))
    return 0


def _print(lines: Iterable[Text]) -> None:
    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
