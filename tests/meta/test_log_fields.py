"""Every line of a service says whose it is; nothing in it may say otherwise."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
BOUND = {"service", "instance"}
LEVELS = {"debug", "info", "warning", "error", "exception"}


def _overwritten(source: str) -> list[int]:
    """Lines of calls that log another value under a bound name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and ast.unparse(call.func.value).endswith("log")
        and BOUND & {keyword.arg for keyword in call.keywords}
    ]


def test_no_log_line_overwrites_who_speaks() -> None:
    assert _overwritten("self._log.info('joined', instance='other')") == [1]
    files = [path for folder in ("services", "libs/runtime") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [(str(path), lines) for path in files if (lines := _overwritten(path.read_text()))] == []
