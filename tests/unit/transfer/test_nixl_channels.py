"""Who gets a channel, and when; without NIXL."""

import asyncio
from typing import Any

import pytest

from kvbus_transfer import BackendFailed
from kvbus_transfer.backends.nixl_channel import Channel
from kvbus_transfer.backends.nixl_channels import CHANNELS_PER_PEER, PeerChannels
from kvbus_transfer.regions import HostRegion


class FakeAgent:
    def __init__(self) -> None:
        self.registered: list[Any] = []

    def register_memory(self, descs: list[Any], kind: str) -> Any:
        self.registered.append(descs)
        return descs

    def deregister_memory(self, descs: Any) -> None:
        self.registered.remove(descs)


class Maker:
    def __init__(self) -> None:
        self.agents: list[FakeAgent] = []
        self.error: Exception | None = None

    async def __call__(self) -> Channel:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.agents.append(FakeAgent())
        return Channel(self.agents[-1])


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def channels(maker: Maker) -> PeerChannels:
    return PeerChannels(maker, "owner")


async def test_one_after_the_other_needs_one_channel(channels: PeerChannels, maker: Maker) -> None:
    for _ in range(5):
        channels.give(await channels.take())
    assert len(maker.agents) == 1


async def test_no_more_are_made_than_a_peer_may_have_and_who_comes_first_is_served_first(
    channels: PeerChannels, maker: Maker
) -> None:
    taken = [await channels.take() for _ in range(CHANNELS_PER_PEER)]
    order: list[int] = []

    async def use(number: int) -> None:
        channel = await channels.take()
        order.append(number)
        await asyncio.sleep(0)
        channels.give(channel)

    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(use(number))
        await asyncio.sleep(0)
        assert order == []
        for channel in taken:
            channels.give(channel)
    assert order == list(range(6))
    assert len(maker.agents) == CHANNELS_PER_PEER
    assert not channels.lent


async def test_a_turn_that_comes_with_a_cancellation_goes_to_the_next(channels: PeerChannels, maker: Maker) -> None:
    taken = [await channels.take() for _ in range(CHANNELS_PER_PEER)]
    first, second, third = (asyncio.create_task(channels.take()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    channels.give(taken[0])
    first.cancel()
    assert await third is taken[0]
    assert first.cancelled()
    assert second.cancelled()


async def test_all_who_wait_are_told_when_none_can_be_made(channels: PeerChannels, maker: Maker) -> None:
    maker.error = RuntimeError("no such device")
    for each in await asyncio.gather(*(channels.take() for _ in range(3)), return_exceptions=True):
        assert isinstance(each, BackendFailed)
        assert "no such device" in each.detail
        assert each.peer == "owner"
    maker.error = None
    assert await channels.take()


async def test_after_a_failure_no_channel_of_before_is_used_again(channels: PeerChannels, maker: Maker) -> None:
    idle, failed = [await channels.take() for _ in range(2)]
    channels.give(idle)
    channels.renew(failed)
    assert idle.is_broken
    channels.give(failed)
    failed, lent = [await channels.take() for _ in range(2)]
    channels.renew(failed)
    channels.give(failed)
    channels.give(lent)
    assert lent.is_broken
    assert await channels.take() not in (idle, failed, lent)


async def test_a_late_failure_for_the_same_reason_leaves_the_fresh_channels(channels: PeerChannels) -> None:
    failed, late = [await channels.take() for _ in range(2)]
    channels.renew(failed)
    channels.give(failed)
    fresh = await channels.take()
    channels.renew(late)
    channels.give(late)
    channels.give(fresh)
    assert await channels.take() is fresh


async def test_after_the_end_nobody_waits(channels: PeerChannels) -> None:
    taken = [await channels.take() for _ in range(CHANNELS_PER_PEER)]
    waiting = asyncio.create_task(channels.take())
    await asyncio.sleep(0)
    channels.close()
    with pytest.raises(BackendFailed):
        await waiting
    for channel in taken:
        channels.give(channel)
    assert not channels.idle
    with pytest.raises(BackendFailed):
        await channels.take()


async def test_own_memory_waits_for_the_end_of_the_read(channels: PeerChannels, maker: Maker) -> None:
    """An agent is called by one thread at a time."""
    stays, goes = HostRegion(1, bytearray(100), ""), HostRegion(2, bytearray(100), "")
    channel = await channels.take()
    agent = maker.agents[0]
    before = len(agent.registered)
    channels.add_region(stays)
    channels.add_region(goes)
    channels.remove_region(goes)
    assert len(agent.registered) == before
    channels.give(channel)
    assert len(agent.registered) == before + 1
    channels.remove_region(stays)
    assert len(agent.registered) == before
