"""`kvbus connect` against a server: what it asks, writes and prints, and how it fails."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvbus_cli.connect.catalog import ListedModel, Provider, answer_tokens
from kvbus_cli.connect.command import main


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "root": name, "context_length": 65_536, **more}


class Server(HTTPServer):
    """Lists ``models`` to whoever has the ``key``."""

    models: tuple[dict[str, Any], ...] = (model("m"),)
    key = ""
    status = 200
    body: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        allowed = not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}"
        body = self.server.body or json.dumps({"object": "list", "data": self.server.models}).encode()
        self.send_response(404 if self.path != "/v1/models" else self.server.status if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_only_model_is_taken_whatever_else_it_is_called(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = (model("m"), model("claude-haiku", root="m"))
    assert main(["claude", "--url", f"{server.url}/v1/"]) == 0
    out = capsys.readouterr().out
    assert "export ANTHROPIC_MODEL=m\n" in out
    assert f"export ANTHROPIC_BASE_URL={server.url}\n" in out
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536\n" in out
    assert main(["claude", "--url", server.url, "--model", "claude-haiku"]) == 0
    assert "export ANTHROPIC_MODEL=claude-haiku\n" in capsys.readouterr().out


def test_files_are_written_below_the_given_folder(
    server: Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pi", "--url", server.url, "--write", str(home / "other"), "--api", "messages"]) == 0
    written = json.loads((home / "other/.pi/agent/models.json").read_text())["providers"]["kvbus"]
    assert (written["baseUrl"], written["api"]) == (server.url, "anthropic-messages")
    assert f"wrote {home}/other/.pi/agent/models.json" in capsys.readouterr().out
    assert main(["pi", "--url", server.url, "--write", str(home / "other"), "--api", "messages"]) == 0
    assert "nothing had to change" in capsys.readouterr().out
    assert main(["claude", "--url", server.url, "--write"]) == 0
    assert json.loads((home / ".claude/settings.json").read_text())["env"]["ANTHROPIC_MODEL"] == "m"


def test_what_no_file_holds_is_still_printed(server: Server, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codex", "--url", server.url, "--write", str(home), "--api-key", "k"]) == 0
    assert "export LOCAL_LLM_API_KEY=k\n" in capsys.readouterr().out


def test_the_server_is_asked_with_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret"
    monkeypatch.setenv("MY_KEY", "secret")
    assert main(["claude", "--url", server.url, "--api-key", "secret"]) == 0
    assert "export ANTHROPIC_AUTH_TOKEN=secret" in capsys.readouterr().out
    assert main(["claude", "--url", server.url, "--api-key-env", "MY_KEY"]) == 0
    out = capsys.readouterr().out
    assert 'export ANTHROPIC_AUTH_TOKEN="$MY_KEY"' in out
    assert "secret" not in out
    assert (
        refusal(["claude", "--url", server.url], capsys)
        == f"{server.url} wants another API key (--api-key, --api-key-env)"
    )


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("kvbus connect: ").rstrip("\n")


def test_what_stands_in_the_way_is_said_in_one_line(
    server: Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claude = ["claude", "--url", server.url]
    assert "Claude Code speaks messages, not chat" in refusal([*claude, "--api", "chat"], capsys)
    assert refusal([*claude, "--model", "x"], capsys) == "the server has no model 'x', but m"
    (home / ".claude").mkdir()
    (home / ".claude/settings.json").write_text("{ // mine\n}")
    assert "settings.json is no plain JSON" in refusal([*claude, "--write"], capsys)
    (home / "file").write_text("")
    assert "cannot be" in refusal([*claude, "--write", str(home / "file")], capsys)
    server.models = (model("m", context_length=None),)
    assert refusal(claude, capsys) == "the server does not say how long the context of m is: give --context"
    server.models = (model("m"), model("n"))
    assert refusal(claude, capsys) == "the server has several models: choose by --model m|n"
    server.models = ()
    assert refusal(claude, capsys) == "the server has no model yet"
    server.body = b"{}"
    assert "cannot be read" in refusal(claude, capsys)
    server.status = 503
    assert refusal(claude, capsys) == f"{server.url} answers with HTTP 503"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:x", "http://[::1"])
def test_no_server_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["claude", "--url", url], capsys)


def test_a_context_that_is_too_short_is_said(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = (model("m", context_length=8192),)
    assert main(["claude", "--url", server.url]) == 0
    assert "a context of 8,192 is too short for it" in capsys.readouterr().err
    assert main(["pi", "--url", server.url]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("context", "allowed", "tokens"),
    [(262_144, None, 32_000), (40_000, None, 10_000), (262_144, 4096, 4096), (2, None, 1)],
)
def test_an_answer_gets_a_part_of_the_context(context: int, allowed: int | None, tokens: int) -> None:
    assert answer_tokens(ListedModel("m", top_provider=Provider(allowed)), context) == tokens


def test_smaller_limits_can_be_given(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claude", "--url", server.url, "--context", "30000", "--max-output", "1000"]) == 0
    out = capsys.readouterr().out
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=30000\n" in out
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=1000\n" in out
    assert main(["claude", "--url", server.url, "--context", "1000000"]) == 0
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "listed",
    [
        model("m\nEVIL=1"),
        model("$(id)"),
        model("`id`"),
        model('"'),
        model("\x1b[2J"),
        model(""),
        model("m", context_length=-1),
        model("m", context_length=0),
        model("m", max_model_len=10**30),
        model("m", top_provider={"max_completion_tokens": -4}),
    ],
)
@pytest.mark.parametrize("client", ["aider", "codex"])
def test_a_list_of_models_that_makes_no_sense_is_written_nowhere(
    client: str, listed: dict[str, Any], server: Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = (listed,)
    assert main([client, "--url", server.url, "--write"]) == 2
    assert list(home.iterdir()) == []
    err = capsys.readouterr().err
    assert "cannot be read" in err
    assert "\x1b" not in err


def test_a_list_of_models_that_is_too_deep_or_a_key_that_is_no_header_is_told(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["claude", "--url", server.url, "--api-key", "a\nb"]) == 2
    assert main(["claude", "--url", server.url, "--context", "-5"]) == 2
    server.body = b'{"data": [{"id": "m", "x": ' + b"[" * 100_000
    assert main(["claude", "--url", server.url]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_the_usual_effort_of_the_catalog_is_one_that_it_lists(server: Server, home: Path) -> None:
    server.models = (model("m", kvbus={"reasoning_efforts": ["none", "low", "high"]}),)
    assert main(["codex", "--url", server.url, "--write"]) == 0
    (entry,) = json.loads((home / ".codex/kvbus-models.json").read_text())["models"]
    assert entry["default_reasoning_level"] in [level["effort"] for level in entry["supported_reasoning_levels"]]
