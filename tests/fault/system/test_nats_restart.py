"""NATS goes away under load and comes back: requests end clean, nothing restarts itself, the index is right again."""

import asyncio
from typing import Any

import pytest

from kvbus_testkit.system import Answer, System
from kvbus_testkit.timing import eventually

LOAD = 6
ROUNDS = 3


def conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Conversation {number}: " + f"what is the number {number}? " * 20}]


@pytest.mark.parametrize("wipe", [False, True], ids=["data-kept", "data-lost"])
async def test_requests_end_clean_services_reconnect_and_the_index_is_right_again(
    tiny_system: System, wipe: bool
) -> None:
    system = tiny_system
    pids = {name: process.pid for name, process in system.processes.items()}

    async def one(number: int) -> Answer:
        return await system.chat(conversation(number), max_tokens=60, ignore_eos=True)

    before = await asyncio.gather(*(one(number) for number in range(LOAD)))
    assert [answer.finish_reason for answer in before] == ["length"] * LOAD

    async def many(number: int) -> list[Answer]:
        return [await one(number) for _ in range(ROUNDS)]

    load = [asyncio.create_task(many(number)) for number in range(LOAD)]

    async def is_under_load() -> bool:
        return sum([await system.metric(name, "kvbus_worker_requests_running") for name in system.workers]) >= LOAD / 2

    condition: Any = is_under_load
    await eventually(condition, what="a loaded system")
    await asyncio.to_thread(system.nats.restart, wipe=wipe)
    under_load = [answer for answers in await asyncio.gather(*load) for answer in answers]
    for answer in under_load:
        clean_error = answer.error is not None and answer.error.get("message")
        assert clean_error or (answer.finish_reason == "length" and answer.done)
    finished = [answer for answer in under_load if answer.error is None]
    assert all(answer.text in {known.text for known in before} for answer in finished)

    await system.until_ready()
    assert {name: process.pid for name, process in system.processes.items()} == pids
    assert all(process.returncode is None for process in system.processes.values())

    # The index must find the prefixes that are there: each conversation hits all its whole blocks.
    for number in range(LOAD):
        again = await one(number)
        assert again.text == before[number].text
        assert again.usage is not None
        whole = (again.usage["prompt_tokens"] - 1) // 16 * 16
        assert again.cached_tokens == whole
