"""Texts that would be wrong on anyone else's machine, and commands that a README promises."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbus_cli.__main__ import VERBS
from kvbus_cli.services import SERVICES
from kvbus_runtime import parts, serving
from kvbus_testkit.wire_samples import SAMPLES
from kvbus_wire.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
MAKE_VERB = re.compile(r"^(?:\$ )?make ([a-z]+)", re.MULTILINE)
KVBUS_VERB = re.compile(r"(?:^|[ `$/])kvbus ([a-z][a-z-]+)(?=[ `\n])")
CODE = re.compile(r"```(?:sh|bash|console|text)?\n(.*?)```|`([^`\n]+)`", re.DOTALL)

# Put together so that this file does not hold them itself.
FOREIGN = re.compile(
    "|".join(
        [
            r"/work/" + r"(?:main|shared)\b",
            r'(?<![\w"])/root/' + r"\w",
            r"/home/(?!kvbus\b)\w" + "+",
            r"/opt/" + "(?:wheels|pypi)",
        ]
    )
)


def tracked_files() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = {}
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if match := FOREIGN.search(text):
            found[str(path.relative_to(ROOT))] = match[0]
    assert found == {}


def test_no_group_of_a_pattern_is_possessive() -> None:
    """Python 3.11 before 3.11.5 matches those wrongly (gh-106052), and such a Python is the system's of Debian 12."""
    possessive = re.compile(r"\)(?:[*+?]|\{[0-9,]*\})\+" r"|\(\?>")
    sources = [path for path in tracked_files() if path.suffix == ".py" and path != Path(__file__)]
    found = {
        str(path.relative_to(ROOT)): line
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if possessive.search(line)
    }
    assert found == {}


def code_of(readme: Path) -> str:
    return "\n".join(block or inline for block, inline in CODE.findall(readme.read_text(encoding="utf-8")))


READMES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/*/README.md")))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(readme: Path) -> None:
    code = code_of(readme)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(MAKE_VERB.findall(code)) <= targets
    assert set(KVBUS_VERB.findall(code)) <= {verb.split()[0] for verb in (*VERBS, *SERVICES)}


def test_the_protocol_document_names_every_message_header_and_error_code() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    headers = [
        parts.HEADER_ID,
        parts.HEADER_PART,
        parts.HEADER_BYTES,
        serving.HEADER_MESSAGE_ID,
        serving.HEADER_TIMEOUT_MS,
    ]
    wanted = [*(type(message).__name__ for message in SAMPLES), *headers, *ErrorCode]
    assert [name for name in wanted if f"`{name}" not in text] == []
