"""Arguments, output and exit status of `kvbus connect`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbus_cli.connect.catalog import ListedModel, NoChoice, answer_tokens
from kvbus_cli.connect.clients import CLIENTS
from kvbus_cli.connect.configuration import PLACEHOLDER_KEY, ApiKey, Client, Configuration, Connection
from kvbus_cli.connect.places import VARIABLES
from kvbus_cli.connect.printing import export_lines, printed
from kvbus_cli.connect.server import ServerSilent, base_url, model_at
from kvbus_cli.connect.writing import CannotWrite, write_files
from kvbus_cli.server_address import DEFAULT_URL
from kvbus_runtime.arguments import ArgumentParser

BAD = 2
"""Exit status of everything that stands in the way."""

STOP = "false"
"""What a shell is given to evaluate instead of a configuration: without one a client would ask its vendor."""

_EPILOG = """\
The model, its context, its longest answer and its efforts are asked of the server. Variables are printed as lines for a shell:
eval "$(kvbus connect claude || echo false)" && claude. After an error nothing but `false` is printed to anything but a terminal,
so that such a line ends there and the client does not start without its configuration. With --write the client's own files are
changed instead; what else stands in them stays, and a changed file is kept as FILE.backup-N.
"""


_SHORTEST_CONTEXT = 2


class BadArguments(Exception):
    """One line for the person at the terminal."""


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus connect",
        description="Print or write the configuration of an agent for a running server.",
        epilog=_EPILOG,
    )
    parser.add_argument("client", choices=sorted(CLIENTS))
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the HTTP API ({DEFAULT_URL})")
    parser.add_argument("--model", default="", help="needed when the server has several")
    parser.add_argument("--api", choices=("chat", "responses", "messages"), help="for clients that speak several")
    parser.add_argument("--context", type=_tokens, metavar="TOKENS", help="tell the client less than the server has")
    parser.add_argument(
        "--max-output", type=_tokens, metavar="TOKENS", help="longest answer (a quarter of the context)"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key", default="", metavar="KEY", help=f"goes into the configuration ({PLACEHOLDER_KEY})")
    keys.add_argument(
        "--api-key-env", type=_variable, metavar="NAME",
        help="the configuration refers to this environment variable",
    )  # fmt: skip
    parser.add_argument(
        "--write", nargs="?", const=Path.home(), type=Path, default=None, metavar="HOME",
        help="write the client's files where it reads them, or below this folder instead of your home",
    )  # fmt: skip
    return parser


def _tokens(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return int(text)


def _variable(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an environment variable")
    return text


def main(argv: Sequence[str]) -> int:
    failed = True
    try:
        status = _connect(argv)
        failed = status != 0
    except SystemExit as ended:  # argparse: --help, and arguments that it refuses
        failed = bool(ended.code)
        raise
    finally:  # an interrupt and a fault of kvbus are no configuration either
        if failed and not sys.stdout.isatty():
            print(STOP)
    return status


def _connect(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    client = CLIENTS[arguments.client]
    home = (arguments.write or Path.home()).absolute()
    try:
        connection = _connection(client, arguments, home)
        configuration = client.configure(connection)
        if arguments.write is None:
            print(printed(configuration, connection.key, str(home)))
        else:
            _write(configuration, connection.key, home)
    except (BadArguments, ServerSilent, NoChoice, CannotWrite) as problem:
        print(f"kvbus connect: {problem}", file=sys.stderr)
        return BAD
    if connection.context_tokens < client.first_prompt_tokens + connection.output_tokens:
        print(
            f"kvbus connect: {client.title}'s first prompt alone has about {client.first_prompt_tokens:,} tokens: a context of "
            f"{connection.context_tokens:,} is too short for it and an answer of {connection.output_tokens:,}",
            file=sys.stderr,
        )
    return 0


def _connection(client: Client, arguments: argparse.Namespace, home: Path) -> Connection:
    api = arguments.api or client.apis[0]
    if api not in client.apis:
        raise BadArguments(f"{client.title} speaks {', '.join(client.apis)}, not {api}")
    key = ApiKey(text=arguments.api_key or PLACEHOLDER_KEY, variable=arguments.api_key_env or "")
    url = base_url(arguments.url)
    asked_with = os.environ.get(key.variable, "") if key.variable else arguments.api_key
    model = model_at(url, asked_with, arguments.model)
    context_tokens = _context_tokens(model, arguments.context)
    return Connection(
        url=url,
        model=model.id,
        context_tokens=context_tokens,
        output_tokens=_output_tokens(client, model, context_tokens, arguments.max_output),
        home=str(home),
        api=api,
        reasons=model.kvbus.reasoning_parser is not None,
        efforts=model.kvbus.reasoning_efforts,
        key=key,
        environment=_environment(arguments.write),
    )


def _environment(folder: Path | None) -> dict[str, str]:
    """None of it where a folder was named: the files are for somebody who has that as home."""
    if folder not in (None, Path.home()):
        return {}
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _context_tokens(model: ListedModel, wanted: int | None) -> int:
    known = model.context_tokens
    tokens = wanted or known
    if tokens is None:
        raise BadArguments(f"the server does not say how long the context of {model.id} is: give --context")
    if known is not None and tokens > known:
        raise BadArguments(f"--context {tokens:,} is more than {model.id} has: {known:,}")
    if tokens < _SHORTEST_CONTEXT:
        raise BadArguments(f"a context of {tokens} has no room for a prompt and an answer")
    return tokens


def _output_tokens(client: Client, model: ListedModel, context_tokens: int, wanted: int | None) -> int:
    """Prompt and answer share the context: an answer of a given length leaves room for the first prompt, where there is any."""
    if wanted is None:
        return answer_tokens(model, context_tokens)
    allowed = model.top_provider.max_completion_tokens
    if allowed is not None and wanted > allowed:
        raise BadArguments(f"--max-output {wanted:,} is more than the server allows: {allowed:,}")
    first = client.first_prompt_tokens if client.first_prompt_tokens < context_tokens else 1
    longest = context_tokens - first
    if wanted > longest:
        raise BadArguments(
            f"--max-output {wanted:,} does not fit: prompt and answer share a context of {context_tokens:,}, and {client.title}'s "
            f"first prompt alone has about {client.first_prompt_tokens:,} tokens; at most {longest:,}"
        )
    return wanted


def _write(configuration: Configuration, key: ApiKey, home: Path) -> None:
    changes = write_files(configuration.files, home)
    for path, backup in changes:
        print(f"wrote {path}" + (f" (before: {backup})" if backup is not None else ""))
    if not changes:
        print("nothing had to change")
    in_file = any(file.instead_of_variables for file in configuration.files)
    exports = [] if in_file else export_lines(configuration, key)
    print("\n".join([*exports, f"start: {configuration.written_command or configuration.command}"]))
