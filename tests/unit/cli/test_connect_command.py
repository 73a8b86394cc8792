"""`kvbus connect` against a server: what it asks, writes and prints, and how it fails."""

import json
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvbus_cli.connect.catalog import ListedModel, Provider, answer_tokens
from kvbus_cli.connect.command import main
from kvbus_cli.connect.places import VARIABLES


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "root": name, "context_length": 65_536, **more}


class Server(HTTPServer):
    """Lists ``models`` to whoever has the ``key``; knows ``unlisted``, too."""

    models: tuple[dict[str, Any], ...] = (model("m"),)
    unlisted: dict[str, Any]
    key = ""
    status = 200
    body: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        if self.key and authorization != f"Bearer {self.key}":
            return 401, b"{}"
        if path == "/v1/models":
            return self.status, self.body or json.dumps({"object": "list", "data": self.models}).encode()
        found = self.unlisted.get(path.removeprefix("/v1/models/"))
        return (200, json.dumps(found).encode()) if found else (404, b"{}")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, body = self.server.answer(self.path, self.headers["Authorization"])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.unlisted = {}
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
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
    assert out == "false\n"  # for the shell
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
    assert main(["claude", "--url", server.url, "--context", "65536", "--max-output", "53536"]) == 0
    out = capsys.readouterr().out
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536\n" in out
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=53536\n" in out


def test_limits_that_cannot_be_are_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    claude = ["claude", "--url", server.url]
    assert refusal([*claude, "--context", "65537"], capsys) == "--context 65,537 is more than m has: 65,536"
    assert refusal([*claude, "--max-output", "53537"], capsys) == (
        "--max-output 53,537 does not fit: prompt and answer share a context of 65,536, and Claude Code's first prompt alone has "
        "about 12,000 tokens; at most 53,536"
    )
    aider = ["aider", "--url", server.url, "--context", "30000", "--max-output"]
    assert refusal([*aider, "29000"], capsys).endswith("first prompt alone has about 2,500 tokens; at most 27,500")
    assert main([*aider, "27500"]) == 0
    assert '"max_input_tokens": 2500' in capsys.readouterr().out
    assert refusal([*claude, "--context", "1"], capsys) == "a context of 1 has no room for a prompt and an answer"
    server.models = (model("m", top_provider={"max_completion_tokens": 4096}),)
    assert (
        refusal([*claude, "--max-output", "4097"], capsys) == "--max-output 4,097 is more than the server allows: 4,096"
    )


def test_an_answer_cannot_have_all_of_a_context_that_is_too_short_anyway(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = (model("m", context_length=8192),)
    assert refusal(["claude", "--url", server.url, "--max-output", "8192"], capsys).endswith("at most 8,191")
    assert main(["claude", "--url", server.url, "--max-output", "1000"]) == 0
    assert "a context of 8,192 is too short for it and an answer of 1,000\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--context", "0"], "--context: '0' is no number of tokens"),
        (["--context", "-5"], "--context: '-5' is no number of tokens"),
        (["--max-output", "0"], "--max-output: '0' is no number of tokens"),
        (["--max-output", "9" * 5000], "is no number of tokens"),
        (["--api-key-env", "BAD NAME;x"], "--api-key-env: 'BAD NAME;x' is no name of an environment variable"),
        (["--api-key-env", "9A"], "'9A' is no name"),
        (["--api-key-env", "KEY\n"], "is no name"),
        (["--api-key-env", ""], "'' is no name"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["claude", *arguments])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "false\n"
    assert problem in err


