"""Disaggregated requests while workers are killed and stopped and their links, to the bus and to each other, are cut, at random
points of a seed.

40 requests in the gate; ``make chaos`` runs 200. Another seed: KVBUS_CHAOS_SEED.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from kvbus_cli.up.ports import free_port_picker
from kvbus_testkit.proxy import TcpProxy
from kvbus_testkit.system import Answer, System
from kvbus_testkit.timing import eventually, scaled

REQUESTS = int(os.environ.get("KVBUS_CHAOS_REQUESTS", "40"))
SEED = int(os.environ.get("KVBUS_CHAOS_SEED", "7"))
AT_ONCE = 8
PROMPTS = 4
FAULTS = ("kill", "freeze", "cut", "stall")
LINK_FAULTS = ("cut_transfer", "stall_transfer")
"""Of the link on which others read a worker's blocks: the bus is there."""
ROLES = {"worker-0": "prefill", "worker-1": "prefill", "worker-2": "decode", "worker-3": "decode"}
PREFILL = [name for name, role in ROLES.items() if role == "prefill"]
# One is read through shared memory, with the link for what is said about it; of the other all bytes go over the link.
BACKENDS = {"worker-0": "shm,tcp", "worker-1": "tcp"}
GAUGES = ("transfer_leases", "staged_blocks", "remote_prefills_open", "remote_prefill_pulls_open", "requests_open")
WORKER = (
    *("--engine", "mock", "--served-model-name", "mock", "--no-kvbm", "--lease-ttl-s", "2", "--drain-timeout-s", "0.1"),
    *("--mock-prefill-tokens-per-s", "3000", "--max-batched-tokens", "128", "--mock-step-base-s", "0.02"),
    *("--prefill-lease-s", "3", "--prefill-stall-s", "2", "--prefill-timeout-s", "1", "--prefill-chunk-blocks", "4"),
    *("--frontend-grace-s", "2"),
)


class Disaggregated(System):
    """Two workers that prefill and two that decode, with links to the bus and to each other that can be cut.

    A worker listens for others on 127.0.0.2, and what they connect to is a proxy on 127.0.0.1, at the same port.
    """

    def __init__(self) -> None:
        flags: dict[str, tuple[str, ...]] = {name: ("--role", role) for name, role in ROLES.items()}
        flags["frontend"] = ("--heartbeat-timeout-s", "3", "--migration-limit", "8", "--lease-ttl-s", "2")
        flags["router"] = ("--handover-s", "0.001", "--lease-ttl-s", "2", "--worker-wait-s", "20")
        super().__init__(WORKER, workers=len(ROLES), flags=flags, namespace="chaos")
        self.links: dict[str, TcpProxy] = {}
        self.transfers: dict[str, TcpProxy] = {}
        self._proxies = AsyncExitStack()

    async def prepare(self) -> None:
        free_port = free_port_picker(Random())
        for name in PREFILL:
            port = free_port()
            proxy = TcpProxy(f"tcp://127.0.0.2:{port}", port)
            self.transfers[name] = await self._proxies.enter_async_context(proxy)
            self.flags[name] += ("--transfer-host", "127.0.0.2", "--transfer-port", str(port))
            self.flags[name] += ("--transfer-advertise", "127.0.0.1", "--transfer-backends", BACKENDS[name])
        for name in ROLES:
            self.links[name] = await self._proxies.enter_async_context(TcpProxy(self.nats.url))
            self.nats_of[name] = self.links[name].url

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self._proxies.aclose()

    async def left_over(self) -> list[tuple[str, str, float]]:
        found = [(name, g, await self.metric(name, f"kvbus_worker_{g}")) for name in self.workers for g in GAUGES]
        return [each for each in found if each[2]]


def question(number: int) -> dict[str, Any]:
    text = f"{number}: " + "What does the lighthouse keeper see in the fog tonight? " * 22
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "ignore_eos": True, "temperature": 0}


async def ask(system: System, number: int, salt: str, hang_up_after: int = 0) -> Answer:
    """Each salt has a cache of its own, so every prompt is computed anew. ``hang_up_after`` so many chunks the client leaves."""
    answer = Answer()
    async for now in system.stream({**question(number), "cache_salt": salt}, answer):
        if hang_up_after and now.chunks >= hang_up_after:
            break
    return answer


