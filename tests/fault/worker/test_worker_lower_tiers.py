"""Blocks of lower tiers come up while others are copied, as long as that is sooner than computing them."""

import asyncio

import pytest

from kvbus_blocks.retention import Directive
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kvbm import BlockDirective
from kvbus_wire.packing import pack_tokens, unpack_keys
from kvbus_worker.engines.base import DirectiveRun
from tests.fault.worker.kvbm_client import BLOCK, KEYS, TOKENS, Client, FakeKvbm, offloaded

with_g3 = pytest.mark.parametrize("pair", [{"g3_bytes": 1 << 20}], indirect=True)
with_g3_and_g4 = pytest.mark.parametrize("pair", [{"g3_bytes": 1 << 20, "g4_store": "file:///s"}], indirect=True)


async def _in_lower_tier(client: Client, fake: FakeKvbm, first: int) -> None:
    """All blocks are with kvbm and none in G1; those from ``first`` on lie below G2."""
    await offloaded(client, fake)
    client.lose_all()
    fake.below = set(KEYS[first:])
    fake.waits.clear()


@with_g3
async def test_what_lies_below_g2_follows_what_lies_in_it(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 4)
    client.slow_prefill()
    assert await client.onboard() == len(KEYS) * BLOCK
    assert fake.waits[0] == 0.0, "what is there is asked for first"
    assert all(wait_s > 0 for wait_s in fake.waits[1:])
    assert client.kvbm.rates.tokens_per_s.keys() == {"g2", "g3"}
    await eventually(lambda: len(fake.released) == 3, what="the end of all leases")


@with_g3
async def test_a_run_is_copied_while_the_next_one_comes_up(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 4)
    client.slow_prefill()
    fake.lift.clear()
    bringing = asyncio.create_task(client.onboard())
    await eventually(lambda: client.engine.cached_blocks(KEYS) == 4, what="the blocks of G2 in G1")
    assert not bringing.done()
    fake.lift.set()
    assert await bringing == len(KEYS) * BLOCK


