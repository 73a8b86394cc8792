"""When speculative prefills end, and that none of them is the real request's trouble."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from kvbus_blocks.keys import chain_keys
from kvbus_frontend.adapters.generation import Generator, Spawn
from kvbus_frontend.adapters.session_keeper import SessionKeeper
from kvbus_frontend.adapters.speculation import Speculator
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.settings import FrontendSettings
from kvbus_runtime.log import get_logger
from kvbus_runtime.metrics import Metrics
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import Sampling, Stopping

TOKENS = pack_tokens(range(32))
JOB = Job(
    request_id="r",
    model="m",
    prompt=Prompt(TOKENS, b"".join(chain_keys(b"d" * 32, TOKENS, 16)), b"d" * 32, 16),
    sampling=Sampling(),
    stopping=Stopping(max_tokens=1),
    deadline_ms=1,
)


def _speculator(spawn: Spawn) -> tuple[Speculator, Metrics]:
    metrics = Metrics("frontend")
    nothing, nobody = cast("Generator", None), cast("SessionKeeper", None)
    with ThreadPoolExecutor(1) as executor:
        return Speculator(nothing, executor, FrontendSettings(), metrics, get_logger(), spawn, nobody), metrics


async def test_one_that_has_just_ended_is_not_overtaken_as_well() -> None:
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(None)

    def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        coro.close()
        return cast("asyncio.Task[None]", ended)

    speculator, metrics = _speculator(spawn)
    speculator.begin(JOB, "w1", [1, 2], lambda: None)
    speculator.give_way(JOB)
    assert metrics.value("speculative_prefills_total", {"outcome": "overtaken"}) == 0
    assert metrics.value("speculative_prefills_running") == 0


async def test_a_service_that_takes_no_more_tasks_is_not_the_real_requests_trouble() -> None:
    def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        coro.close()
        raise RuntimeError("the service has ended")

    speculator, metrics = _speculator(spawn)
    speculator.begin(JOB, "w1", [1, 2], lambda: None)
    assert metrics.value("speculative_prefills_running") == 0
