"""Two routers, three workers, and an indexer that is killed and comes back while sessions go on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kvbus_testkit.system import Answer, System
from kvbus_testkit.timing import eventually

ROUTERS = ("router", "router-1")
SESSIONS = 6
TURNS = 5
SYSTEM_PROMPT = {"role": "system", "content": "You keep a lighthouse, and answer in short sentences. " * 2}
QUESTION = "Question {turn} of keeper {number}: what of the sea, of the wind, and of the ships that pass? " * 3


@pytest_asyncio.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[System]:
    """Nothing but the index tells where a session's blocks are: the routers remember neither sessions nor what was computed just
    now, and the workers share no memory."""
    mock = ("--engine", "mock", "--model", str(tiny_model), "--mock-speedup", "20", "--kv-blocks", "8192", "--no-kvbm")
    router = ("--affinity", "off", "--inflight-grace-s", "0", "--index-pause-s", "0.2")
    async with System(mock, workers=3, flags={"router": router}) as system:
        system.start(ROUTERS[1])
        await system.until_ready()
        yield system


class Sessions:
    """Each asks, reads the answer, thinks for a moment, and asks again with all of it; after some turns the next one begins."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._stopping = False
        self.turns: dict[int, int] = dict.fromkeys(range(SESSIONS), 0)
        self.answers: list[Answer] = []

    async def run(self, number: int) -> None:
        messages = [SYSTEM_PROMPT]
        while not self._stopping:
            turn = self.turns[number]
            if turn % TURNS == 0:
                messages = [SYSTEM_PROMPT]
            messages.append({"role": "user", "content": QUESTION.format(turn=turn, number=number)})
            answer = await self._system.chat(messages, max_tokens=16)
            self.answers.append(answer)
            self.turns[number] += 1
            messages.append({"role": "assistant", "content": answer.text})
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        self._stopping = True

    async def go_on(self) -> float:
        """For the length of a session: the part of the prompts that was cached."""
        before, first = dict(self.turns), len(self.answers)
        await eventually(
            lambda: all(self.turns[number] >= before[number] + TURNS for number in before),
            timeout_s=60,
            what="more turns of every session",
        )
        usages = [answer.usage for answer in self.answers[first:] if answer.usage is not None]
        prompts: int = sum(usage["prompt_tokens"] for usage in usages)
        cached: int = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return cached / prompts


async def test_no_request_fails_without_the_indexer_and_the_hit_rate_recovers(cluster: System) -> None:
    sessions = Sessions(cluster)
    async with asyncio.TaskGroup() as group:
        for number in range(SESSIONS):
            group.create_task(sessions.run(number))
        await sessions.go_on()
        before = await sessions.go_on()
        cluster.processes["indexer"].kill()
        without = await sessions.go_on()
        cluster.start("indexer")
        await asyncio.to_thread(cluster.processes["indexer"].wait_ready, timeout_s=60)
        asked = await answered_questions(cluster)
        for _ in range(5):  # sessions that began without it still pay for that
            after = await sessions.go_on()
            if after > before - 0.05:
                break
        sessions.stop()
    outcomes = {(str(answer.error), answer.finish_reason, answer.done) for answer in sessions.answers}
    print(f"{len(sessions.answers)} answers; hit rate {before:.3f}, without {without:.3f}, then {after:.3f}")
    assert outcomes == {("None", "length", True)}
    assert before > 0.6
    assert without < before, "else this test would show nothing"
    assert after > before - 0.05
    assert await answered_questions(cluster) > asked
    for router in ROUTERS:
        assert await cluster.metric(router, "kvbus_router_placements_total") > 0
        assert await cluster.metric(router, "kvbus_router_replicas") == 2
        await nothing_is_left(cluster, router)


async def answered_questions(system: System) -> float:
    return sum([await system.metric(router, "kvbus_router_index_queries_total", outcome="ok") for router in ROUTERS])


async def nothing_is_left(system: System, router: str) -> None:
    async def look() -> str:
        return "none" if await system.metric(router, "kvbus_router_reservations") == 0 else ""

    left: str = await eventually(look, what=f"{router} without reservations")
    assert left == "none"