class Chaos:
    """One fault after the other, each on one worker; so of each kind there is always one that works."""

    def __init__(self, system: Disaggregated, rng: Random) -> None:
        self._system = system
        self._rng = rng
        self.done: list[str] = []

    async def run(self, until: asyncio.Event) -> None:
        order = [(kind, name) for kind in FAULTS for name in ROLES]
        order += [(kind, name) for kind in LINK_FAULTS for name in PREFILL]
        self._rng.shuffle(order)
        while not until.is_set():
            kind, name = order[len(self.done) % len(order)]
            await self._pause(0.05, 0.5)
            await getattr(self, kind)(name)
            self.done.append(f"{kind} {name}")

    async def _pause(self, least_s: float, most_s: float) -> None:
        # How long a fault lasts is part of it; nothing is waited for.
        await asyncio.sleep(self._rng.uniform(least_s, most_s))

    async def kill(self, name: str) -> None:
        self._system.processes[name].kill()
        process = self._system.start(name)
        await asyncio.to_thread(process.wait_ready, timeout_s=60)

    async def freeze(self, name: str) -> None:
        process = self._system.processes[name]
        process.send(signal.SIGSTOP)
        await self._pause(0.1, 1.5)
        process.send(signal.SIGCONT)

    async def cut(self, name: str) -> None:
        await self._cut(self._system.links[name])

    async def stall(self, name: str) -> None:
        await self._stall(self._system.links[name])

    async def cut_transfer(self, name: str) -> None:
        await self._cut(self._system.transfers[name])

    async def stall_transfer(self, name: str) -> None:
        await self._stall(self._system.transfers[name])

    async def _cut(self, link: TcpProxy) -> None:
        await link.cut()
        await self._pause(0.05, 1.0)
        await link.heal()

    async def _stall(self, link: TcpProxy) -> None:
        link.stall()
        await self._pause(0.1, 1.5)
        await link.heal()


def is_right(answer: Answer, expected: str, hung_up: bool) -> bool:
    """One end, and nothing wrong before it. (`Answer` itself does not take two ends.)"""
    if hung_up:
        return expected.startswith(answer.text)
    if answer.error is not None:
        return expected.startswith(answer.text) and answer.finish_reason is None
    return answer.text == expected and answer.finish_reason == "length" and answer.done


@pytest.mark.timeout(900)
async def test_every_request_ends_once_with_the_right_tokens_and_nothing_leaks() -> None:
    rng = Random(SEED)
    async with Disaggregated() as system:
        expected = [(await ask(system, number, "calm")).text for number in range(PROMPTS)]
        pulled = sum([await system.metric(name, "kvbus_worker_transfer_blocks_total") for name in system.workers])
        assert pulled > 0, "nothing was disaggregated"

        over = asyncio.Event()
        chaos = Chaos(system, rng)
        faults = asyncio.create_task(chaos.run(over))
        turns = asyncio.Semaphore(AT_ONCE)
        hang_ups = [rng.choice((0, 0, 0, 3)) for _ in range(REQUESTS)]

        async def one(number: int) -> Answer:
            async with turns:
                return await ask(system, number % PROMPTS, f"salt-{number}", hang_ups[number])

        answers = await asyncio.wait_for(asyncio.gather(*map(one, range(REQUESTS))), scaled(600))
        over.set()
        await faults
        failed = [answer.error for answer in answers if answer.error is not None]
        codes = Counter(str(error.get("code")) for error in failed)
        print(f"seed {SEED}: {len(answers)} requests, {len(failed)} ended with an error: {dict(codes)}")
        print(f"faults: {', '.join(chaos.done)}")

        wrong = [
            (number, answer)
            for number, answer in enumerate(answers)
            if not is_right(answer, expected[number % PROMPTS], bool(hang_ups[number]))
        ]
        assert not wrong, chaos.done
        assert len(failed) <= REQUESTS // 20, failed

        async def nothing_is_left() -> bool:
            return not await system.left_over()

        ended: Callable[[], Any] = nothing_is_left
        await eventually(ended, timeout_s=30, what="the end of all leases, jobs and requests")
