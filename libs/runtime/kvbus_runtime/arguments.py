"""Command lines: a mistake is one line and a hint, not a page of usage."""

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """Of all verbs; parsers of verbs below it are of the same kind."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, complaint(self.prog, message))


def complaint(prog: str, message: str) -> str:
    """For standard error."""
    return f"{prog}: error: {message}\n{prog} --help tells what there is.\n"
