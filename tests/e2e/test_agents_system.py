"""The whole system under what agents do: a fan-out of sub-agents, and turns whose continuation is foreseen."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvbus_testkit.system import Answer, System
from kvbus_testkit.timing import eventually

AGENTS, BLOCK = 10, 16
SYSTEM_PROMPT = {"role": "system", "content": "You are one of several agents that work on the same task. " * 200}
FORESEEING = ("--speculative-prefill-min-tokens", "1", "--speculative-prefill", "always")


def task(number: int) -> list[dict[str, str]]:
    return [SYSTEM_PROMPT, {"role": "user", "content": f"Look into part {number}."}]


def prompt_tokens(answer: Answer) -> int:
    assert answer.usage is not None, answer
    return int(answer.usage["prompt_tokens"])


async def prefilled(system: System) -> float:
    """Prompt tokens that the workers have computed, all together."""
    counts = [await system.metric(name, "kvbus_worker_tokens_total", kind="prefill") for name in system.workers]
    return sum(counts)


async def test_what_agents_share_is_computed_once_and_what_comes_next_before_it_is_asked_for() -> None:
    async with System(("--engine", "mock"), workers=3, flags={"frontend": FORESEEING}) as system:
        answers = await asyncio.gather(*(system.chat(task(number), max_tokens=8) for number in range(AGENTS)))
        sizes = [prompt_tokens(answer) for answer in answers]
        shared = min(sizes) - 100
        assert shared > 10_000
        computed = await prefilled(system)
        assert computed < shared + AGENTS * 200, "the shared prompt is computed once"

        asked = [*task(0), {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "What do you see?"}]
        before = prompt_tokens(await system.chat(asked, max_tokens=1))
        # A byte is a token. The first word of the template behind this answer fills a block.
        said = "A tree that stands alone on a hill".ljust(BLOCK * 4 - 1 - before % BLOCK, ".")
        first = await system.chat(asked, kvbus={"mock": {"output": said}})
        assert first.text == said

        async def foreseen() -> bool:
            return bool(await system.metric("frontend", "kvbus_frontend_speculative_prefill_tokens_total"))

        is_foreseen: Callable[[], Any] = foreseen
        await eventually(is_foreseen, what="the beginning of the next prompt")
        goes_on = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        second = await system.chat(goes_on, max_tokens=4)
        assert second.cached_tokens == before + len(said) + 1
