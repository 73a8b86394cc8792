from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kvbus_testkit.system import System
from kvbus_worker.models import tiny


@pytest_asyncio.fixture
async def tiny_system(tmp_path: Path) -> AsyncIterator[System]:
    """Two workers with a real transformer of random weights, deep enough that an answer takes a while."""
    model = tiny.write(tmp_path / "tiny", arch="qwen3", num_hidden_layers=16)
    flags = f"--engine torch --model {model} --served-model-name tiny --kv-blocks 512 --drain-timeout-s 0.1".split()
    async with System(flags, flags={"frontend": ("--heartbeat-timeout-s", "3")}) as system:
        yield system
