"""What all verbs that ask services have in common."""

import json

import pytest

from kvbus_cli import asking
from kvbus_cli.__main__ import main
from kvbus_cli.index.top import TopSettings
from kvbus_cli.tool import ToolSettings, own_variables, print_json
from kvbus_wire.indexer import IndexDigest, Match


def test_json_has_every_field_whatever_the_bus_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    digest = IndexDigest(indexer_id="i", position=1, entries=0, digest="d")
    print_json({"digest": digest, "matches": (Match("a", "g1", 1),)})
    told = json.loads(capsys.readouterr().out)
    assert told["digest"]["feeds"] == []
    assert told["matches"] == [{"instance_id": "a", "tier": "g1", "depth": 1, "predicted": False}]


def test_a_variable_of_one_tool_does_not_trouble_another() -> None:
    env = {
        "KVBUS_CLI_URL": "http://h",
        "KVBUS_CLI_LIMIT": "3",
        "KVBUS_CLI_JSON": "1",
        "KVBUS_NATS": "nats://h:1",
        "PATH": "/",
    }
    assert set(env) - set(own_variables(ToolSettings, env)) == {"KVBUS_CLI_URL", "KVBUS_CLI_LIMIT"}
    assert set(env) - set(own_variables(TopSettings, env)) == {"KVBUS_CLI_URL"}


@pytest.mark.parametrize("verb", [["doctor"], ["index", "top"], ["trace", "record", "/dev/null"]])
def test_a_bus_that_is_not_there_is_named_without_its_password(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "CONNECT_TIMEOUT_S", 0.05)
    wait = ["--connect-timeout-s", "0.05"] if verb[0] == "trace" else []
    assert main([*verb, "--nats", "nats://me:hidden@127.0.0.1:1", *wait]) == 1
    printed = capsys.readouterr()
    assert "@127.0.0.1:1" in printed.out + printed.err
    assert "hidden" not in printed.out + printed.err
