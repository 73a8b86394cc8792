"""A worker that is killed in the middle of an answer is replaced without the client noticing."""

import asyncio
from typing import Any

import pytest

from kvbus_testkit.system import Answer, System
from kvbus_testkit.timing import eventually

QUESTION = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and the sea."}]


async def busy_worker(system: System) -> str:
    """The worker that runs a request right now, by its own metrics."""

    async def find() -> str:
        for name in system.workers:
            if (
                system.processes[name].returncode is None
                and await system.metric(name, "kvbus_worker_requests_running") > 0
            ):
                return name
        return ""

    return await eventually(find, what="a worker with a running request")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
async def test_the_stream_goes_on_and_the_text_equals_the_undisturbed_one(
    tiny_system: System, sampling: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 600, "ignore_eos": True, **sampling}
    undisturbed = await tiny_system.chat(**body)
    assert undisturbed.finish_reason == "length"

    answer = Answer()
    killed = ""
    async for now in tiny_system.stream(body, answer):
        if now.chunks >= 5 and not killed:
            killed = await busy_worker(tiny_system)
            tiny_system.processes[killed].kill()

    assert killed
    assert answer.error is None
    assert answer.text == undisturbed.text
    assert (answer.finish_reason, answer.done) == ("length", True)
    assert answer.usage is not None
    assert undisturbed.usage is not None
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[count] == undisturbed.usage[count]
    assert await tiny_system.metric("frontend", "kvbus_frontend_migrations_total") == 1


async def test_a_worker_that_is_told_to_stop_hands_over_what_it_cannot_finish(tiny_system: System) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    undisturbed = await tiny_system.chat(**body)

    answer = Answer()
    stopped = ""
    async for now in tiny_system.stream(body, answer):
        if now.chunks >= 5 and not stopped:
            stopped = await busy_worker(tiny_system)
            tiny_system.processes[stopped].terminate()

    assert (answer.error, answer.finish_reason, answer.done) == (None, "length", True)
    assert answer.text == undisturbed.text
    assert await tiny_system.metric("frontend", "kvbus_frontend_migrations_total") == 1
    assert await asyncio.to_thread(tiny_system.processes[stopped].wait) == 0


async def test_with_no_worker_left_the_stream_ends_with_one_error_and_the_system_recovers(tiny_system: System) -> None:
    answer = Answer()
    workers = tiny_system.workers
    async for now in tiny_system.stream({"messages": QUESTION, "max_tokens": 1500, "ignore_eos": True}, answer):
        if now.chunks == 3:
            for name in workers:
                tiny_system.processes[name].kill()

    assert answer.error is not None
    assert answer.error["message"]
    assert answer.finish_reason is None

    async def nothing_served() -> Any:
        return not (await tiny_system.get("/v1/models"))["data"]

    await eventually(nothing_served, what="the end of the killed workers' leases")
    refused = await tiny_system.chat(QUESTION, max_tokens=5)
    assert refused.error is not None
    assert (refused.error["status"], refused.error["code"]) == (503, "no_workers")

    for name in workers:
        tiny_system.start(name)
    await tiny_system.until_ready()
    recovered = await tiny_system.chat(QUESTION, max_tokens=5, ignore_eos=True)
    assert recovered.finish_reason == "length", recovered.error
