"""Each client's configuration, against the text that the client was tried with."""

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_cli.connect.clients import CLIENTS
from kvbus_cli.connect.configuration import ApiKey, Connection
from kvbus_cli.connect.merging import text_of
from kvbus_cli.connect.printing import printed

GOLDEN = Path(__file__).parent / "connect_golden"
CONNECTION = Connection(
    url="http://127.0.0.1:8000",
    model="tide-coder",
    context_tokens=131_072,
    output_tokens=32_000,
    home="/home/kvbus",
    reasons=True,
)
SPOKEN = [(client.name, api) for client in CLIENTS.values() for api in client.apis]


def connected(name: str, **changes: Any) -> str:
    connection = msgspec.structs.replace(CONNECTION, **{"api": CLIENTS[name].apis[0], **changes})
    return printed(CLIENTS[name].configure(connection), connection.key, connection.home)


@pytest.mark.parametrize(("name", "api"), SPOKEN)
def test_each_client_gets_what_it_was_tried_with(name: str, api: str) -> None:
    golden = GOLDEN / (f"{name}.txt" if api == CLIENTS[name].apis[0] else f"{name}-{api}.txt")
    assert connected(name, api=api) + "\n" == golden.read_text()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_key_in_a_variable_is_named_and_never_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-value")
    text = connected(name, key=ApiKey(variable="MY_KEY"))
    assert "MY_KEY" in text
    assert "secret-value" not in text
    assert "=local" not in text
    assert '"local"' not in text


@pytest.mark.parametrize("name", CLIENTS)
def test_a_key_that_was_given_is_written_once(name: str) -> None:
    assert connected(name, key=ApiKey(text="given-key")).count("given-key") == 1


def test_files_hold_what_the_variables_say() -> None:
    claude = CLIENTS["claude"].configure(CONNECTION)
    [settings] = claude.files
    assert settings.content["env"] == claude.exports(CONNECTION.key)
    by_variable = CLIENTS["claude"].configure(msgspec.structs.replace(CONNECTION, key=ApiKey(variable="MY_KEY")))
    assert by_variable.files[0].content["apiKeyHelper"] == "printenv MY_KEY"
    aider = CLIENTS["aider"].configure(CONNECTION)
    lines = dict(line.split("=", 1) for line in text_of(aider.files[0]).splitlines())
    assert lines == aider.exports(CONNECTION.key)


def test_a_model_that_does_not_think_is_not_asked_to() -> None:
    assert "CLAUDE_CODE_DISABLE_THINKING=1" in connected("claude", reasons=False)
    assert "CLAUDE_CODE_DISABLE_THINKING" not in connected("claude")
    assert '"reasoning": false' in connected("pi", reasons=False)


@pytest.mark.parametrize(
    ("efforts", "default"), [((), None), (("low", "medium", "high"), "medium"), (("high", "max"), "high")]
)
def test_codex_offers_the_efforts_that_the_model_knows(efforts: tuple[str, ...], default: str | None) -> None:
    configuration = CLIENTS["codex"].configure(msgspec.structs.replace(CONNECTION, efforts=efforts))
    [model] = json.loads(text_of(configuration.files[1]))["models"]
    assert [level["effort"] for level in model["supported_reasoning_levels"]] == list(efforts)
    assert model.get("default_reasoning_level") == default


def test_names_are_quoted_for_shells_and_toml() -> None:
    assert "export ANTHROPIC_MODEL='it'\"'\"'s $HOME'" in connected("claude", model="it's $HOME")
    config, catalog = CLIENTS["codex"].configure(msgspec.structs.replace(CONNECTION, model='a"b\\c')).files
    assert tomllib.loads(text_of(config))["model"] == json.loads(text_of(catalog))["models"][0]["slug"] == 'a"b\\c'
