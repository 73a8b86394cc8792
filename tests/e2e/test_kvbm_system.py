"""The whole system: what a killed worker has computed is read from host memory by the other one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus_testkit.system import System
from kvbus_testkit.timing import eventually
from kvbus_worker.models import tiny

pytest.importorskip("torch")

BLOCK = 16
QUESTION = [{"role": "user", "content": "What does the tide do to a lighthouse that stands on a sandbank? " * 63}]


async def worker_that_offloaded(system: System) -> str:
    for name in system.workers:
        if await system.metric(name, "kvbus_worker_kvbm_blocks_total") > 0:
            return name
    return ""


async def test_the_other_worker_answers_the_same_with_the_prefix_from_host_memory(tmp_path: Path) -> None:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    model = tiny.write(tmp_path / "tiny", arch="qwen3", context_length=8192)
    flags = ("--engine", "torch", "--model", str(model), "--served-model-name", "tiny", "--kv-blocks", "320")
    kvbm_flags = ("--arena-dir", str(arenas), "--g2-bytes", str(64 << 20))
    async with System(flags, flags={"kvbm": kvbm_flags}) as system:
        first = await system.chat(QUESTION, max_tokens=20, ignore_eos=True)
        assert first.cached_tokens == 0
        assert first.usage is not None
        prompt_tokens = first.usage["prompt_tokens"]
        assert prompt_tokens > 4096
        reusable = (prompt_tokens - 1) // BLOCK * BLOCK

        async def is_written_through() -> bool:
            return bool(await system.metric("kvbm", "kvbus_kvbm_blocks_stored_total") >= reusable // BLOCK)

        written: Callable[[], Any] = is_written_through
        await eventually(written, what="the prompt in host memory")
        computed = await worker_that_offloaded(system)
        system.processes[computed].kill()
        (other,) = [name for name in system.workers if name != computed]
        again = await system.chat(QUESTION, max_tokens=20, ignore_eos=True)
        assert again.text == first.text
        assert again.cached_tokens == reusable
        assert await system.metric(other, "kvbus_worker_kvbm_blocks_total") >= reusable // BLOCK
        assert await system.metric("kvbm", "kvbus_kvbm_block_hits_total") >= reusable // BLOCK
        assert await system.metric("kvbm", "kvbus_kvbm_blocks_corrupt_total") == 0
