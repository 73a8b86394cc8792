"""Two workers and the real kvbm of one host: what one computed the other reads back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus_testkit.nats import NatsServer
from tests.integration.one_host import OneHost, is_attached, metric, written_through

PROMPT = [i * 7 % 250 for i in range(330)]
FULL_BLOCKS = 20


@pytest.fixture
async def on(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[OneHost]:
    async with AsyncExitStack() as stack:
        yield OneHost(stack, nats_server.url, namespace, tmp_path)


async def test_a_prefix_computed_on_one_worker_is_onboarded_into_another(on: OneHost) -> None:
    await on.kvbm()
    first, second, asker = await on.worker("w1"), await on.worker("w2"), await on.asker()
    cold = await asker.ask("w1", PROMPT)
    assert (cold.cached, cold.onboarded) == (0, 0)
    await written_through(first, FULL_BLOCKS)
    warm = await asker.ask("w2", PROMPT)
    assert warm.usage.onboarded_tokens == warm.usage.cached_tokens == FULL_BLOCKS * 16
    assert warm.tokens == cold.tokens
    assert metric(second, "tokens_total", kind="onboarded") == FULL_BLOCKS * 16
    again = await asker.ask("w2", PROMPT)
    assert (again.cached, again.onboarded) == (FULL_BLOCKS * 16, 0)


async def test_blocks_evicted_from_g1_come_back_from_g2(on: OneHost) -> None:
    await on.kvbm()
    worker, asker = await on.worker("w1", kv_blocks=24), await on.asker()
    await asker.ask("w1", PROMPT)
    await written_through(worker, FULL_BLOCKS)
    await asker.ask("w1", PROMPT, cache_salt="another tenant")
    back = await asker.ask("w1", PROMPT)
    assert back.cached == FULL_BLOCKS * 16
    assert back.onboarded > 0


async def test_another_tenants_blocks_are_not_onboarded(on: OneHost) -> None:
    await on.kvbm()
    first, asker = await on.worker("w1"), await on.asker()
    await on.worker("w2")
    await asker.ask("w1", PROMPT, cache_salt="one")
    await written_through(first, FULL_BLOCKS)
    assert (await asker.ask("w2", PROMPT, cache_salt="two")).cached == 0


async def test_requests_go_on_without_kvbm_and_use_it_again_when_it_is_back(on: OneHost) -> None:
    asker = await on.asker()
    async with AsyncExitStack() as first_life:
        await on.kvbm(first_life)
        first = await on.worker("w1")
        await asker.ask("w1", PROMPT)
        await written_through(first, FULL_BLOCKS)
    second = await on.worker("w2", attached=False)
    assert (await asker.ask("w2", PROMPT, cache_salt="elsewhere")).cached == 0
    await on.kvbm()
    await is_attached(first, second)
    # What G1 held is offered to the new kvbm, so the other worker finds it.
    await written_through(first, 2 * FULL_BLOCKS)
    assert (await asker.ask("w2", PROMPT)).onboarded == FULL_BLOCKS * 16


async def test_a_worker_that_cannot_export_leaves_kvbm_alone(on: OneHost) -> None:
    await on.kvbm()
    worker, asker = await on.worker("w1", attached=False, mock_block_bytes=0), await on.asker()
    await asker.ask("w1", PROMPT)
    assert metric(worker, "kvbm_attached") == 0


async def test_torch_workers_share_blocks_and_say_the_same(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from kvbus_worker.models import tiny

    folder = await asyncio.to_thread(tiny.write, tmp_path / "model", arch="qwen3")
    torch = {"engine": "torch", "model": str(folder), "served_model_name": "tiny", "kv_blocks": 48, "threads": 1}
    async with AsyncExitStack() as stack:
        on = OneHost(stack, nats_server.url, namespace, tmp_path, model="tiny", worker=torch)
        await on.kvbm(g2_bytes=64 << 20)
        first, asker = await on.worker("w1"), await on.asker()
        await on.worker("w2")
        cold = await asker.ask("w1", PROMPT, 20)
        assert cold.cached == 0
        await written_through(first, FULL_BLOCKS)
        warm = await asker.ask("w2", PROMPT, 20)
        assert warm.usage.onboarded_tokens == warm.usage.cached_tokens == FULL_BLOCKS * 16
        assert warm.tokens == cold.tokens
        assert len(set(cold.tokens)) > 1
