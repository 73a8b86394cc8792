"""A kvbm that fails in every way costs a recompute, never a request, and never gives wrong data."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvbus_runtime.service import host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.timing import eventually
from kvbus_transfer.arena import checksum
from kvbus_wire.errors import ErrorCode
from tests.fault.worker.kvbm_client import BLOCK, KEYS, Client, FakeKvbm, kvbm_host, offloaded, start_client


async def test_new_blocks_are_written_through_with_true_checksums(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    assert fake.arena is not None
    for slot in fake.blocks.values():
        assert checksum(fake.arena.view(slot.index)) == slot.checksum


async def test_blocks_beyond_g1_are_onboarded_and_the_lease_is_released(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    await client.compute(2)
    assert await client.onboard() == (len(KEYS) - 2) * BLOCK
    assert client.engine.cached_blocks(KEYS) == len(KEYS)
    await eventually(lambda: fake.released, what="the release")
    assert fake.released[0].corrupt == ()
    assert not client.kvbm.can_onboard(KEYS), "nothing is missing any more"
    assert client.kvbm.rates.tokens_per_s["g2"] > 0, "what routers are told"


async def test_onboarded_blocks_are_not_written_through_again(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    reserves = fake.calls.count("ReserveBlocks")
    assert await client.onboard() == len(KEYS) * BLOCK
    assert client.metric("offload_queue_blocks") == 0
    assert fake.calls.count("ReserveBlocks") == reserves


async def test_a_corrupt_block_ends_the_run_before_it_and_is_reported(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.spoil(KEYS[4])
    assert await client.onboard() == 4 * BLOCK
    assert client.engine.cached_blocks(KEYS) == 4
    await eventually(lambda: fake.released, what="the release")
    assert fake.released[0].corrupt == (4,)
    assert client.metric("kvbm_failures_total", operation="onboard", reason="corrupt") == 1


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.INTERNAL, ErrorCode.DRAINING])
async def test_a_refusing_kvbm_means_recompute_and_a_rest(pair: tuple[Client, FakeKvbm], code: ErrorCode) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.refuse["PinBlocks"] = code
    assert await client.onboard() == 0
    assert client.metric("kvbm_failures_total", operation="onboard", reason=str(code)) == 1
    del fake.refuse["PinBlocks"]
    assert await client.onboard() == len(KEYS) * BLOCK, "after the rest it is asked again"


async def test_a_kvbm_that_does_not_answer_costs_a_bounded_time(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.hang.add("PinBlocks")
    assert await client.onboard() == 0
    assert client.metric("kvbm_failures_total", operation="onboard", reason="deadline_exceeded") == 1


async def test_a_lease_that_ended_during_the_copy_gives_nothing(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.lease_s = 0.0
    assert await client.onboard() == 0
    assert client.engine.cached_blocks(KEYS) == 0


async def test_a_lost_pool_is_attached_anew(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.refuse["PinBlocks"] = ErrorCode.GONE
    assert await client.onboard() == 0
    del fake.refuse["PinBlocks"]
    await eventually(lambda: fake.calls.count("AttachPool") == 2, what="the second attach")
    assert await client.onboard() == len(KEYS) * BLOCK


async def test_write_through_goes_on_after_a_failure(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    fake.refuse["ReserveBlocks"] = ErrorCode.OVERLOADED
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_failures_total", operation="offload", reason="overloaded") > 0, what="a failure"
    )
    del fake.refuse["ReserveBlocks"]
    await eventually(lambda: client.metric("offload_queue_blocks") == 0, what="an empty queue")
    client.lose_all()
    await offloaded(client, fake)


async def test_a_kvbm_that_lost_the_beginning_of_a_chain_gets_the_whole_chain_again(
    pair: tuple[Client, FakeKvbm],
) -> None:
    client, fake = pair
    await client.compute(8)
    await eventually(lambda: len(fake.blocks) == 8, what="eight blocks written through")
    fake.blocks.clear()
    fake.parents = {b""}
    await client.compute()
    await eventually(lambda: set(fake.blocks) == set(KEYS), what="the whole chain")


async def test_a_restarted_kvbm_is_attached_and_offered_what_g1_holds(settings: CommonSettings, tmp_path: Path) -> None:
    async with host("worker", settings, start_client) as worker:
        client = worker.app
        assert isinstance(client, Client)
        await client.compute()
        for _ in range(2):
            async with kvbm_host(settings, tmp_path) as kvbm:
                fake = kvbm.app
                assert isinstance(fake, FakeKvbm)
                await eventually(lambda fake=fake: set(fake.blocks) == set(KEYS), what="all of G1")  # type: ignore[misc]
            await eventually(lambda: client.link.pool is None, what="the end of the link")
        assert not client.kvbm.can_onboard(KEYS)


async def test_a_kvbm_of_another_host_is_not_used(settings: CommonSettings, tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(settings, host_id="other")
    async with kvbm_host(elsewhere, tmp_path) as kvbm, host("worker", settings, start_client) as worker:
        client, fake = worker.app, kvbm.app
        assert isinstance(client, Client)
        assert isinstance(fake, FakeKvbm)
        await eventually(lambda: worker.service.directory.instances("kvbm"), what="the other host's kvbm")
        await client.compute()
        assert client.link.pool is None
        assert fake.calls == []


async def test_too_many_onboardings_at_once_recompute(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.hang.add("PinBlocks")
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    first = asyncio.create_task(client.onboard())
    await eventually(lambda: "PinBlocks" in fake.calls, what="the first onboarding")
    assert not client.kvbm.can_onboard(KEYS)
    assert client.metric("kvbm_onboard_skipped_total") == 1
    assert await first == 0
