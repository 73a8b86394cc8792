"""The whole system: blocks of a session that waits go down under pressure, come back before they are needed, and go for good."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus_testkit.system import System
from kvbus_testkit.timing import eventually
from kvbus_worker.models import tiny

BLOCK = 16
G1_BLOCKS = 400
PROMPT = [{"role": "user", "content": "What does the tide do to a lighthouse that stands on a sandbank? " * 60}]
SESSION = {"session": {"id": "s1"}}


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    model = tiny.write(tmp_path / "tiny", context_length=16_384)
    worker = ("--engine", "mock", "--model", str(model), "--kv-blocks", str(G1_BLOCKS), "--mock-speedup", "20")
    kvbm = ("--arena-dir", str(arenas), "--g2-bytes", str(8 << 20))
    async with System(worker, workers=1, flags={"kvbm": kvbm}) as system:
        yield system


async def shown(system: System) -> dict[str, Any]:
    found: dict[str, Any] = await system.get("/v1/sessions/s1")
    return found


def tiers(system: System, is_so: Callable[[dict[str, Any]], bool]) -> Callable[[], Any]:
    async def check() -> bool:
        return is_so(await shown(system))

    return check


async def push_out(system: System) -> None:
    """Other prompts fill G1 more than once."""
    for i in range(6):
        other = [{"role": "user", "content": f"{i} " + f"Something else, number {i}, and not a lighthouse. " * 60}]
        await system.chat(other, max_tokens=4, ignore_eos=True)


async def test_a_waiting_session_is_brought_back_and_its_next_turn_finds_everything_in_g1(system: System) -> None:
    first = await system.chat(PROMPT, max_tokens=8, ignore_eos=True, kvbus=SESSION)
    assert first.usage is not None
    blocks = (first.usage["prompt_tokens"] + 7) // BLOCK
    assert blocks > G1_BLOCKS // 4
    await eventually(tiers(system, lambda s: (s["tiers"] or {}).get("g2", 0) >= blocks), what="the session in G2")
    assert (await shown(system))["blocks"] == blocks
    await push_out(system)
    await eventually(tiers(system, lambda s: (s["tiers"] or {}).get("g1", 0) < blocks // 2), what="room in G1")
    async with system.http.post("/v1/kv/prefetch", json={"session_id": "s1"}) as response:
        told = await response.json()
        assert response.status == 200, told
    assert told["cached_tokens"] == blocks * BLOCK
    assert told["onboarded_tokens"] > 0
    onboarded = await system.metric("worker-0", "kvbus_worker_kvbm_blocks_total", direction="onboard")
    turn = [*PROMPT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    again = await system.chat(turn, max_tokens=8, ignore_eos=True, kvbus=SESSION)
    assert again.cached_tokens >= (first.usage["prompt_tokens"] // BLOCK - 1) * BLOCK
    assert await system.metric("worker-0", "kvbus_worker_kvbm_blocks_total", direction="onboard") == onboarded


async def test_a_deleted_session_leaves_nothing_in_any_tier_but_what_others_share(system: System) -> None:
    await system.chat(PROMPT, max_tokens=8, ignore_eos=True, kvbus=SESSION)
    await eventually(
        tiers(system, lambda s: (s["tiers"] or {}).get("g2", 0) == s["blocks"] > 0), what="the session in G2"
    )
    blocks = (await shown(system))["blocks"]
    async with system.http.delete("/v1/sessions/s1") as response:
        told = await response.json()
        assert response.status == 200, told
    assert told["blocks"] == {"g1": blocks, "g2": blocks}
    again = await system.chat(PROMPT, max_tokens=8, ignore_eos=True)
    assert again.cached_tokens == 0
