"""How `--help` shows the flags of the verbs here."""

import argparse


class Help(argparse.HelpFormatter):
    """With the defaults, of flags that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS) or not action.option_strings:
            return action.help
        shown = " ".join(map(str, action.default)) if isinstance(action.default, tuple) else "%(default)s"
        return f"{action.help} (default: {shown})"
