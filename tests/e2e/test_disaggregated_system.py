"""Prefill and decode apart, seen by a client and by an operator."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio

from kvbus_testkit.system import System
from kvbus_testkit.timing import eventually
from kvbus_testkit.up import run_kvbus

WORKER = (
    *("--engine", "mock", "--served-model-name", "mock", "--mock-prefill-tokens-per-s", "2000"),
    *("--max-batched-tokens", "128", "--no-kvbm"),
)
ROLES = {"worker-0": ("--role", "prefill"), "worker-1": ("--role", "decode")}
NEXT = [{"role": "assistant", "content": "Fog."}, {"role": "user", "content": "And behind it?"}]


def question(subject: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What does {subject} see in the fog tonight? " * 30}]


@pytest_asyncio.fixture
async def system() -> AsyncIterator[System]:
    async with System(WORKER, workers=2, flags={"router": ("--handover-s", "0.001"), **ROLES}) as running:
        yield running


async def ask(system: System, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {
        "model": system.model,
        "messages": messages,
        "max_tokens": 8,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["worker_id"]},
    }
    status, answer = await system.post("/v1/chat/completions", body)
    assert status == 200, answer
    return dict(answer)


async def tool(system: System, *arguments: str) -> Any:
    flags = ("--nats", system.nats.url, "--namespace", "system", "--json")
    result = await asyncio.to_thread(run_kvbus, *arguments, *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


async def test_a_client_is_told_who_computed_its_prompt_and_an_operator_can_change_that(system: System) -> None:
    first = await ask(system, question("the keeper"))
    assert first["nvext"]["worker_id"] == {"prefill_worker_id": "worker-0", "decode_worker_id": "worker-1"}
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    blocks = first["usage"]["prompt_tokens"] // 16

    # The next turn is short, and what it needs is where it decodes.
    second = await ask(system, [*question("the keeper"), *NEXT])
    assert second["nvext"]["worker_id"] == {"prefill_worker_id": "worker-1", "decode_worker_id": "worker-1"}
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= (blocks - 1) * 16

    told = await tool(system, "router", "explain", "--request-id", first["id"])
    assert (told["worker_id"], told["prefill_worker_id"]) == ("worker-1", "worker-0")
    roles = {row["worker_id"]: row["role"] for row in await tool(system, "worker", "roles")}
    assert roles == {"worker-0": "prefill", "worker-1": "decode"}

    assert await tool(system, "worker", "set-role", "worker-0", "decode") == {"worker-0": "decode"}
    assert await tool(system, "worker", "set-role", "worker-1", "prefill") == {"worker-1": "prefill"}

    flags = ("--nats", system.nats.url, "--namespace", "system")
    refused = await asyncio.to_thread(run_kvbus, "worker", "set-role", "router", "worker-9", "both", *flags)
    assert refused.returncode == 1
    for name in ("router", "worker-9"):
        assert f"{name}: no such worker; there are: worker-0, worker-1" in refused.stderr

    async def is_the_other_way_round() -> bool:
        asked = await ask(system, question(f"the ship {next(numbers)}"))
        return bool(asked["nvext"]["worker_id"] == {"prefill_worker_id": "worker-1", "decode_worker_id": "worker-0"})

    numbers = iter(range(1000))
    changed: Callable[[], Any] = is_the_other_way_round
    await eventually(changed, what="the new roles")
    for worker in system.workers:
        assert await system.metric(worker, "kvbus_worker_transfer_leases") == 0
