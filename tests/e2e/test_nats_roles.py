"""The shipped NATS configuration with one user per role: the system works with it, and nobody asks for more than the role has."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbus_runtime.bus import open_bus
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, eventually_sync
from kvbus_testkit.up import KvbusUp, run_kvbus

ROLES = ("frontend", "router", "indexer", "worker", "kvbm")
CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "nats" / "nats-roles.conf"
QUESTION = [{"role": "user", "content": "A prompt of several blocks, so that there is something to keep. " * 4}]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    for role in (*ROLES, "operator"):
        monkeypatch.setenv(f"{role.upper()}_PASSWORD", f"secret-of-{role}")
    with NatsServer(extra=CONFIG.read_text().replace('include "nats.conf"', ""), max_payload_bytes=8 << 20) as server:
        yield server


def test_every_role_has_what_it_needs_and_nothing_is_refused(
    server: NatsServer, start_system: Callable[..., KvbusUp], tmp_path: Path
) -> None:
    credentials = [
        argument
        for role in ROLES
        for argument in ("--set", f"{role}.nats_user={role}", "--set", f"{role}.nats_password=secret-of-{role}")
    ]
    system = start_system("--nats", server.url, *credentials, "--set", "indexer.checkpoint_interval_s=0.5")
    first = system.chat(QUESTION, max_tokens=8)
    second = system.chat(QUESTION, max_tokens=8)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] // 16 * 16 - 16
    made = json.loads(system.post("/v1/responses", {"model": system.model, "input": "hi", "max_output_tokens": 8}))
    again = {"model": system.model, "input": "hi", "max_output_tokens": 8, "previous_response_id": made["id"]}
    assert "response.queued" in system.post("/v1/responses", {**again, "background": True, "stream": True})

    session = {"kvbus": {"session": {"id": "s1"}}}
    system.chat(QUESTION, max_tokens=8, **session)
    prefetched = json.loads(system.post("/v1/kv/prefetch", {"session_id": "s1"}))
    assert prefetched["cached_tokens"] > 0

    operator = ("--nats-user", "operator", "--nats-password", "secret-of-operator")

    def tiers() -> set[str]:
        result = run_kvbus("events", "--nats", server.url, *operator, "--from", "all", "--no-follow", "--json")
        assert result.returncode == 0, result.stderr
        return {str(json.loads(line)["tier"]) for line in result.stdout.splitlines()}

    eventually_sync(lambda: tiers() == {"g1", "g2"}, what="events of workers and kvbm")

    def ask(*arguments: str) -> dict[str, Any]:
        result = run_kvbus(*arguments, "--nats", server.url, *operator, "--json")
        assert result.returncode == 0, result.stdout + result.stderr
        told: dict[str, Any] = json.loads(result.stdout)
        return told

    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": system.model, "messages": QUESTION}))
    held = ask("index", "query", "--messages", str(body), "--url", system.url)["holdings"]
    assert {line["tier"] for line in held} == {"g1", "g2"}
    assert ask("index", "top")["models"][0]["found"] > 0
    assert ask("index", "digest")["equal"]
    assert [tier["tier"] for tier in ask("kv", "ls")["kvbms"][0]["tiers"]] == ["g2"]
    standing = ask("kv", "inspect", "--messages", str(body), "--url", system.url)["standing"]
    assert [(line["tier"], line["leading"] > 0) for line in standing] == [("g2", True)]
    findings = ask("doctor")["findings"]
    assert {finding["level"] for finding in findings} == {"ok"}, findings
    limits = run_kvbus("router", "limits", "--nats", server.url, *operator, "--cordon", "worker-9")
    explained = run_kvbus("router", "explain", "--nats", server.url, *operator, "--request-id", first["id"], "--json")
    assert (limits.returncode, explained.returncode) == (0, 0), limits.stderr + explained.stderr
    assert json.loads(explained.stdout)["ttft_s"] > 0
    system.interrupt()
    assert system.wait() == 0, system.output
    refused = [line for line in server.log_file.read_text().splitlines() if "Violation" in line]
    assert refused == []


def test_a_role_cannot_do_what_belongs_to_another(server: NatsServer) -> None:
    result = run_kvbus("events", "--nats", server.url, "--nats-user", "router", "--nats-password", "secret-of-router")
    assert result.returncode == 1
    assert "Violation" in server.log_file.read_text()


async def test_a_role_cannot_listen_to_the_replies_of_another(server: NatsServer) -> None:
    settings = CommonSettings(nats=server.url, nats_user="router", nats_password="secret-of-router")
    async with open_bus(settings, name="listener") as bus:
        await bus.subscribe_bytes("_INBOX.frontend.>", lambda subject, data, headers: None)
        await eventually(
            lambda: any(
                "Subscription Violation" in line and "_INBOX.frontend.>" in line
                for line in server.log_file.read_text().splitlines()
            ),
            what="the server's refusal",
        )