def test_a_name_that_the_server_knows_and_does_not_list_is_asked_for(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret"
    server.unlisted = {"any/alias%3F": model("any/alias?", root="m", context_length=50_000), "other": model("m")}
    claude = ["claude", "--url", server.url, "--api-key", "secret", "--model"]
    assert main([*claude, "any/alias?"]) == 0
    out = capsys.readouterr().out
    assert "export ANTHROPIC_MODEL='any/alias?'\n" in out
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=50000\n" in out
    assert refusal([*claude, "another"], capsys) == "the server has no model 'another', but m"
    assert refusal([*claude, "other"], capsys) == "the server has no model 'other', but m"


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("client", ["claude", "aider", "nobody"])
def test_a_shell_starts_no_client_without_its_configuration(shell: str, client: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    connect = f"'{sys.executable}' -m kvbus_cli connect {client} --url http://127.0.0.1:1"
    for line in (f'eval "$({connect})" && echo started', f'eval "$({connect} || echo false)" && echo started'):
        ended = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=False, timeout=60)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert "kvbus connect: " in ended.stderr


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_shell_starts_a_client_with_its_configuration(shell: str, server: Server) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    connect = f"'{sys.executable}' -m kvbus_cli connect claude --url {server.url}"
    line = f'eval "$({connect} || echo false)" && echo "$ANTHROPIC_BASE_URL"'
    ended = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, f"{server.url}\n")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_and_a_fault_are_no_configuration(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        raise fault

    monkeypatch.setattr("kvbus_cli.connect.command.model_at", failing)
    with pytest.raises(fault):
        main(["claude"])
    assert capsys.readouterr().out == "false\n"


def test_a_terminal_is_told_the_error_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["claude", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("client", "variables", "files"),
    [
        ("claude", {"CLAUDE_CONFIG_DIR": "{}/c"}, ["c/settings.json"]),
        ("claude", {"CLAUDE_CONFIG_DIR": ""}, [".claude/settings.json"]),
        ("codex", {"CODEX_HOME": "{}/c"}, ["c/config.toml", "c/kvbus-models.json"]),
        ("openclaw", {"OPENCLAW_HOME": "~/h"}, ["h/.openclaw/openclaw.json"]),
        ("openclaw", {"OPENCLAW_HOME": "{}/h", "OPENCLAW_STATE_DIR": " ~/s "}, ["h/s/openclaw.json"]),
        ("openclaw", {"OPENCLAW_CONFIG_PATH": "~/o.json", "OPENCLAW_STATE_DIR": "{}/s"}, ["o.json"]),
        ("opencode", {"XDG_CONFIG_HOME": "{}/x"}, ["x/opencode/opencode.json"]),
        ("opencode", {"XDG_CONFIG_HOME": "{}/x", "OPENCODE_CONFIG": "{}/o.json"}, ["o.json"]),
        ("opencode", {"OPENCODE_CONFIG": "{}/o.json", "OPENCODE_CONFIG_DIR": "{}/d"}, ["d/opencode.json"]),
        ("qwen", {"QWEN_HOME": "~/q"}, ["q/settings.json"]),
        ("pi", {"PI_CODING_AGENT_DIR": "~"}, ["models.json", "settings.json"]),
    ],
)
def test_files_are_written_where_the_client_reads_them(
    client: str,
    variables: dict[str, str],
    files: list[str],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert main([client, "--url", server.url, "--write"]) == 0
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == files
    if client == "codex":
        settings = tomllib.loads((tmp_path / files[0]).read_text())
        assert settings["model_catalog_json"] == str(tmp_path / files[1])
    if client != "claude":  # its file is not printed, but variables
        capsys.readouterr()
        assert main([client, "--url", server.url]) == 0
        out = capsys.readouterr().out
        assert all(f"# {tmp_path / file}\n" in out for file in files)


def test_a_named_folder_stands_for_the_home_whatever_the_variables_say(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEX_HOME", str(home / "mine"))
    assert main(["codex", "--url", server.url, "--write", str(home / "theirs")]) == 0
    assert not (home / "mine").exists()
    settings = tomllib.loads((home / "theirs/.codex/config.toml").read_text())
    assert settings["model_catalog_json"] == str(home / "theirs/.codex/kvbus-models.json")


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
    server.body = b'{"data": [{"id": "m", "x": ' + b"[" * 100_000
    assert main(["claude", "--url", server.url]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_usual_effort_of_the_catalog_is_one_that_it_lists(server: Server, home: Path) -> None:
    server.models = (model("m", kvbus={"reasoning_efforts": ["none", "low", "high"]}),)
    assert main(["codex", "--url", server.url, "--write"]) == 0
    (entry,) = json.loads((home / ".codex/kvbus-models.json").read_text())["models"]
    assert entry["default_reasoning_level"] in [level["effort"] for level in entry["supported_reasoning_levels"]]
