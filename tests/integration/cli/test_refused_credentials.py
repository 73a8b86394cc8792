"""Tools and a bus that does not take them."""

from collections.abc import Iterator

import pytest

from kvbus_cli.__main__ import main
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.up import run_kvbus


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    with NatsServer(extra='authorization { user: "kvbus", password: "secret" }') as server:
        yield server


@pytest.mark.parametrize("verb", [["doctor"], ["index", "top"], ["router", "limits"]])
def test_a_tool_says_that_the_bus_is_there_and_wants_other_credentials(
    guarded: NatsServer, verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbus_cli.asking.CONNECT_TIMEOUT_S", 1.0)
    assert main([*verb, "--nats", guarded.url]) == 1
    told = "".join(capsys.readouterr())
    assert "wants credentials" in told
    assert "Authorization Violation" in told
    address = guarded.url.removeprefix("nats://")
    assert main([*verb, "--nats", f"nats://kvbus:wrong@{address}"]) == 1
    told = "".join(capsys.readouterr())
    assert "does not take these credentials" in told
    assert "wrong" not in told


def test_nobody_there_is_told_apart_from_that() -> None:
    result = run_kvbus("doctor", "--nats", "nats://127.0.0.1:1")
    assert result.returncode == 1
    assert "no bus at nats://127.0.0.1:1" in result.stdout
    assert "credentials" not in result.stdout
