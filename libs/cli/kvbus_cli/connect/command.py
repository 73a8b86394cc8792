"""Arguments, output and exit status of `kvbus connect`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbus_cli.connect.catalog import ListedModel, NoChoice, answer_tokens, chosen_model
from kvbus_cli.connect.clients import CLIENTS
from kvbus_cli.connect.configuration import PLACEHOLDER_KEY, ApiKey, Client, Configuration, Connection
from kvbus_cli.connect.printing import export_lines, printed
from kvbus_cli.connect.server import ServerSilent, base_url, listed_models
from kvbus_cli.connect.writing import CannotWrite, write_files
from kvbus_cli.server_address import DEFAULT_URL

BAD = 2
"""Exit status of everything that stands in the way."""

_EPILOG = """\
The model, its context, its longest answer and its efforts are asked of the server. Variables are printed as lines for a shell:
eval "$(kvbus connect claude)". With --write the client's own files are changed instead; what else stands in them stays, and a
changed file is kept as FILE.backup-N.
"""


class BadArguments(Exception):
    """One line for the person at the terminal."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvbus connect",
        description="Print or write the configuration of an agent for a running server.",
        epilog=_EPILOG,
    )
    parser.add_argument("client", choices=sorted(CLIENTS))
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the HTTP API ({DEFAULT_URL})")
    parser.add_argument("--model", default="", help="needed when the server has several")
    parser.add_argument("--api", choices=("chat", "responses", "messages"), help="for clients that speak several")
    parser.add_argument(
        "--context", type=int, default=0, metavar="TOKENS", help="tell the client less than the server has"
    )
    parser.add_argument(
        "--max-output", type=int, default=0, metavar="TOKENS", help="longest answer (a quarter of the context)"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key", default="", metavar="KEY", help=f"goes into the configuration ({PLACEHOLDER_KEY})")
    keys.add_argument(
        "--api-key-env", default="", metavar="NAME", help="the configuration refers to this environment variable"
    )
    parser.add_argument(
        "--write", nargs="?", const=Path.home(), type=Path, default=None, metavar="HOME",
        help="write the client's files below this folder (your home)",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
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
            f"{connection.context_tokens:,} is too short for it",
            file=sys.stderr,
        )
    return 0


def _connection(client: Client, arguments: argparse.Namespace, home: Path) -> Connection:
    api = arguments.api or client.apis[0]
    if api not in client.apis:
        raise BadArguments(f"{client.title} speaks {', '.join(client.apis)}, not {api}")
    key = ApiKey(text=arguments.api_key or PLACEHOLDER_KEY, variable=arguments.api_key_env)
    if min(arguments.context, arguments.max_output) < 0:
        raise BadArguments("--context and --max-output are numbers of tokens")
    url = base_url(arguments.url)
    asked_with = os.environ.get(key.variable, "") if key.variable else arguments.api_key
    model = chosen_model(listed_models(url, asked_with), arguments.model)
    context_tokens = _context_tokens(model, arguments.context)
    return Connection(
        url=url,
        model=model.id,
        context_tokens=context_tokens,
        output_tokens=min(arguments.max_output or answer_tokens(model, context_tokens), context_tokens),
        home=str(home),
        api=api,
        reasons=model.kvbus.reasoning_parser is not None,
        efforts=model.kvbus.reasoning_efforts,
        key=key,
    )


def _context_tokens(model: ListedModel, wanted: int) -> int:
    known = model.context_tokens
    if known is None and not wanted:
        raise BadArguments(f"the server does not say how long the context of {model.id} is: give --context")
    return min(wanted or known or 0, known or wanted)


def _write(configuration: Configuration, key: ApiKey, home: Path) -> None:
    changes = write_files(configuration.files, home)
    for path, backup in changes:
        print(f"wrote {path}" + (f" (before: {backup})" if backup is not None else ""))
    if not changes:
        print("nothing had to change")
    in_file = any(file.instead_of_variables for file in configuration.files)
    exports = [] if in_file else export_lines(configuration, key)
    print("\n".join([*exports, f"start: {configuration.written_command or configuration.command}"]))