@with_g3
async def test_nothing_is_waited_for_that_is_sooner_computed(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.lift.clear()  # the engine computes in no time
    assert await client.onboard() == 0
    assert client.metric("kvbm_failures_total", operation="onboard", reason="deadline_exceeded") == 0
    assert client.link.pool is not None, "that is no reason to leave kvbm alone"


@with_g3
async def test_a_prefetch_waits_though_computing_would_be_sooner(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    assert await client.kvbm.prefetch(KEYS, pack_tokens(TOKENS), 60.0) == len(KEYS) * BLOCK


@with_g3
async def test_a_prefetch_asks_again_when_kvbm_waits_no_longer(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.lift.clear()
    fake.max_wait_s = 0.01
    bringing = asyncio.create_task(client.kvbm.prefetch(KEYS, pack_tokens(TOKENS), 60.0))
    await eventually(lambda: len(fake.waits) > 3, what="more questions")
    fake.lift.set()
    assert await bringing == len(KEYS) * BLOCK


@with_g3
async def test_prefetches_keep_no_request_from_onboarding(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.lift.clear()
    bringing = asyncio.create_task(client.kvbm.prefetch(KEYS, pack_tokens(TOKENS), 60.0))
    await eventually(lambda: len(fake.waits) > 1, what="a prefetch that waits")
    assert client.kvbm.can_onboard(KEYS)
    fake.lift.set()
    assert await bringing == len(KEYS) * BLOCK


@with_g3
async def test_a_prefetch_of_what_is_nowhere_ends_at_once(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    fake.lift.clear()
    assert await client.kvbm.prefetch(KEYS, pack_tokens(TOKENS), 3600.0) == 0


@with_g3
async def test_a_prefetch_that_reaches_its_end_keeps_what_came(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 4)
    fake.lift.clear()
    assert await client.kvbm.prefetch(KEYS, pack_tokens(TOKENS), 0.2) == 4 * BLOCK
    assert client.link.pool is not None


async def test_without_lower_tiers_nothing_is_waited_for(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 4)
    assert await client.onboard() == 4 * BLOCK
    assert fake.waits == [0.0]


@with_g3
async def test_a_run_that_nobody_takes_is_released(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 4)
    client.slow_prefill()
    fake.spoil(KEYS[1])
    assert await client.onboard() == BLOCK
    await eventually(lambda: len(fake.released) == 2, what="the end of both leases")


async def test_directives_go_to_kvbm_and_what_it_does_not_pin_comes_back(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    fake.unpinned = (2,)
    runs = (DirectiveRun(1, 3, Directive("pinned", 0, None, "t")), DirectiveRun(5, 6, Directive(priority=-1)))
    assert await client.kvbm.retain(KEYS, runs) == frozenset({KEYS[2]})
    message = fake.retained[0]
    assert unpack_keys(message.keys) == KEYS[:6]
    assert message.directives == (BlockDirective(1, 3, "pinned", 0, None, "t"), BlockDirective(5, 6, "normal", -1))


async def test_a_kvbm_that_cannot_retain_is_used_all_the_same(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await eventually(lambda: client.link.pool is not None, what="an attached kvbm")
    fake.refuse["RetainBlocks"] = ErrorCode.UNSUPPORTED
    assert await client.kvbm.retain(KEYS, (DirectiveRun(0, 1, Directive("pinned")),)) is None
    assert client.link.pool is not None
    assert client.metric("kvbm_failures_total", operation="retain", reason="unsupported") == 1


async def test_new_blocks_take_their_directives_along(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await client.compute(4)
    assert await client.engine.touch(KEYS, (DirectiveRun(0, 2, Directive(priority=7)),)) == 4
    fake.refuse.clear()
    await eventually(lambda: len(fake.blocks) == 4, what="the blocks with kvbm")
    assert fake.reservations[-1].directives == (BlockDirective(0, 2, "normal", 7),)


async def test_a_lost_lease_says_nothing_of_the_pool(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    fake.refuse["CommitBlocks"] = ErrorCode.GONE
    await client.compute()
    await eventually(
        lambda: client.metric("kvbm_failures_total", operation="commit", reason="gone") > 0, what="a lost lease"
    )
    assert client.link.pool is not None
    assert fake.calls.count("AttachPool") == 1


@with_g3_and_g4
async def test_each_tier_has_the_rate_at_which_its_own_blocks_came(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 4)
    fake.tiers = dict.fromkeys(KEYS[7:], "g4")
    client.slow_prefill()
    assert await client.onboard() == len(KEYS) * BLOCK
    assert client.kvbm.rates.tokens_per_s.keys() == {"g2", "g3", "g4"}
    assert set(fake.asked_tiers) == {("g3", "g4")}


@with_g3_and_g4
async def test_blocks_of_two_tiers_at_once_say_nothing_of_either(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.tiers, fake.lifts = dict.fromkeys(KEYS[7:], "g4"), len(KEYS)
    client.slow_prefill()
    assert await client.onboard() == len(KEYS) * BLOCK
    assert client.kvbm.rates.tokens_per_s == {}


@with_g3_and_g4
async def test_what_was_brought_up_for_another_reader_says_nothing_of_host_memory(
    pair: tuple[Client, FakeKvbm],
) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.tiers = dict.fromkeys(KEYS, "g2")
    client.slow_prefill()
    assert await client.onboard() == len(KEYS) * BLOCK
    assert client.kvbm.rates.tokens_per_s == {}


@with_g3_and_g4
async def test_a_tier_that_gives_nothing_in_time_is_left_out_and_the_other_one_is_not(
    pair: tuple[Client, FakeKvbm],
) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.tier = "g4"
    fake.lift.clear()
    client.prefill(400.0)
    assert await client.onboard() == 0
    assert await client.onboard() == 0
    assert fake.asked_tiers[0] == ("g3", "g4")
    assert fake.asked_tiers[-1] == ("g3",)
    assert client.link.pool is not None


@with_g3
async def test_a_tier_that_is_slower_than_the_limit_leaves_host_memory_in_use(pair: tuple[Client, FakeKvbm]) -> None:
    client, fake = pair
    await _in_lower_tier(client, fake, 0)
    fake.lift.clear()
    client.slow_prefill()
    assert await client.onboard() == 0
    assert client.metric("kvbm_failures_total", operation="onboard", reason="deadline_exceeded") <= 1
    assert client.link.pool is not None, "that says nothing of host memory"
