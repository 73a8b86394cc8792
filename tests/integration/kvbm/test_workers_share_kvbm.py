"""Whole workers around one kvbm: what one computed, the other reads from host memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus_testkit.kvbm import by_hand
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_worker.models import tiny
from tests.integration.one_host import Kvbm, OneHost, app_of, metric

BLOCK = 16
PROMPT_BLOCKS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def one_host(nats_server: NatsServer, namespace: str, model: Path, tmp_path: Path) -> AsyncIterator[OneHost]:
    mock = {"model": str(model), "served_model_name": "tiny", "mock_speedup": 1000.0}
    async with AsyncExitStack() as stack:
        yield OneHost(stack, nats_server.url, namespace, tmp_path, model="tiny", worker=mock)


def prompt(seed: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    return [(seed * 31 + i * 7) % 200 + 10 for i in range(blocks * BLOCK + 1)]


async def stored(kvbm: Kvbm, blocks: int) -> None:
    """Wait until kvbm holds so many blocks in all."""
    await eventually(
        lambda: sum(pool.pool.usage().present for pool in app_of(kvbm).pools) >= blocks,
        what=f"{blocks} blocks in host memory",
    )


async def test_a_prefix_that_one_worker_computed_is_onboarded_by_the_other(one_host: OneHost) -> None:
    kvbm = await one_host.kvbm()
    await one_host.worker("worker-a")
    await one_host.worker("worker-b")
    asker = await one_host.asker()
    first = await asker.ask("worker-a", prompt(1))
    assert (first.cached, first.onboarded) == (0, 0)
    await stored(kvbm, PROMPT_BLOCKS)
    second = await asker.ask("worker-b", prompt(1))
    assert (second.cached, second.onboarded) == (PROMPT_BLOCKS * BLOCK, PROMPT_BLOCKS * BLOCK)
    assert second.tokens == first.tokens
    third = await asker.ask("worker-b", prompt(1))
    assert (third.cached, third.onboarded) == (PROMPT_BLOCKS * BLOCK, 0)
    (pool,) = app_of(kvbm).pools
    await eventually(lambda: pool.pool.usage().leases == 0, what="all leases ended")
    pool.pool.check_integrity()


async def test_a_worker_that_evicted_its_blocks_reads_them_back(one_host: OneHost) -> None:
    kvbm = await one_host.kvbm()
    worker = await one_host.worker("worker-a", kv_blocks=16)
    asker = await one_host.asker()
    first = await asker.ask("worker-a", prompt(1))
    await stored(kvbm, PROMPT_BLOCKS)
    for seed in (2, 3, 4):
        await asker.ask("worker-a", prompt(seed))
    again = await asker.ask("worker-a", prompt(1))
    assert again.onboarded == PROMPT_BLOCKS * BLOCK
    assert again.tokens == first.tokens
    assert metric(worker, "kvbm_blocks_total", direction="onboard") >= PROMPT_BLOCKS


async def test_a_damaged_block_is_computed_again_from_there_on(one_host: OneHost) -> None:
    kvbm = await one_host.kvbm()
    await one_host.worker("worker-a")
    second = await one_host.worker("worker-b")
    asker = await one_host.asker()
    first = await asker.ask("worker-a", prompt(1))
    await stored(kvbm, PROMPT_BLOCKS)
    (pool,) = app_of(kvbm).pools
    chain = next(chain for chain in pool.pool.chains() if not chain.parent)
    common = kvbm.service.settings
    async with by_hand(common.nats, common.namespace, "worker-evil", "kvbm-1") as evil:
        spec = pool.spec
        await evil.attach(
            model="tiny", kv_layout=spec.kv_layout, block_bytes=spec.block_bytes, block_size=spec.block_size
        )
        assert evil.arena is not None
        fifth = pool.pool.pin("worker-evil", chain.keys[4 * 16 : 5 * 16], asyncio.get_running_loop().time())
        evil.arena.view(fifth.slots[0].index)[7] ^= 0xFF
    answer = await asker.ask("worker-b", prompt(1))
    assert answer.onboarded == 4 * BLOCK
    assert answer.tokens == first.tokens
    assert metric(second, "kvbm_failures_total", operation="onboard", reason="corrupt") == 1
    assert pool.pool.counters.corrupt == 1
    await stored(kvbm, PROMPT_BLOCKS)  # what was computed again is written through again


async def test_workers_outlive_their_kvbm_and_fill_the_next_one(one_host: OneHost) -> None:
    asker = await one_host.asker()
    async with AsyncExitStack() as first_life:
        kvbm = await one_host.kvbm(first_life)
        worker = await one_host.worker("worker-a")
        await one_host.worker("worker-b")
        first = await asker.ask("worker-a", prompt(1))
        await stored(kvbm, PROMPT_BLOCKS)
    await eventually(lambda: metric(worker, "kvbm_attached") == 0, what="a worker without kvbm")
    assert (await asker.ask("worker-a", prompt(1))).tokens == first.tokens
    kvbm = await one_host.kvbm()
    await stored(kvbm, PROMPT_BLOCKS)
    answer = await asker.ask("worker-b", prompt(1))
    assert answer.tokens == first.tokens
    assert answer.onboarded == PROMPT_BLOCKS * BLOCK
