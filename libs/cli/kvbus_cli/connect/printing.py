"""A configuration as text: lines for a shell, and files to be copied."""

import shlex
from pathlib import Path

from kvbus_cli.connect.configuration import ApiKey, Configuration
from kvbus_cli.connect.merging import text_of


def export_lines(configuration: Configuration, key: ApiKey) -> list[str]:
    lines = []
    for name, value in configuration.exports(key).items():
        is_reference = name == configuration.key_variable and key.variable
        lines.append(f'export {name}="{value}"' if is_reference else f"export {name}={shlex.quote(value)}")
    return lines


def printed(configuration: Configuration, key: ApiKey, home: str) -> str:
    """What is not for the shell or for a file stands behind ``#``, so that variables alone can be evaluated as they are."""
    exports = export_lines(configuration, key)
    files = [file for file in configuration.files if not file.instead_of_variables]
    return "\n".join(
        [
            *(["\n".join(exports) + "\n"] if exports else []),
            *(f"# {Path(home) / file.path}\n{text_of(file)}" for file in files),
            f"# start: {configuration.command}",
        ]
    )
