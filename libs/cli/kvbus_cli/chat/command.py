"""The terminal side of `kvbus chat`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

from rich.console import Console

from kvbus_cli.chat.client import ChatClient, ChatFailed, Message
from kvbus_cli.server_address import DEFAULT_URL
from kvbus_runtime.arguments import ArgumentParser

_EPILOG = """\
/reset forgets the conversation, /quit or Ctrl-D leaves; Ctrl-C ends the running answer. When the input is no terminal, each line
is one turn of a conversation, and the exit status is 1 when a turn failed.
"""


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="kvbus chat", description="Chat in the terminal.", epilog=_EPILOG)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the HTTP API ({DEFAULT_URL})")
    parser.add_argument("--model", default="", help="default: the first one that the server lists")
    parser.add_argument("--system", default="", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=None, help="limit of each answer")
    parser.add_argument("--temperature", type=float, default=None, help="0 is greedy; default: the model's own")
    parser.add_argument("--api-key", default="", help="sent as bearer token")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False)
    client = ChatClient(arguments.url, arguments.api_key)
    try:
        model = arguments.model or _first(client.models())
    except ChatFailed as error:
        print(f"kvbus chat: {error}", file=sys.stderr)
        return 1
    chat = Chat(client, console, arguments, model)
    interactive = sys.stdin.isatty()
    if interactive:
        console.print(f"[dim]{model} at {arguments.url}; /reset, /quit")
    for line in _prompts(interactive):
        if line == "/quit":
            break
        if line == "/reset":
            chat.reset()
            console.print("[dim]forgotten")
        elif line and not chat.answer(line) and not interactive:
            return 1
    return 0


def _first(models: list[str]) -> str:
    if not models:
        raise ChatFailed("the server has no model yet")
    return models[0]


def _prompts(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  # gives input() its line editing

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


class Chat:
    """A conversation; a turn that fails or is broken off leaves no trace in it."""

    def __init__(self, client: ChatClient, console: Console, arguments: argparse.Namespace, model: str) -> None:
        self._client = client
        self._console = console
        self._arguments = arguments
        self._model = model
        self._messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        self._messages = [Message("system", self._arguments.system)] if self._arguments.system else []

    def answer(self, prompt: str) -> bool:
        """Stream one answer to the terminal. Return whether it came to its end."""
        messages = [*self._messages, Message("user", prompt)]
        text = ""
        try:
            with closing(
                self._client.turn(self._model, messages, self._arguments.max_tokens, self._arguments.temperature)
            ) as turns:
                turn = next(turns)
                for piece in turn:
                    self._console.print(
                        piece.text, end="", markup=False, style="dim" if piece.reasoning else None, soft_wrap=True
                    )
                    text += "" if piece.reasoning else piece.text
        except ChatFailed as error:
            self._console.print()
            print(f"kvbus chat: {error}", file=sys.stderr)
            return False
        except KeyboardInterrupt:
            self._console.print("\n[yellow]broken off")
            return False
        self._messages = [*messages, Message("assistant", text)]
        self._console.print(f"\n[dim]{turn.figures}")
        return True
