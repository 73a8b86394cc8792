"""A kvbm that fails in every way costs a recompute, never a request, and never gives wrong data."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvbus_blocks.retention import Directive
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import host
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.timing import eventually
from kvbus_transfer.arena import checksum
from kvbus_wire.errors import ErrorCode
from kvbus_wire.packing import pack_tokens
from kvbus_worker.engines.base import DirectiveRun
from kvbus_worker.engines.said import Said
from tests.fault.worker.kvbm_client import BLOCK, KEYS, TOKENS, Client, FakeKvbm, kvbm_host, offloaded, start_client


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
    fake.refuse["ReserveBlocks"] = ErrorCode.INVALID_REQUEST
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_failures_total", operation="offload", reason="invalid_request") > 0,
        what="a failure",
    )
    del fake.refuse["ReserveBlocks"]
    await eventually(lambda: client.metric("offload_queue_blocks") == 0, what="an empty queue")
    client.lose_all()
    await offloaded(client, fake)


@pytest.mark.parametrize("kind", ["ReserveBlocks", "CommitBlocks"])
async def test_blocks_for_which_kvbm_had_no_time_are_offered_again(pair: tuple[Client, FakeKvbm], kind: str) -> None:
    client, fake = pair
    fake.refuse[kind] = ErrorCode.OVERLOADED
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_failures_total", operation="offload", reason="overloaded") >= 3,
        what="more failures than one",
    )
    assert client.metric("offload_queue_blocks") > 0
    del fake.refuse[kind]
    await eventually(lambda: set(fake.blocks) == set(KEYS), what="all blocks with kvbm")
    assert client.metric("offload_dropped_blocks") == 0


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
    assert not client.kvbm.can_onboard([key[::-1] for key in KEYS])
    assert client.metric("kvbm_onboard_skipped_total") == 1
    assert await first == 0


async def test_onboardings_that_begin_at_the_same_time_are_no_more_than_the_limit(
    pair: tuple[Client, FakeKvbm],
) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    chains = [KEYS, [key[::-1] for key in KEYS], [key[1:] + key[:1] for key in KEYS]]
    assert all(client.kvbm.can_onboard(keys) for keys in chains), "none has begun"
    brought = await asyncio.gather(*(client.kvbm.onboard(keys, pack_tokens(TOKENS)) for keys in chains))
    assert brought == [len(KEYS) * BLOCK, 0, 0]
    assert client.metric("kvbm_onboard_skipped_total") == 2
    assert len(client.kvbm._coming) == 0


async def test_requests_for_the_same_blocks_wait_for_one_onboarding(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    client.slow_prefill()
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    part = KEYS[: len(KEYS) // 2]
    brought = await asyncio.gather(
        client.kvbm.onboard(KEYS, pack_tokens(TOKENS)),
        *(client.kvbm.onboard(keys, pack_tokens(TOKENS)) for keys in (KEYS, part, KEYS)),
        client.kvbm.prefetch(KEYS, pack_tokens(TOKENS), 10.0),
    )
    assert brought == [len(KEYS) * BLOCK, 0, 0, 0, 0]
    assert client.engine.cached_blocks(KEYS) == len(KEYS)
    assert fake.calls.count("PinBlocks") == 1
    assert client.metric("kvbm_onboard_skipped_total") == 0


async def test_who_waited_for_an_onboarding_that_failed_tries_itself(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    client.slow_prefill()
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    fake.spoil(KEYS[4])
    brought = await asyncio.gather(*(client.kvbm.onboard(KEYS, pack_tokens(TOKENS)) for _ in range(2)))
    assert brought == [4 * BLOCK, 0]
    assert fake.calls.count("PinBlocks") == 2
    assert len(client.kvbm._coming) == 0


async def test_nobody_waits_for_others_longer_than_computing_takes(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    fake.hang.add("PinBlocks")
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    first = asyncio.create_task(client.onboard())
    await eventually(lambda: "PinBlocks" in fake.calls, what="the first onboarding")
    assert client.kvbm.can_onboard(KEYS), "it would wait for the first one"
    assert await client.kvbm.onboard(KEYS, pack_tokens(TOKENS)) == 0
    assert not first.done()
    assert await first == 0


async def test_write_through_goes_on_after_somebody_elses_failure(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    client.link.failed("onboard", RequestFailed.of(ErrorCode.OVERLOADED, "told to"))
    await client.compute()
    await eventually(lambda: len(fake.blocks) == len(KEYS), what="all blocks with kvbm")


async def test_blocks_that_leave_g1_before_they_are_written_through_are_counted(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    client.link.failed("onboard", RequestFailed.of(ErrorCode.OVERLOADED, "told to"))
    await client.compute()
    client.lose_all()
    await eventually(lambda: client.metric("offload_evicted_blocks") == len(KEYS), what="the count of those")
    assert client.metric("offload_queue_blocks") == 0
    assert not fake.blocks


async def test_a_block_that_leaves_g1_while_it_is_written_through_is_counted(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    export = client.engine.export_blocks

    async def late(keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        client.lose_all()
        return await export(keys, into)

    client.engine.export_blocks = late  # type: ignore[method-assign]
    await client.compute(2)
    await eventually(lambda: client.metric("offload_evicted_blocks") == 2, what="the count of those")
    assert not fake.blocks


async def test_what_is_said_of_onboarded_blocks_holds_before_their_request_is_admitted(
    pair: tuple[Client, FakeKvbm],
) -> None:
    client, fake = pair
    await offloaded(client, fake)
    client.lose_all()
    said = Said((DirectiveRun(2, 4, Directive("pinned", 0, None, "t")), DirectiveRun(8, None, Directive("ephemeral"))))
    brought = await client.kvbm.onboard(KEYS, pack_tokens(TOKENS), said)
    assert brought == len(KEYS) * BLOCK
    kinds = [held.kind for held in client.engine.directives(KEYS)]
    assert kinds == ["normal"] * 2 + ["pinned"] * 2 + ["normal"] * 4 + ["ephemeral"] * 2
